"""Lanes: one thread and one connection each, several to an endpoint.

    put(part) ──► the endpoint's queue ──► lane: connect if needed, exchange, settle

Threads. A lane's connection is its own; put() and stop() are called by others.
Failure scope. A lost connection fails the entries that were not answered yet; the next
part finds a new one. A server that can't be reached is left alone for `reconnect_s`, and
parts fail at once meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from typing_extensions import override

from gateway.cards.base import Op, Status
from gateway.cards.parts import Lanes
from gateway.cards.resp.connection import (
    Connection,
    ConnectionLostError,
    Consumer,
    ReplyError,
    command,
)
from gateway.cards.resp.exchanges import (
    Entries,
    RespPart,
    ask_commands,
    drop_lines,
    entries_of,
    found,
    read_count,
    read_statuses,
    read_values,
    set_commands,
    stored,
)
from gateway.cards.resp.settings import Endpoint, RespSettings

_logger: Final = logging.getLogger(__name__)

_MILLISECONDS: Final = 1000


class RespLanes(Lanes[RespPart]):
    """All connections to one endpoint (see the module).

    Attributes:
        values: keys the server had when it was asked last.
        lost: connections lost since open.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: RespSettings,
        password: str,
        on_end: Callable[[RespPart], None],
    ) -> None:
        """Connect once, then start the threads.

        Args:
            endpoint: of the server.
            settings: of the card.
            password: of the settings or their file.
            on_end: called once a part, on the lane's thread.

        Raises:
            ConnectionLostError: The server can't be reached.
            ReplyError: It refuses us.
        """
        self._endpoint = endpoint
        self._settings = settings
        self._login = (settings.username, password)
        self._on_end = on_end
        self._queue: queue.SimpleQueue[RespPart | None] = queue.SimpleQueue()
        self._prefix = settings.key_prefix.encode()
        self._stopping = threading.Event()
        self._not_before = 0.0
        self._complained = False
        first = self._connect()
        connections = itertools.chain([first], itertools.repeat(None))
        self._open: dict[int, Connection] = {}
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(i, next(connections)),
                name=f"adp-card-resp-{endpoint.text}-{i}",
                daemon=True,
            )
            for i in range(settings.connections)
        ]
        for thread in self._threads:
            thread.start()

    @override
    def put(self, part: RespPart) -> None:
        self._queue.put(part)

    @override
    def stop(self, timeout_s: float) -> bool:
        """Abort what is under way, end the threads; return whether each ended in time."""
        self._stopping.set()
        for connection in list(self._open.values()):
            connection.abort()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _connect(self) -> Connection:
        return Connection.open(self._endpoint, self._login, self._settings.connect_timeout_s)

    def _run(self, number: int, connection: Connection | None) -> None:
        if connection is not None:
            self._open[number] = connection
        while (part := self._queue.get()) is not None:
            try:
                self._serve(number, part)
            except Exception:
                _logger.exception("endpoint %s: a part of a batch broke", self._endpoint.text)
                self._drop(number)
            self._on_end(part)
        self._drop(number)

    def _serve(self, number: int, part: RespPart) -> None:
        try:
            connection = self._ready(number)
            if connection is None:
                return
            self._exchange(connection, part)
        except (ConnectionLostError, ReplyError) as error:
            self._drop(number)
            if not self._stopping.is_set():
                self.lost += 1
                self._complain(str(error))
        else:
            self._complained = False
        if part.first_error:
            _logger.warning("endpoint %s: %s", self._endpoint.text, part.first_error)
        if part.values >= 0:
            self.values = part.values

    def _ready(self, number: int) -> Connection | None:
        """Return the lane's connection, a new one if need be; None while we don't try."""
        connection = self._open.get(number)
        if connection is not None and connection.is_stale():
            self._drop(number)
            connection = None
        if self._stopping.is_set():
            return None
        if connection is None:
            if time.monotonic() < self._not_before:
                return None
            try:
                connection = self._connect()
            except (ConnectionLostError, ReplyError):
                self._not_before = time.monotonic() + self._settings.reconnect_s
                raise
            self._open[number] = connection
            if self._stopping.is_set():  # stop() may have looked before
                connection.abort()
        return connection

    def _drop(self, number: int) -> None:
        connection = self._open.pop(number, None)
        if connection is not None:
            connection.close()

    def _complain(self, message: str) -> None:
        """Say it once until the server answers again."""
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        _logger.log(level, "endpoint %s: %s", self._endpoint.text, message)

    def _exchange(self, connection: Connection, part: RespPart) -> None:
        batch = part.pending.batch
        chosen = np.arange(len(part.rows), dtype=np.int64)
        if batch.op in (Op.READ, Op.WRITE) and batch.lengths is not None:
            long = batch.lengths[part.rows] > self._settings.max_value_bytes
            part.status[long] = Status.TOO_LARGE
            chosen = np.flatnonzero(~long)
        entries = entries_of(part, chosen, self._prefix)
        deadline = time.monotonic() + self._settings.io_timeout_s
        if batch.op is Op.READ:
            commands = ask_commands(b"GET", entries)
            connection.exchange(commands, read_values(connection.reader, entries), deadline)
            self._remove_corrupt(connection, part, deadline)
            return
        if batch.op is Op.WRITE:
            commands = set_commands(entries, int(self._settings.ttl_s * _MILLISECONDS))
        else:
            commands = ask_commands(b"EXISTS" if batch.op is Op.EXIST else b"DEL", entries)
        meanings = stored if batch.op is Op.WRITE else found
        changes = batch.op is not Op.EXIST
        if changes:
            commands.append(command(b"DBSIZE"))

        def replies() -> Consumer:
            yield from read_statuses(connection.reader, entries, meanings)
            if changes:
                yield from read_count(connection.reader, part)

        connection.exchange(commands, replies(), deadline)

    def _remove_corrupt(self, connection: Connection, part: RespPart, deadline: float) -> None:
        corrupt = np.flatnonzero(part.status == Status.CORRUPT)
        if corrupt.size == 0:
            return
        entries: Entries = entries_of(part, corrupt, self._prefix)
        commands = [*ask_commands(b"DEL", entries), command(b"DBSIZE")]

        def replies() -> Consumer:
            yield from drop_lines(connection.reader, corrupt.size)
            yield from read_count(connection.reader, part)

        connection.exchange(commands, replies(), deadline)

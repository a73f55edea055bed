"""A card over the Valkey/Redis protocol: one logical database of a server is a database.

    submit ──► parts of pipeline_rows ──► lanes (thread + connection) ──► server
    on_done ◄── statuses ◄── replies, values received straight into the ring

Each value is stored behind a 16-byte header with its xxh3_64 (seeded with its key) and
length (`gateway.cards.resp.exchanges`), so that another program's key, a cut value or a
value of another key is CORRUPT, and then deleted.

The server owns capacity: with `maxmemory-policy noeviction` a full one answers NO_SPACE,
with an evicting one values vanish, which a gateway reads as a miss. `ttl_s` makes every
value expire. A cluster's redirections are not followed: name its nodes' databases, or a
proxy.

Threads. `connections` lanes an endpoint, each with a connection of its own.
Durability. The server's: nothing survives its restart unless it keeps an RDB or AOF file.
Failure scope. Entries. A lost connection fails the unanswered entries of its pipeline with
IO_ERROR (a WRITE among them may have been stored); the next batch connects anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Final

import numpy as np
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.units import MiB, ceil_div
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status
from gateway.cards.batches import PendingBatch, Rows, by_database, check_batch
from gateway.cards.resp.connection import ConnectionLostError, ReplyError
from gateway.cards.resp.exchanges import Part
from gateway.cards.resp.lanes import Lanes
from gateway.cards.resp.settings import Endpoint, RespSettings

_logger: Final = logging.getLogger(__name__)

_MIN_ROWS: Final = 8  # fewer are not spread over connections
_PIPELINE_BYTES: Final = 8 * MiB
_STOP_TIMEOUT_S: Final = 5.0

_REFUSALS: Final = {
    "NOAUTH": "set password (and username)",
    "WRONGPASS": "wrong username or password",
    "ERR AUTH": "the server has no password: set none",
    "ERR DB index": "the server has no such database: lower ?db=",
    "ERR SELECT": "a cluster has database 0 alone: drop ?db=",
    "NOPERM": "let the user run GET, SET, DEL, EXISTS, DBSIZE, SELECT and PING on key_prefix*",
    "DENIED": "the server is in protected mode: set a password on it, or bind it",
    "LOADING": "the server is loading its data; start again when it is done",
}


class RespCard(Card):
    """A card of Valkey or Redis servers (see the module)."""

    def __init__(self, settings: RespSettings) -> None:
        """Make a closed card; connects to nothing."""
        self._settings = settings
        self._limits = CardLimits(settings.max_value_bytes, 1, len(settings.endpoints))
        self._lanes: list[Lanes] = []
        self._is_open = False
        self._state = threading.Condition()
        self._outstanding = 0
        self._counts = dict.fromkeys(("bytes_read", "bytes_written", "corrupt", "io_errors"), 0)

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @override
    def open(self, on_done: OnDone) -> None:
        if self._is_open:
            raise CardError("resp card: open already")
        self._on_done = on_done
        password = self._settings.read_password()
        with contextlib.ExitStack() as on_failure:
            lanes = []
            for endpoint in self._settings.parsed_endpoints:
                lanes.append(self._open_lanes(endpoint, password))
                on_failure.callback(lanes[-1].stop, _STOP_TIMEOUT_S)
            on_failure.pop_all()
        self._lanes = lanes
        self._is_open = True

    def _open_lanes(self, endpoint: Endpoint, password: str) -> Lanes:
        try:
            return Lanes(endpoint, self._settings, password, self._ended)
        except ConnectionLostError as error:
            raise CardError(
                f"endpoints: {endpoint.text}: {error}; is the server running, and is that "
                "its address?"
            ) from error
        except ReplyError as error:
            hints = (hint for start, hint in _REFUSALS.items() if str(error).startswith(start))
            hint = next(hints, "the server refuses us")
            raise CardError(f"endpoints: {endpoint.text}: {error}; {hint}") from error

    @override
    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to gain for a socket."""

    @override
    def unregister(self) -> None:
        """Nothing was announced."""

    @override
    def submit(self, batch: Batch) -> None:
        check_batch(batch, self._limits)
        with self._state:
            if not self._is_open:
                raise CardError("resp card: not open")
            self._outstanding += 1
        pending = PendingBatch(batch, self._on_done)
        parts = []
        for database, rows in by_database(
            batch.databases, np.arange(len(batch.databases), dtype=np.int64)
        ):
            size = self._part_rows(batch, rows)
            starts = range(0, len(rows), size)
            parts += [(database, Part(pending, rows[start : start + size])) for start in starts]
        pending.expect(len(parts) - 1)
        for database, part in parts:
            self._lanes[database].put(part)

    def _part_rows(self, batch: Batch, rows: Rows) -> int:
        """Return how many entries go through one pipeline."""
        share = ceil_div(len(rows), self._settings.connections)
        size = min(max(share, _MIN_ROWS), self._settings.pipeline_rows)
        if batch.lengths is not None:  # the server holds the replies to a pipeline in memory
            longest = min(int(batch.lengths[rows].max()), self._settings.max_value_bytes)
            size = min(size, max(1, _PIPELINE_BYTES // max(1, longest)))
        return size

    @override
    def stats(self) -> dict[str, int]:
        """Return counters; `values` is what the servers said last, other programs' keys too."""
        with self._state:
            counts = dict(self._counts)
        return {
            "values": sum(lanes.values for lanes in self._lanes),
            "connections_lost": sum(lanes.lost for lanes in self._lanes),
            **counts,
        }

    @override
    def close(self) -> None:
        with self._state:
            if not self._is_open:
                return
            self._is_open = False
            deadline = time.monotonic() + self._settings.close_timeout_s
            while self._outstanding and time.monotonic() < deadline:
                self._state.wait(max(0.0, deadline - time.monotonic()))
        # What is under way is aborted, but for connecting, which has its deadline.
        timeout_s = self._settings.connect_timeout_s + _STOP_TIMEOUT_S
        ended = [lanes.stop(timeout_s) for lanes in self._lanes]
        if not all(ended):
            _logger.error("resp card: a connection did not end within %g s", timeout_s)
        self._lanes = []

    def _ended(self, part: Part) -> None:
        """Settle a part; runs on a lane's thread."""
        part.settle()
        batch = part.pending.batch
        done = part.status == Status.OK
        moved = 0
        if batch.op in (Op.READ, Op.WRITE) and batch.lengths is not None:
            moved = int(batch.lengths[part.rows[done]].sum(dtype=np.int64))
        with self._state:
            if batch.op in (Op.READ, Op.WRITE):
                self._counts["bytes_read" if batch.op is Op.READ else "bytes_written"] += moved
            self._counts["corrupt"] += int((part.status == Status.CORRUPT).sum())
            self._counts["io_errors"] += int((part.status == Status.IO_ERROR).sum())
        if part.pending.settle():
            with self._state:
                self._outstanding -= 1
                self._state.notify_all()

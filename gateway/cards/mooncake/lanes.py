"""Lanes: threads that call the engine, several to a store.

    put(part) ──► the store's queue ──► lane: run the part, settle

Threads. Each lane is blocked while its call is under way; the gateway goes on.
put(), register(), unregister() and stop() are called by others.
Failure scope. A master that does not answer is left alone for `reconnect_s`, then one lane
tries again; the others' parts fail at once meanwhile, for a call into the void takes
seconds. The engine itself finds a master that came back, so nothing is opened anew.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from typing_extensions import override

from gateway.cards.base import Status
from gateway.cards.batches import WorkerPool
from gateway.cards.mooncake.engine import Engine, meaning
from gateway.cards.mooncake.exchanges import MooncakePart, Scratch, Tools, run
from gateway.cards.mooncake.settings import Master, MooncakeSettings
from gateway.cards.parts import PART_BYTES, Lanes

_logger: Final = logging.getLogger(__name__)

_ROUNDING: Final = 64


class Gate:
    """Lets everybody through while the master answers, else one at a time."""

    def __init__(self, reconnect_s: float) -> None:
        """Start open."""
        self._reconnect_s = reconnect_s
        self._lock = threading.Lock()
        self._answers = True
        self._trying = False
        self._not_before = 0.0

    def enter(self) -> bool:
        """Return whether the caller may ask the master; leave() follows then."""
        with self._lock:
            if self._answers:
                return True
            if self._trying or time.monotonic() < self._not_before:
                return False
            self._trying = True
            return True

    def leave(self, *, answered: bool) -> bool:
        """Say how it went; return whether that is news."""
        with self._lock:
            changed = answered != self._answers
            self._answers = answered
            self._trying = False
            if not answered:
                self._not_before = time.monotonic() + self._reconnect_s
            return changed


class MooncakeLanes(Lanes[MooncakePart]):
    """All threads for one store (see the module).

    Attributes:
        values: stored and removed through this card since it was opened.
        lost: times the master stopped answering.
    """

    def __init__(
        self, master: Master, settings: MooncakeSettings, on_end: Callable[[MooncakePart], None]
    ) -> None:
        """Connect, and start the threads.

        Args:
            master: the store.
            settings: the card's.
            on_end: called with each part on a lane's thread.

        Raises:
            CardError: The store can't be used.
        """
        self._master = master
        self._settings = settings
        self._on_end = on_end
        self._prefix = settings.key_prefix + (f"{master.space}/" if master.space else "")
        self._engine = Engine(master, settings)
        self._gate = Gate(settings.reconnect_s)
        self._counting = threading.Lock()
        self._complained = False
        self._stopping = False
        self._announced: tuple[tuple[int, int], ...] = ()
        self._scratches: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        stage_bytes = max(PART_BYTES, settings.max_value_bytes) + _ROUNDING * settings.batch_rows
        for _ in range(settings.threads):
            scratch = Scratch(settings.batch_rows, stage_bytes)
            self._engine.register(scratch.address, scratch.num_bytes)
            self._scratches.put(scratch)
        self._pool = WorkerPool(f"adp-card-mooncake-{master.text}", settings.threads)

    @override
    def put(self, part: MooncakePart) -> None:
        self._pool.put(functools.partial(self._serve, part))

    @override
    def register(self, address: int, num_bytes: int) -> None:
        """Announce memory; what the engine refuses goes through a copy."""
        if self._engine.register(address, num_bytes):
            self._announced = (*self._announced, (address, address + num_bytes))
        else:
            _logger.warning(
                "master %s: the engine does not take %d bytes of memory (with rdma: is "
                "RLIMIT_MEMLOCK high enough?); values are copied",
                self._master.text,
                num_bytes,
            )

    @override
    def unregister(self) -> None:
        announced, self._announced = self._announced, ()
        for start, _ in announced:
            self._engine.unregister(start)

    @override
    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        ended = self._pool.stop(timeout_s)
        if ended:  # a call that is under way does not survive its engine
            self._engine.close()
        return ended

    def _serve(self, part: MooncakePart) -> None:
        try:
            if not self._stopping and self._gate.enter():
                self._run(part)
        finally:
            self._on_end(part)

    def _run(self, part: MooncakePart) -> None:
        scratch = self._scratches.get()
        tools = Tools(
            self._engine,
            scratch,
            self._announced,
            self._prefix,
            self._settings.max_value_bytes,
        )
        answered = True
        try:
            run(part, tools)
            answered = part.answered
        except Exception:
            _logger.exception("master %s: a part of a batch broke", self._master.text)
        finally:
            self._scratches.put(scratch)
            news = self._gate.leave(answered=answered)
        with self._counting:
            self.values = max(0, self.values + part.change)
            self.lost += news and not answered
        self._complain(part)

    def _complain(self, part: MooncakePart) -> None:
        """Say it once until a part ends without an error."""
        if not part.first_error:
            self._complained = False
            return
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        _logger.log(
            level,
            "master %s: %s failed for %d of %d entries: %s",
            self._master.text,
            part.pending.batch.op.name,
            np.count_nonzero(part.status == Status.IO_ERROR),
            len(part.rows),
            meaning(part.first_error),
        )

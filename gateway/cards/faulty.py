"""A card that fails on request, around one that works: for tests of the layers above.

    FaultyCard(MemoryCard(...), [Fault(Status.IO_ERROR, ops={Op.READ}, probability=0.1)], seed=7)

The same seed, faults and sequence of batches fail the same entries. An entry that a fault
answers never reaches the inner card: a WRITE is not stored, a DELETE deletes nothing.
Memory of a failed READ is scribbled over, as the contract allows a card to do.

Threads. Answers come from the inner card's threads or from one of this card's, never
from inside submit().
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Batch, Card, CardLimits, OnDone, Op, Status, StatusArray
from gateway.cards.batches import Rows, check_batch

_logger: Final = logging.getLogger(__name__)

KeyPredicate: TypeAlias = Callable[[KeyArray], NDArray[np.bool_]]

_SCRIBBLE: Final = 0xEE
_JOIN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and for which entries; the first fault that hits one counts.

    Attributes:
        status: the answer; None lets the entry through, only late.
        ops: operations it concerns.
        probability: of each entry that `when` picks.
        when: bool [n] of uint64 [n, 2] keys; None picks all.
        delay_s: the whole batch is answered this much later.
    """

    status: Status | None = None
    ops: AbstractSet[Op] = frozenset(Op)
    probability: float = 1.0
    when: KeyPredicate | None = None
    delay_s: float = 0.0


@dataclass(order=True, slots=True)
class _LateAnswer:
    due: float
    number: int
    give: Callable[[], None] = field(compare=False)


class FaultyCard(Card):
    """A card around another (see the module).

    Attributes:
        faults: in force for the next batch; replace at will from the submitting thread.
        gone: while true every entry is IO_ERROR, as of a card that was pulled out.
    """

    def __init__(self, inner: Card, faults: Iterable[Fault] = (), seed: int = 0) -> None:
        """Wrap `inner`, which this card opens and closes."""
        self.faults = list(faults)
        self.gone = False
        self._inner = inner
        self._rng = np.random.default_rng(seed)
        self._tokens = itertools.count()
        self._under_way: dict[int, Callable[[StatusArray], None]] = {}
        self._late: list[_LateAnswer] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    @override
    def limits(self) -> CardLimits:
        return self._inner.limits

    @override
    def open(self, on_done: OnDone) -> None:
        self._on_done = on_done
        self._closing = False
        self._inner.open(self._inner_done)
        self._thread = threading.Thread(target=self._deliver, name="adp-card-faulty", daemon=True)
        self._thread.start()

    @override
    def register(self, address: int, num_bytes: int) -> None:
        self._inner.register(address, num_bytes)

    @override
    def unregister(self) -> None:
        self._inner.unregister()

    @override
    def submit(self, batch: Batch) -> None:
        check_batch(batch, self.limits)
        if self._thread is None:
            raise CardError("faulty card: not open")
        status, delay_s = self._decide(batch)
        failed = status >= 0
        _scribble(batch, failed)
        kept = np.flatnonzero(~failed)
        if kept.size == 0:
            self._answer_later(batch.token, status.astype(np.uint8), delay_s)
            return
        token = next(self._tokens)
        self._under_way[token] = functools.partial(self._merge, batch.token, status, kept, delay_s)
        try:
            self._inner.submit(_part(batch, token, kept))
        except CardError:
            del self._under_way[token]
            raise

    @override
    def stats(self) -> dict[str, int]:
        return self._inner.stats()

    @override
    def latencies(self) -> dict[int, Histogram]:
        return self._inner.latencies()

    @override
    def close(self) -> None:
        """Close the inner card and give every late answer at once."""
        self._inner.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._wake:
                self._closing = True
                self._wake.notify()
            thread.join(_JOIN_TIMEOUT_S)

    def _decide(self, batch: Batch) -> tuple[NDArray[np.int64], float]:
        """Return the status of each entry, -1 where it goes through, and the batch's delay."""
        n = len(batch.databases)
        status = np.full(n, Status.IO_ERROR if self.gone else -1, dtype=np.int64)
        undecided = np.full(n, not self.gone)
        delay_s = 0.0
        for fault in self.faults:
            if batch.op not in fault.ops:
                continue
            # Drawn for all entries: what one fault hits must not shift the next one's draws.
            hit = undecided & (self._rng.random(n) < fault.probability)
            if fault.when is not None:
                hit &= fault.when(batch.keys)
            if hit.any():
                delay_s = max(delay_s, fault.delay_s)
                undecided &= ~hit
                if fault.status is not None:
                    status[hit] = fault.status
        return status, delay_s

    def _inner_done(self, token: int, inner_status: StatusArray) -> None:
        self._under_way.pop(token)(inner_status)

    def _merge(
        self,
        token: int,
        status: NDArray[np.int64],
        kept: Rows,
        delay_s: float,
        inner_status: StatusArray,
    ) -> None:
        status[kept] = inner_status
        merged = status.astype(np.uint8)
        if delay_s > 0:
            self._answer_later(token, merged, delay_s)
        else:
            self._on_done(token, merged)

    def _answer_later(self, token: int, status: StatusArray, delay_s: float) -> None:
        due = time.monotonic() + delay_s
        give = functools.partial(self._on_done, token, status)
        with self._wake:
            heapq.heappush(self._late, _LateAnswer(due, next(self._tokens), give))
            self._wake.notify()

    def _deliver(self) -> None:
        while (answer := self._next_answer()) is not None:
            try:
                answer()
            except Exception:
                _logger.exception("on_done failed")

    def _next_answer(self) -> Callable[[], None] | None:
        with self._wake:
            while True:
                left_s = self._late[0].due - time.monotonic() if self._late else None
                if left_s is not None and (left_s <= 0 or self._closing):
                    return heapq.heappop(self._late).give
                if self._closing:
                    return None
                self._wake.wait(left_s)


def _part(batch: Batch, token: int, rows: Rows) -> Batch:
    return Batch(
        op=batch.op,
        token=token,
        databases=batch.databases[rows],
        keys=batch.keys[rows],
        addresses=None if batch.addresses is None else batch.addresses[rows],
        lengths=None if batch.lengths is None else batch.lengths[rows],
    )


def _scribble(batch: Batch, failed: NDArray[np.bool_]) -> None:
    if batch.op is not Op.READ or batch.addresses is None or batch.lengths is None:
        return
    for address, length in zip(
        batch.addresses[failed].tolist(), batch.lengths[failed].tolist(), strict=True
    ):
        ctypes.memset(address, _SCRIBBLE, length)

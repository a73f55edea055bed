"""A card that fails on request, around one that works: for tests of the layers above.

    FaultyCard(MemoryCard(...), [Fault(Status.IO_ERROR, ops={Op.READ}, probability=0.1)], seed=7)

    fault                            what it is like
    Fault(IO_ERROR), Fault(NO_SPACE) EIO, ENOSPC
    Fault(CORRUPT)                   a checksum that did not match
    Fault(damage="short")            a READ that stopped half way: CORRUPT
    Fault(damage="flip")             a READ with a wrong bit: CORRUPT
    Fault(delay_s=2)                 a slow card
    Fault(silent=True)               no answer at all, until answer_all()
    Fault(hold=5)                    answers held until there are 5, then in reverse order
    card.gone = True                 pulled out: IO_ERROR; False: it came back

The same seed, faults and sequence of batches fail the same entries. An entry that a fault
answers with a status never reaches the inner card: a WRITE is not stored, a DELETE deletes
nothing. Memory of a failed READ is scribbled over, as the contract allows a card to do.
A silent entry reaches the inner card when answer_all() lets it: late, with the memory as it
is then, as a command would that hung on its way.

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
from typing import Final, Literal, TypeAlias

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
        databases: databases it concerns; None for all.
        probability: of each entry that `when` picks.
        when: bool [n] of uint64 [n, 2] keys; None picks all.
        delay_s: the whole batch is answered this much later.
        damage: what happens to the bytes of a READ that the inner card answered OK.
        silent: the whole batch is kept back until answer_all().
        hold: the whole batch's answer waits for others, this many in all.
    """

    status: Status | None = None
    ops: AbstractSet[Op] = frozenset(Op)
    probability: float = 1.0
    when: KeyPredicate | None = None
    delay_s: float = 0.0
    databases: AbstractSet[int] | None = None
    damage: Literal["", "short", "flip"] = ""
    silent: bool = False
    hold: int = 0


@dataclass(slots=True)
class _Verdict:
    """What the faults make of a batch.

    Attributes:
        status: int64 [n], -1 where the entry goes through.
        damaged: which READs lose bytes, by the kind of damage.
    """

    status: NDArray[np.int64]
    damaged: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    delay_s: float = 0.0
    silent: bool = False
    hold: int = 0


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
        self._silent: list[tuple[Batch, _Verdict]] = []
        self._held: list[Callable[[], None]] = []
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
        verdict = self._decide(batch)
        if verdict.silent:
            with self._wake:
                self._silent.append((batch, verdict))
        else:
            self._go(batch, verdict)

    def _go(self, batch: Batch, verdict: _Verdict) -> None:
        failed = verdict.status >= 0
        _scribble(batch, failed)
        kept = np.flatnonzero(~failed)
        if kept.size == 0:
            self._answer_later(batch.token, verdict.status.astype(np.uint8), verdict)
            return
        token = next(self._tokens)
        self._under_way[token] = functools.partial(self._merge, batch, verdict, kept)
        try:
            self._inner.submit(_part(batch, token, kept))
        except CardError:
            del self._under_way[token]
            raise

    def answer_all(self) -> None:
        """Let the silent batches through, and give the answers that are held."""
        with self._wake:
            silent, self._silent = self._silent, []
            held, self._held = self._held, []
        for batch, verdict in silent:
            self._go(batch, verdict)
        for give in reversed(held):
            self._push(give, 0.0)

    @override
    def stats(self) -> dict[str, int]:
        return self._inner.stats()

    @override
    def latencies(self) -> dict[int, Histogram]:
        return self._inner.latencies()

    @override
    def close(self) -> None:
        """Close the inner card and give every late answer at once; silent ones never."""
        self._inner.close()
        with self._wake:
            held, self._held = self._held, []
        for give in held:
            self._push(give, 0.0)
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._wake:
                self._closing = True
                self._wake.notify()
            thread.join(_JOIN_TIMEOUT_S)

    def _decide(self, batch: Batch) -> _Verdict:
        n = len(batch.databases)
        verdict = _Verdict(np.full(n, Status.IO_ERROR if self.gone else -1, dtype=np.int64))
        undecided = np.full(n, not self.gone)
        for fault in self.faults:
            if batch.op not in fault.ops:
                continue
            # Drawn for all entries: what one fault hits must not shift the next one's draws.
            hit = undecided & (self._rng.random(n) < fault.probability)
            if fault.databases is not None:
                hit &= np.isin(batch.databases, list(fault.databases))
            if fault.when is not None:
                hit &= fault.when(batch.keys)
            if hit.any():
                undecided &= ~hit
                verdict.delay_s = max(verdict.delay_s, fault.delay_s)
                verdict.silent |= fault.silent
                verdict.hold = max(verdict.hold, fault.hold)
                if fault.status is not None:
                    verdict.status[hit] = fault.status
                if fault.damage and batch.op is Op.READ:
                    verdict.damaged[fault.damage] = hit | verdict.damaged.get(fault.damage, False)
        return verdict

    def _inner_done(self, token: int, inner_status: StatusArray) -> None:
        self._under_way.pop(token)(inner_status)

    def _merge(
        self, batch: Batch, verdict: _Verdict, kept: Rows, inner_status: StatusArray
    ) -> None:
        merged = verdict.status.astype(np.uint8)
        merged[kept] = inner_status
        for kind, hit in verdict.damaged.items():
            hurt = np.flatnonzero(hit & (merged == Status.OK))
            _damage(batch, hurt, kind)
            merged[hurt] = Status.CORRUPT
        if verdict.delay_s > 0 or verdict.hold:
            self._answer_later(batch.token, merged, verdict)
        else:
            self._on_done(batch.token, merged)

    def _answer_later(self, token: int, status: StatusArray, verdict: _Verdict) -> None:
        give = functools.partial(self._on_done, token, status)
        if not verdict.hold:
            self._push(give, verdict.delay_s)
            return
        with self._wake:
            self._held.append(give)
            complete = len(self._held) >= verdict.hold
            held = self._held if complete else []
            self._held = [] if complete else self._held
        for one in reversed(held):
            self._push(one, 0.0)

    def _push(self, give: Callable[[], None], delay_s: float) -> None:
        due = time.monotonic() + delay_s
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
        groups=None if batch.groups is None else batch.groups[rows],
        namespace=batch.namespace,
    )


def _scribble(batch: Batch, failed: NDArray[np.bool_]) -> None:
    if batch.op is not Op.READ or batch.addresses is None or batch.lengths is None:
        return
    for address, length in zip(
        batch.addresses[failed].tolist(), batch.lengths[failed].tolist(), strict=True
    ):
        ctypes.memset(address, _SCRIBBLE, length)


def _damage(batch: Batch, rows: Rows, kind: str) -> None:
    """Spoil what READs brought: the second half of the bytes, or one bit."""
    if batch.addresses is None or batch.lengths is None:
        return
    for address, length in zip(
        batch.addresses[rows].tolist(), batch.lengths[rows].tolist(), strict=True
    ):
        if kind == "short":
            ctypes.memset(address + length // 2, _SCRIBBLE, length - length // 2)
        elif length:
            byte = ctypes.c_uint8.from_address(address + length // 2)
            byte.value ^= 0x10

"""What gets and puts have in common: one request of all ranks, served in slot batches.

    every rank of the group sends it ─► slots ─► Granted to all ─► Release by all ─► slots free

Requests of a table are served in the order of their first arrival, so that an earlier
layer never waits for a later one. Slots of a batch belong to the ranks from Granted
until the last Release; only the end of the session takes them away sooner, and then
the whole ring goes with them.

Threads: the gateway's main. Failure scope: a request that a rank stays away from past
rank_deadline_s, or on which ranks disagree, fails for all of its ranks; those that send
it later are told at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import WireError
from adp_kv.ring.region import RingMapping
from adp_kv.ring.slots import SlotAllocator
from adp_kv.units import MiB, ceil_div
from adp_kv.wire.frames import pack_slots
from adp_kv.wire.keys import KeyArray, object_keys, unpack_keys
from adp_kv.wire.messages import NO_SLOT, Failed, Get, Granted, Put, Release, ToRank
from gateway.cards.base import Status, StatusArray
from gateway.counters import Counters
from gateway.objects import ObjectStore
from gateway.session import Session

FIRST_BATCH_BYTES = 16 * MiB
MAX_OBJECTS = 1 << 22
"""Objects of one request; 47,000 are a prompt of 196,000 tokens in 61 layers."""


@dataclass(slots=True)
class SlotBatch:
    """Objects first .. first+len(slots)-1 of a request; NO_SLOT where none is needed.

    Attributes:
        at_card: the card may touch the slots; a batch that is dropped then keeps them.
    """

    first: int
    slots: NDArray[np.uint32]
    status: StatusArray | None = None
    granted_at: float | None = None
    released: set[int] = field(default_factory=set)
    refused: bool = False
    at_card: bool = False
    dropped: bool = False

    @property
    def span(self) -> slice:
        """The batch's objects in the request."""
        return slice(self.first, self.first + len(self.slots))

    @property
    def wanted(self) -> NDArray[np.bool_]:
        """Which objects have a slot: bool [n]."""
        return np.not_equal(self.slots, NO_SLOT)


@dataclass(slots=True)
class Request:
    """A get or put between its first message and its last release.

    Attributes:
        objects: uint64 [n, 2] keys, cache-major; lengths: int64 [n] bytes.
        num_started: objects that have been given a batch.
    """

    message: Get | Put
    group: tuple[int, ...]
    chunks: KeyArray
    objects: KeyArray
    lengths: NDArray[np.int64]
    opened_at: float
    deadline: float
    arrived: set[int] = field(default_factory=set)
    num_started: int = 0
    batches: dict[int, SlotBatch] = field(default_factory=dict)
    failed: bool = False

    @property
    def seq(self) -> int:
        """The number by which all ranks know it."""
        return self.message.seq

    @property
    def all_arrived(self) -> bool:
        """Whether every rank of the group has sent it."""
        return len(self.arrived) == len(self.group)

    def chunk_of(self, object_idx: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of chunks that each object belongs to."""
        return object_idx % len(self.chunks)


@dataclass(slots=True)
class FailedEarly:
    """A request that failed before every rank had sent it: what the others will be told."""

    reason: str
    missing: set[int]
    forget_at: float


@dataclass(frozen=True, slots=True)
class Context:
    """What one session's tables work with.

    Attributes:
        send: delivers a message to a rank.
        batch_bytes: a batch is granted at about this size at most, so that ranks copy early.
        read_ahead_bytes: of ring slots that hold what no rank has asked for yet; 0: none.
        rank_deadline_s: how long the first rank of a request waits for the last.
    """

    session: Session
    store: ObjectStore
    mapping: RingMapping
    send: Callable[[int, ToRank], None]
    counters: Counters
    clock: Callable[[], float]
    batch_bytes: int
    read_ahead_bytes: int
    rank_deadline_s: float


class Ramp:
    """How large the next batch is: small after idle time, then each twice the one before.

    The link has work soon, and yet a batch costs gateway and ranks some time whatever its size.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Begin small again."""
        self._next = FIRST_BATCH_BYTES

    @property
    def batch_bytes(self) -> int:
        """Bytes of the next batch, at most."""
        return min(self._next, self._most)

    def begun(self, num_bytes: int) -> None:
        """Note a batch; a shorter one makes the next no smaller."""
        self._next = max(self._next, 2 * num_bytes)


class RequestTable(ABC):
    """All requests of one direction in one session.

    Attributes:
        num_withheld: slots of dropped batches that the card may still touch.
    """

    kind: str

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._slots = SlotAllocator(context.mapping.header.num_slots)
        self._requests: dict[int, Request] = {}
        self._failed_early: dict[int, FailedEarly] = {}
        self.num_withheld = 0

    @property
    def num_slots(self) -> int:
        """Slots of this direction."""
        return self._slots.num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots of this direction that nobody holds."""
        return self._slots.num_free

    @property
    def withheld(self) -> int:
        """Slots that nobody has, but that the card may still touch."""
        return self.num_withheld

    @property
    def num_requests(self) -> int:
        """Requests between their first message and their end."""
        return len(self._requests)

    def admit(self, rank: int, message: Get | Put) -> None:
        """Take one rank's request.

        Raises:
            WireError: It is malformed; nothing changed.
        """
        group = self._ctx.session.group_of(message.caches, rank)
        if self._tell_late(rank, message.seq):
            return
        request = self._requests.get(message.seq)
        if request is None:
            request = self._open(message, group)
        elif request.failed:
            self._ctx.send(rank, Failed(message.seq, "it has failed before"))
            return
        elif request.message != message:
            self._disagree(request, rank)
            return
        elif rank in request.arrived:
            return
        request.arrived.add(rank)
        if request.all_arrived:
            self._observe("ranks", request.opened_at)
            self._on_complete(request)
        self.pump()

    def _tell_late(self, rank: int, seq: int) -> bool:
        """Answer a rank that sends what has failed without it; return whether it was that."""
        failed = self._failed_early.get(seq)
        if failed is None or rank not in failed.missing:
            return False
        failed.missing.discard(rank)
        if not failed.missing:
            del self._failed_early[seq]
        self._ctx.send(rank, Failed(seq, failed.reason))
        return True

    def _open(self, message: Get | Put, group: tuple[int, ...]) -> Request:
        chunks = unpack_keys(message.chunks)
        if not len(chunks):
            raise WireError(f"a {self.kind} names no chunk")
        if len(chunks) * len(message.caches) > MAX_OBJECTS:
            raise WireError(
                f"a {self.kind} of {len(chunks)} chunks of {len(message.caches)} caches is more "
                f"than {MAX_OBJECTS} objects"
            )
        caches = self._ctx.session.caches
        sizes = [caches[c].object_bytes for c in message.caches]
        now = self._ctx.clock()
        request = Request(
            message=message,
            group=group,
            chunks=chunks,
            objects=object_keys(chunks, message.caches),
            lengths=np.repeat(np.array(sizes, dtype=np.int64), len(chunks)),
            opened_at=now,
            deadline=now + self._ctx.rank_deadline_s,
        )
        self._on_open(request)
        self._requests[message.seq] = request
        self._ctx.counters.add(f"{self.kind}s")
        self._ctx.counters.add(f"{self.kind}_objects", len(request.objects))
        return request

    def _observe(self, phase: str, since: float) -> None:
        self._ctx.counters.observe(f"{self.kind}:{phase}", self._ctx.clock() - since)

    def _disagree(self, request: Request, rank: int) -> None:
        first = min(request.arrived)
        request.arrived.add(rank)
        self._ctx.counters.add("rank_disagreements")
        self._fail(
            request,
            f"ranks {first} and {rank} disagree on {self.kind} {request.seq:#x}: they name "
            "different caches or chunks",
        )

    def _next_count(self, request: Request, batch_bytes: int) -> int:
        """Return how many objects the next batch should have: the rest in equal parts."""
        left = request.lengths[request.num_started :]
        most = min(max(1, batch_bytes // int(left.max())), max(1, self._slots.num_slots // 2))
        return ceil_div(len(left), ceil_div(len(left), most))

    def _grant(self, request: Request, batch: SlotBatch) -> None:
        batch.granted_at = self._ctx.clock()
        self._ctx.counters.add(f"{self.kind}_grants")
        status = b"" if batch.status is None else batch.status.tobytes()
        message = Granted(request.seq, batch.first, pack_slots(batch.slots), status)
        for rank in request.group:
            self._ctx.send(rank, message)

    def release(self, rank: int, release: Release) -> bool:
        """Take a batch back from one rank; False if the request is not of this table.

        Raises:
            WireError: The batch was not granted to this rank, or it released it before.
        """
        request = self._requests.get(release.seq)
        if request is None:
            return False
        batch = request.batches.get(release.first)
        if batch is None or batch.granted_at is None or rank not in request.group:
            raise WireError(
                f"rank {rank} releases a batch of {self.kind} {release.seq:#x} that it never had"
            )
        if rank in batch.released:
            raise WireError(f"rank {rank} releases a batch of {self.kind} {release.seq:#x} twice")
        batch.released.add(rank)
        batch.refused |= not release.ok
        if len(batch.released) == len(request.group):
            self._observe("copy", batch.granted_at)
            self._on_released(request, batch)
            self.pump()
        return True

    def _drop(self, request: Request, batch: SlotBatch) -> None:
        """Free a batch's slots; the request ends with its last batch."""
        del request.batches[batch.first]
        batch.dropped = True
        if batch.at_card:  # it did not answer in time: what it does late must meet no other object
            self.num_withheld += int(batch.wanted.sum())
        else:
            self._slots.free(batch.slots[batch.wanted])
        started_all = request.failed or request.num_started == len(request.objects)
        if started_all and not request.batches:
            self._end(request)

    def _end(self, request: Request) -> None:
        if self._requests.pop(request.seq, None) is None:
            return
        given_up = len(request.objects) - request.num_started
        self._ctx.counters.add(f"{self.kind}_objects_given_up", given_up)
        self._observe("total", request.opened_at)
        self._on_end(request)

    def abandon(self) -> None:
        """The session has ended: nothing starts any more, what the card still does is counted."""
        for request in list(self._requests.values()):
            request.failed = True
            for batch in list(request.batches.values()):
                if batch.granted_at is None and batch.status is not None:
                    self._drop(request, batch)  # read, for ranks that had not all asked
                elif batch.granted_at is not None and len(batch.released) < len(request.group):
                    # Its slots stay taken: they go with the ring.
                    self._on_abandoned(batch)
                    del request.batches[batch.first]
            if not request.batches:
                self._end(request)

    def _on_quiet(self, batch: SlotBatch) -> None:
        """Take note that the card is done with a batch, in time or late."""
        batch.at_card = False
        if batch.dropped:
            self.num_withheld -= int(batch.wanted.sum())
            self._slots.free(batch.slots[batch.wanted])
            self.pump()

    def _fail(self, request: Request, reason: str) -> None:
        if request.failed:
            return
        request.failed = True
        self._ctx.counters.add(f"{self.kind}s_failed")
        for rank in sorted(request.arrived):
            self._ctx.send(rank, Failed(request.seq, reason))
        missing = set(request.group) - request.arrived
        if missing:
            forget_at = self._ctx.clock() + self._ctx.rank_deadline_s
            self._failed_early[request.seq] = FailedEarly(reason, missing, forget_at)
        for batch in list(request.batches.values()):
            if batch.granted_at is None and batch.status is not None:
                self._drop(request, batch)
        if not request.batches:
            self._end(request)

    def tick(self) -> None:
        """Fail what a rank stayed away from, and serve what waits."""
        now = self._ctx.clock()
        for request in list(self._requests.values()):
            if not request.all_arrived and now > request.deadline:
                missing = min(set(request.group) - request.arrived)
                self._fail(
                    request,
                    f"rank {missing} did not send {self.kind} {request.seq:#x} within "
                    f"rank_deadline_s = {self._ctx.rank_deadline_s:g} s",
                )
            elif self.withheld and not request.batches and now > request.deadline:
                self._fail(request, "the card does not answer, and has the ring slots it needs")
        for seq, failed in list(self._failed_early.items()):
            if now > failed.forget_at:
                del self._failed_early[seq]
        self.pump()

    def overdue(self, lease_s: float) -> str | None:
        """Return what is wrong if a rank kept a granted batch beyond its lease."""
        now = self._ctx.clock()
        for request in self._requests.values():
            for batch in request.batches.values():
                late = set(request.group) - batch.released
                if late and batch.granted_at is not None and now > batch.granted_at + lease_s:
                    return (
                        f"rank {min(late)} kept ring slots of {self.kind} {request.seq:#x} beyond "
                        f"lease_s = {lease_s:g} s"
                    )
        return None

    @abstractmethod
    def pump(self) -> None:
        """Start batches while slots are free."""

    @abstractmethod
    def _on_open(self, request: Request) -> None:
        """Check a new request further; may raise WireError."""

    @abstractmethod
    def _on_complete(self, request: Request) -> None:
        """Handle the arrival of the last rank."""

    @abstractmethod
    def _on_released(self, request: Request, batch: SlotBatch) -> None:
        """Handle the last rank's release of a batch."""

    @abstractmethod
    def _on_abandoned(self, batch: SlotBatch) -> None:
        """Handle a batch that ranks held when the session ended."""

    @abstractmethod
    def _on_end(self, request: Request) -> None:
        """Handle the end of a request, failed or not."""


def count_failures(counters: Counters, name: str, status: StatusArray) -> None:
    """Count entries that are not OK under name, and by reason under name:reason."""
    if not status.any():
        return
    codes, counts = np.unique(status[status != 0], return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        reason = Status(code).name.lower() if code in set(Status) else "unknown"
        counters.add(name, count)
        counters.add(f"{name}:{reason}", count)


def ignore(_status: StatusArray) -> None:
    """Continuation of a batch whose outcome changes nothing."""

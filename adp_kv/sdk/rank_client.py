"""The client of one worker rank: asks the gateway and moves pages through the ring.

    restore  Get ─► Granted(slots, status) ─► mover.restore ─► bytes arrived ─► Release
    save     Put ─► Granted(slots)         ─► mover.save    ─► ring filled   ─► Release
    replicated caches, with a fan-out:         fanout.restore, by all ranks of a group alike

Threads: submit_* may be called by the forward pass and never block; everything else
runs on the loop's thread, which alone uses the channel and the mover. The order of
requests is the order of calls.

Failure scope: an object that can't be read, a copy that fails or a request the gateway
fails concerns its job; a gateway that is gone abandons every job and turns the external
cache off on this rank. Ring slots are released only after the last copy that touches
them has ended, or with the ring.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import GatewayError, TransferError
from adp_kv.fanout.fanout import Fanout
from adp_kv.fanout.plan import Shape
from adp_kv.layout.geometry import CacheGeometry, CacheStack
from adp_kv.ring.region import RingMapping, attach
from adp_kv.sdk.jobs import Job
from adp_kv.sdk.loop import ChannelLoop
from adp_kv.transfer.base import Mark, Mover, SliceCopy, Ticket
from adp_kv.wire.frames import unpack_slots
from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import (
    NO_SLOT,
    Attached,
    CacheDecl,
    Failed,
    Get,
    Granted,
    Hello,
    Put,
    Release,
    ToRank,
    Welcome,
)

log = logging.getLogger("adp_kv")

POLL_S = 0.001  # the least that ZeroMQ's poller waits
IDLE_S = 1.0
CLOSE_GRACE_S = 1.0
_STEP_SHIFT = 24
_KIND_SHIFT = 20
RESTORE, ASYNC_RESTORE, SAVE_LAYER, SAVE_REST = range(4)
_KEPT: list[RankClient] = []
"""Clients that ended while their device still had work of theirs. It may touch ring, staging and
tables whenever it goes on: nobody else gets that memory as long as the process lives."""


@dataclass(slots=True)
class Transfer:
    """One request to the gateway and what is known of it."""

    job: Job
    stack: CacheStack
    mark: Mark | None
    is_put: bool
    num_granted: int = 0

    @property
    def num_objects(self) -> int:
        """Objects of the request."""
        return len(self.stack.caches) * self.job.num_chunks


@dataclass(slots=True)
class Flight:
    """A granted batch; tickets: its copies that have not ended, ok: none has failed."""

    seq: int
    first: int
    num_objects: int
    job: Job
    tickets: list[Ticket] = field(default_factory=list)
    ok: bool = True


class RankClient(ChannelLoop):
    """Moves this rank's pages.

    Args:
        hello: with this rank's caches.
        caches: their geometry.
        mover: moves the bytes; used and closed by the loop's thread.
        scratch_address: device address of max(page_bytes) bytes that nobody reads, where
            pages go that a restore brings but nobody wants.
        address, timeout_s, connect_timeout_s: of the channel.

    Attributes:
        fanout: exchanges replicated caches; set before start(), closed by the loop's thread.
    """

    def __init__(
        self,
        hello: Hello,
        caches: Sequence[CacheGeometry],
        mover: Mover,
        scratch_address: int,
        address: str,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        super().__init__(hello, address, timeout_s, connect_timeout_s)
        self.caches = {cache.index: cache for cache in caches}
        self.mover = mover
        self.fanout: Fanout | None = None
        self.counts: dict[str, int] = {}
        self._scratch_address = scratch_address
        self._mapping: RingMapping | None = None
        self._transfers: dict[int, Transfer] = {}
        self._stacks: dict[tuple[int, ...], CacheStack] = {}  # a few: a layer's, a step's
        self._flights: list[Flight] = []
        self._live: list[Job] = []
        self._live_lock = threading.Lock()

    def submit_restore(self, job: Job, kind: int, mark: Mark | None) -> None:
        """Start a restore: one get a cache, in the order of the job's caches."""
        self._submit(job, lambda: self._ask_all(job, kind, mark))

    def submit_save(self, job: Job, kind: int, caches: list[CacheGeometry], mark: Mark) -> None:
        """Start saving some caches of a job, final after mark, as one put."""
        self._submit(job, lambda: self._ask(job, kind, caches, mark, is_put=True))

    def _submit(self, job: Job, function: Callable[[], None]) -> None:
        with self._live_lock:
            self._live = [j for j in self._live if not j.abandoned and not j.finished]
            self._live.append(job)
        self.call(function)
        if self.off:  # it may have gone off before this job was among the living
            job.abandon(self.off_reason or "off")

    def _ask_all(self, job: Job, kind: int, mark: Mark | None) -> None:
        for cache in job.caches:
            self._ask(job, kind, [cache], mark, is_put=False)

    def _ask(
        self, job: Job, kind: int, caches: list[CacheGeometry], mark: Mark | None, *, is_put: bool
    ) -> None:
        if job.abandoned:
            return
        indices = [cache.index for cache in caches]
        stack = self._stacks.get(key := tuple(indices))
        if stack is None:
            stack = self._stacks[key] = CacheStack(caches)
        seq = (job.number << _STEP_SHIFT) | (kind << _KIND_SHIFT) | indices[0]
        self._transfers[seq] = Transfer(job, stack, mark, is_put)
        chunks = pack_keys(job.chunks)
        if is_put:
            self.channel.send(Put(seq, job.number, indices, chunks))
        else:
            self.channel.send(Get(seq, indices, chunks))

    def on_welcome(self, welcome: Welcome) -> None:
        """Map the ring, tell the gateway, register it with the device."""
        self._mapping = attach(welcome.ring_path, welcome.generation)
        largest = max(cache.object_bytes for cache in self.caches.values())
        if largest > self._mapping.header.io_size:
            raise GatewayError(
                f"the ring is cut for objects of {self._mapping.header.io_size} bytes, this rank "
                f"has {largest}: set the gateway's io_size to 0"
            )
        self.channel.send(Attached(welcome.generation))
        self.mover.register_ring(self._mapping.address, self._mapping.num_bytes)

    def on_message(self, message: ToRank) -> None:
        """Handle a batch of slots or the end of a request."""
        if isinstance(message, Granted):
            self._on_granted(message)
        elif isinstance(message, Failed):
            self._on_failed(message)

    def _on_failed(self, message: Failed) -> None:
        transfer = self._transfers.pop(message.seq, None)
        if transfer is not None:
            log.warning("a request to the gateway failed: %s", message.reason)
            self._count("requests_failed")
            transfer.job.fail(slice(None), message.reason)
            transfer.job.abandon(message.reason)

    def _on_granted(self, message: Granted) -> None:
        slots = unpack_slots(message.slots)
        transfer = self._transfers.get(message.seq)
        if transfer is None:
            self.channel.send(Release(message.seq, message.first, ok=False))
            return
        transfer.num_granted += len(slots)
        if transfer.num_granted >= transfer.num_objects:
            del self._transfers[message.seq]
        flight = Flight(message.seq, message.first, len(slots), transfer.job)
        try:
            with transfer.job.lock:
                if not transfer.is_put or not transfer.job.abandoned:
                    self._start(transfer, message, slots, flight)
        except TransferError as error:
            log.warning("a copy could not be started: %s", error)
            transfer.job.fail(slice(None), str(error))
            transfer.job.abandon(str(error))
        self._flights.append(flight)
        self._land()

    def _start(
        self, transfer: Transfer, message: Granted, slots: NDArray[np.uint32], flight: Flight
    ) -> None:
        job, stack = transfer.job, transfer.stack
        objects = np.arange(message.first, message.first + len(slots))
        positions, rows = objects // job.num_chunks, objects % job.num_chunks
        wanted = slots != NO_SLOT
        if transfer.is_put:
            if stack.has_replicas:
                wanted &= _owned(job, stack, positions, rows)
        else:
            bad = np.frombuffer(message.status, dtype=np.uint8) != 0
            if bad.any():
                self._count("objects_missed", int(bad.sum()))
                job.fail(rows[bad], "objects are missing or damaged on the card")
            wanted &= ~bad
        for mine, counts in stack.shares(positions):
            chosen = wanted if mine is None else mine & wanted
            ticket = None
            if chosen.any():
                picked = (slots[chosen], positions[chosen], rows[chosen])
                if transfer.is_put:
                    ticket = self._save(transfer, *picked)
                else:
                    ticket = self._restore(transfer, (message.seq, message.first), *picked)
                flight.tickets += [ticket] if ticket is not None else []
            job.note_started([(stack.caches[p].index, count) for p, count in counts], ticket)

    def _save(
        self,
        transfer: Transfer,
        slots: NDArray[np.uint32],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> Ticket:
        """Start the copy of slices of one shape into the ring."""
        copy = self._slices(transfer, slots, positions, rows)
        self._count("bytes_saved", copy.total_bytes)
        return self.mover.save(copy, transfer.mark)

    def _restore(
        self,
        transfer: Transfer,
        label: tuple[int, int],
        slots: NDArray[np.uint32],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> Ticket | None:
        """Start the copy of slices of one shape out of the ring; None if the job was given up.

        Whether they are exchanged follows from the batch alone, and then this rank takes part
        whatever has happened to its job (see adp_kv.fanout.fanout). A get names one cache, so
        no failure of another transfer of the batch comes in between.
        """
        job, cache = transfer.job, transfer.stack.caches[int(positions[0])]
        shape = Shape(len(slots), cache.blocks_per_chunk, cache.page_bytes)
        exchanges = cache.is_replicated and self.fanout is not None and self.fanout.takes(shape)
        if self.fanout is None or not exchanges:
            if job.abandoned:
                return None
            copy = self._slices(transfer, slots, positions, rows)
            self._count("bytes_restored", copy.total_bytes)
            return self.mover.restore(copy, transfer.mark)
        mine: SliceCopy | None = None
        try:
            mine = None if job.abandoned else self._slices(transfer, slots, positions, rows)
        except TransferError as error:
            job.fail(slice(None), str(error))
        self._count("bytes_restored", shape.total_bytes)
        self._count("bytes_exchanged", shape.total_bytes)
        return self.fanout.restore(label, shape, mine, transfer.mark)

    def _slices(
        self,
        transfer: Transfer,
        slots: NDArray[np.uint32],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> SliceCopy:
        """Return where slices of one shape lie in the ring, and their pages."""
        if self._mapping is None:
            raise GatewayError("slots were granted before the ring was mapped")
        cache = transfer.stack.caches[int(positions[0])]
        pages = transfer.stack.page_addresses(
            positions, transfer.job.blocks[rows], self._scratch_address
        )
        mapping = self._mapping
        addresses = mapping.write_addresses if transfer.is_put else mapping.read_addresses
        return SliceCopy(addresses(slots) + cache.slice_offset, pages, cache.page_bytes)

    def on_turn(self) -> float:
        """Release what has landed."""
        if self.fanout is not None:
            self.fanout.check()
        self._land()
        return POLL_S if self._flights else IDLE_S

    def _land(self) -> None:
        flying = []
        for flight in self._flights:
            if self._has_landed(flight):
                ok = flight.ok and not flight.job.abandoned
                self.channel.send(Release(flight.seq, flight.first, ok))
                flight.job.note_finished(flight.num_objects)
            else:
                flying.append(flight)
        self._flights = flying

    def _has_landed(self, flight: Flight) -> bool:
        """Return whether every copy of a flight has ended, well or not."""
        flying = []
        for ticket in flight.tickets:
            try:
                if not ticket.done():
                    flying.append(ticket)
            except TransferError as error:
                if flight.job.reason is None:  # else every further batch says it again
                    log.warning("a copy failed: %s", error)
                flight.job.fail(slice(None), str(error))
                flight.ok = False
        flight.tickets = flying
        return not flying

    def _count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def on_off(self, reason: str) -> None:
        """Abandon every job."""
        with self._live_lock:
            live, self._live = self._live, []
        for job in live:
            job.abandon(reason)
        self._transfers.clear()

    def on_exit(self) -> None:
        """Wait for the copies in flight, then let go of the ring."""
        if self.fanout is not None and not self.fanout.close(CLOSE_GRACE_S):
            log.warning("the ring stays mapped: the device still waits for what it computes")
            _KEPT.append(self)
            return
        try:
            self.mover.close()
        except TransferError as error:
            log.warning("the ring stays mapped: %s", error)
            _KEPT.append(self)
            return
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


def _owned(
    job: Job, stack: CacheStack, positions: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which objects this rank stores, where replicas share the work."""
    shares = [cache.replica_rows(job.num_chunks, job.number) for cache in stack.caches]
    starts = np.array([share.start for share in shares])
    stops = np.array([share.stop for share in shares])
    return np.logical_and(rows >= starts[positions], rows < stops[positions])


def declare(caches: Sequence[CacheGeometry]) -> list[CacheDecl]:
    """Return what a rank tells the gateway about its caches."""
    return [
        CacheDecl(c.index, c.name, c.slice_bytes, c.slice_idx, c.num_slices, c.layout, c.part)
        for c in caches
    ]

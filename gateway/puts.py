"""Puts: objects from ring slots onto the card, and the commit of whole chunks.

    all ranks ask ─► slots ─► Granted ─► ranks fill, Release ─► card writes ─► commit

A job is the puts of one set of chunks over all caches of one part of the engine (a hybrid
model's KV cache groups are parts with chunks of their own). Chunks that
have a commit record when the job begins, and repetitions of a chunk within the job,
are not written (NO_SLOT); nor are chunks of which an object or the record would go to a
database that is left out. When every put of the job has ended, the chunks of which every
object was written get their commit record: a chunk half written is never offered. What was
written of the others, and of chunks whose record the card refused, is deleted, so that it
takes no room of chunks that are whole: where the card is this gateway's alone
(CardLimits.exclusive), where the card says that the chunk has no record, and where no other
job has it, which then decides at its own end. What the card still writes of a job that
expired comes later and stays for the card's uncommitted_s, or until a later put of the
chunk overwrites it; so do the objects of a record that the card did not answer about.

Contract of requests, threads and failure: requests.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import WireError
from adp_kv.wire.keys import KeyArray, object_keys
from adp_kv.wire.messages import NO_SLOT, Put
from gateway.cards.base import Status, StatusArray
from gateway.requests import Context, Request, RequestTable, SlotBatch, count_failures

_DELETE_OBJECTS = 4096  # of a batch: about as many as a save writes at once


@dataclass(slots=True, eq=False)
class Job:
    """The puts of one set of chunks.

    Attributes:
        packed_chunks: as every put of the job sends them.
        missing: bool [n]: which chunks are to be written; None until the card answered.
        sizes: bytes of a chunk's object, by cache of the part.
        num_written: int64 [n] objects written of each chunk.
        begun: bool [n]: chunks of which the card may have something without a record.
        open_caches: caches whose put has not ended.
    """

    packed_chunks: bytes
    chunks: KeyArray
    sizes: dict[int, int]
    num_written: NDArray[np.int64]
    begun: NDArray[np.bool_]
    open_caches: set[int]
    deadline: float
    missing: NDArray[np.bool_] | None = None
    claimed: set[int] = field(default_factory=set)

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Which chunks have every object on the card: bool [n]."""
        return np.equal(self.num_written, len(self.sizes))


class PutTable(RequestTable):
    """All puts of one session."""

    kind = "put"

    def __init__(self, context: Context, job_deadline_s: float) -> None:
        super().__init__(context)
        self._jobs: dict[tuple[int, int], Job] = {}  # by job and part
        self._committing: list[KeyArray] = []  # chunks whose record is on its way to the card
        self._job_deadline_s = job_deadline_s

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def _on_open(self, request: Request) -> None:
        put = _put_of(request)
        job = self._job_of(request)
        if job is None:
            job = self._open_job(put, request.chunks)
        if job.packed_chunks != put.chunks:
            raise WireError(f"puts of job {put.job:#x} name different chunks")
        if job.claimed & set(put.caches):
            raise WireError(f"job {put.job:#x} stores a cache twice")
        job.claimed |= set(put.caches)

    def _number(self, put: Put) -> tuple[int, int]:
        return put.job, self._ctx.session.caches[put.caches[0]].part

    def _job_of(self, request: Request) -> Job | None:
        return self._jobs.get(self._number(_put_of(request)))

    def _open_job(self, put: Put, chunks: KeyArray) -> Job:
        part = self._ctx.session.part(self._ctx.session.caches[put.caches[0]].part)
        sizes = {cache: self._ctx.session.caches[cache].object_bytes for cache in part}
        job = Job(
            packed_chunks=put.chunks,
            chunks=chunks,
            sizes=sizes,
            num_written=np.zeros(len(chunks), dtype=np.int64),
            begun=np.zeros(len(chunks), dtype=np.bool_),
            open_caches=part,
            deadline=self._ctx.clock() + self._job_deadline_s,
        )
        self._jobs[self._number(put)] = job

        def then(status: StatusArray) -> None:
            job.missing = (status != 0) & _first_of_each(chunks)
            # What can't be whole would only take the room of chunks that are.
            reach = status != Status.UNREACHABLE
            reach &= self._ctx.store.reachable(chunks, sizes)
            self._ctx.counters.add("chunks_out_of_reach", int((job.missing & ~reach).sum()))
            job.missing &= reach
            self._ctx.counters.add("chunks_already_stored", int((status == 0).sum()))
            self.pump()

        self._ctx.store.committed(chunks, then)
        return job

    def pump(self) -> None:
        """Grant slots while they are free, in the order of arrival."""
        for request in list(self._requests.values()):
            job = self._job_of(request)
            if job is None and not request.failed and request.num_started < len(request.objects):
                self._fail(request, "its job ended without it: job_deadline_s")
            if job is None or job.missing is None or not request.all_arrived:
                continue
            while not request.failed and request.num_started < len(request.objects):
                if not self._start(request, job.missing):
                    return

    def _start(self, request: Request, missing: NDArray[np.bool_]) -> bool:
        first = request.num_started
        count = self._next_count(request, self._ctx.batch_bytes)
        wanted = missing[request.chunk_of(np.arange(first, first + count))]
        slots = np.full(count, NO_SLOT, dtype=np.uint32)
        if wanted.any():
            taken = self._slots.try_allocate(int(wanted.sum()))
            if taken is None:
                return False
            slots[wanted] = taken
        self._ctx.counters.add("objects_skipped", count - int(wanted.sum()))
        batch = SlotBatch(first, slots)
        request.batches[first] = batch
        request.num_started += count
        self._grant(request, batch)
        return True

    def _on_complete(self, request: Request) -> None:
        """Nothing beyond pump()."""

    def _on_released(self, request: Request, batch: SlotBatch) -> None:
        wanted = batch.wanted
        if batch.refused or not wanted.any():
            if batch.refused:
                self._ctx.counters.add("objects_not_filled", int(wanted.sum()))
            self._drop(request, batch)
            return
        job = self._job_of(request)
        if job is None:  # it expired: nothing of it will be found
            self._ctx.counters.add("put_objects_given_up", int(wanted.sum()))
            self._drop(request, batch)
            return
        written = batch.first + np.flatnonzero(wanted)
        batch.at_card = True
        job.begun[request.chunk_of(written)] = True
        self._ctx.store.write(
            request.objects[written],
            request.chunks[request.chunk_of(written)],
            self._ctx.mapping.write_addresses(batch.slots[wanted]),
            request.lengths[written],
            lambda status: self._on_written(request, batch, status),
            lambda: self._on_quiet(batch),
        )

    def _on_written(self, request: Request, batch: SlotBatch, status: StatusArray) -> None:
        objects = batch.first + np.flatnonzero(batch.wanted)
        good = status == 0
        self._ctx.counters.add("objects_written", int(good.sum()))
        self._ctx.counters.add("bytes_written", int(request.lengths[objects[good]].sum()))
        count_failures(self._ctx.counters, "objects_not_written", status)
        batch.status = status
        job = self._job_of(request)
        if job is not None:
            np.add.at(job.num_written, request.chunk_of(objects[good]), 1)
            if job.missing is not None:  # they can't be whole any more: no more of them
                job.missing[request.chunk_of(objects[~good])] = False
        self._drop(request, batch)
        self.pump()

    def _on_abandoned(self, batch: SlotBatch) -> None:
        self._ctx.counters.add("put_objects_given_up", int(batch.wanted.sum()))

    def _on_end(self, request: Request) -> None:
        put = _put_of(request)
        job = self._job_of(request)
        if job is None:
            return
        job.open_caches -= set(put.caches)
        if not job.open_caches:
            del self._jobs[self._number(put)]
            self._commit(job)
            self._discard(job, job.begun & ~job.whole)

    def _commit(self, job: Job) -> None:
        rows = np.flatnonzero(job.whole)
        if not rows.size:
            return
        chunks = job.chunks[rows]
        self._committing.append(chunks)

        def then(status: StatusArray) -> None:
            self._committing = [other for other in self._committing if other is not chunks]
            self._ctx.counters.add("chunks_committed", int((status == 0).sum()))
            # One that was not answered may be taken yet: its objects must be there then.
            refused = np.zeros(len(job.chunks), dtype=np.bool_)
            refused[rows] = (status != Status.OK) & (status != Status.UNREACHABLE)
            self._discard(job, refused)

        self._ctx.store.commit(chunks, then)

    def _discard(self, job: Job, lost: NDArray[np.bool_]) -> None:
        """Delete what the card has of chunks (bool [n]) of a job that has ended."""
        if not lost.any() or not self._ctx.store.card.limits.exclusive:
            return
        chunks = np.unique(job.chunks[lost], axis=0)
        chunks = chunks[~self._left_to_others(chunks)]
        if not chunks.size:
            return

        def then(status: StatusArray) -> None:
            # Others have a record, of a job that ended sooner; or a job that came meanwhile.
            absent = chunks[status == Status.ABSENT]
            absent = absent[~self._left_to_others(absent)]
            step = max(1, _DELETE_OBJECTS // len(job.sizes))
            for first in range(0, len(absent), step):
                self._delete(absent[first : first + step], job.sizes)

        self._ctx.store.committed(chunks, then)

    def _left_to_others(self, chunks: KeyArray) -> NDArray[np.bool_]:
        """Return which chunks an open job or a commit under way has: bool [n]; tell the jobs.

        Told by the first word of the key, by which a card groups values.
        """
        left = np.zeros(len(chunks), dtype=np.bool_)
        for other in self._committing:
            left |= np.isin(chunks[:, 0], other[:, 0])
        for job in self._jobs.values():
            job.begun |= np.isin(job.chunks[:, 0], chunks[:, 0])
            left |= np.isin(chunks[:, 0], job.chunks[:, 0])
        return left

    def _delete(self, chunks: KeyArray, sizes: dict[int, int]) -> None:
        lengths = np.repeat(np.array(list(sizes.values()), dtype=np.int64), len(chunks))

        def then(status: StatusArray) -> None:
            failed = (status > Status.ABSENT).reshape(len(sizes), len(chunks)).any(axis=0)
            self._ctx.counters.add("chunks_discarded", int((~failed).sum()))

        objects = object_keys(chunks, list(sizes))
        self._ctx.store.delete(objects, np.tile(chunks, (len(sizes), 1)), lengths, then)

    def tick(self) -> None:
        """As for every table; a job whose puts never all came goes uncommitted."""
        now = self._ctx.clock()
        for number, job in list(self._jobs.items()):
            if now > job.deadline:
                del self._jobs[number]
                self._ctx.counters.add("jobs_expired")
                self._discard(job, job.begun)
        super().tick()


def _first_of_each(chunks: KeyArray) -> NDArray[np.bool_]:
    """Return which rows are the first of their key: one step may save a chunk twice."""
    first = np.zeros(len(chunks), dtype=np.bool_)
    first[np.unique(chunks, axis=0, return_index=True)[1]] = True
    return first


def _put_of(request: Request) -> Put:
    if not isinstance(request.message, Put):
        raise TypeError(f"not a put: {request.message!r}")
    return request.message

"""What a rank is asked to move: restores and saves, and how far they are.

    forward-pass thread                      client thread
    Job(...) ── submit ────────────────────► asks the gateway, starts copies
    wait_cache() ◄── settled ────────────── note_started / fail
    abandon() ── nothing starts any more

Threads: as drawn; everything shared is under the job's lock, which the client holds
while it starts a copy. So after abandon() the list of started copies is final, and
the blocks are safe to reuse as soon as those have ended.

An object is settled when its copy was started or it is known that there will be none;
it is finished when the copy has ended too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import TransferError
from adp_kv.layout.geometry import CacheGeometry
from adp_kv.transfer.base import Ticket
from adp_kv.wire.keys import KeyArray

PROOF_POLL_S = 0.0002


@dataclass(slots=True)
class CacheProgress:
    """One cache of a job: objects without an outcome, and copies that were started."""

    num_unsettled: int
    tickets: list[Ticket] = field(default_factory=list)


class Job:
    """Chunks to move for some caches of this rank.

    Args:
        number: the step; equal on all ranks.
        chunks: uint64 [n, 2] chunk keys.
        blocks: int64 [n, blocks_per_chunk] block ids; negative: a page nobody wants.
        caches: what to move.
        timeout_s: after this long the rest has failed.

    Attributes:
        num_bytes: what moves on this rank.
    """

    def __init__(
        self,
        number: int,
        chunks: KeyArray,
        blocks: NDArray[np.int64],
        caches: Sequence[CacheGeometry],
        timeout_s: float,
    ) -> None:
        self.number = number
        self.chunks = chunks
        self.blocks = blocks
        self.caches = list(caches)
        self.num_bytes = len(chunks) * sum(cache.slice_bytes for cache in caches)
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self._timeout_s = timeout_s
        self.lock = threading.Condition()
        self.abandoned = False
        self.reason: str | None = None
        self._failed = np.zeros(len(chunks), dtype=np.bool_)
        self._progress = {c.index: CacheProgress(len(chunks)) for c in self.caches}
        self._num_unfinished = len(chunks) * len(self.caches)

    @property
    def num_chunks(self) -> int:
        """Chunks of the job."""
        return len(self.chunks)

    def note_started(self, counts: Iterable[tuple[int, int]], ticket: Ticket | None) -> None:
        """Settle objects: their copy was started, or there is none to make.

        Args:
            counts: caches, and how many objects of each.
            ticket: of the copy, one for all.
        """
        with self.lock:
            for cache, num_objects in counts:
                progress = self._progress[cache]
                progress.num_unsettled -= num_objects
                if ticket is not None:
                    progress.tickets.append(ticket)
            self.lock.notify_all()

    def note_finished(self, num_objects: int) -> None:
        """Finish settled objects: nothing touches their pages any more."""
        with self.lock:
            self._num_unfinished -= num_objects
            self.lock.notify_all()

    def fail(self, rows: NDArray[np.int64] | slice, reason: str) -> None:
        """Mark chunks as not moved."""
        with self.lock:
            self._failed[rows] = True
            self.reason = self.reason or reason

    def abandon(self, reason: str) -> None:
        """Let no further copy start; a job with unsettled objects has failed as a whole."""
        with self.lock:
            if self.abandoned:
                return
            self.abandoned = True
            if any(p.num_unsettled for p in self._progress.values()):
                self._failed[:] = True
                self.reason = self.reason or reason
            self.lock.notify_all()

    def wait_cache(self, cache: int) -> list[Ticket]:
        """Wait until every object of a cache is settled; return the copies to fence.

        Never longer than the job's deadline: then the job is abandoned.
        """
        progress = self._progress[cache]
        with self.lock:
            settled = self.lock.wait_for(
                lambda: progress.num_unsettled == 0 or self.abandoned,
                max(0.0, self.deadline - time.monotonic()),
            )
        if not settled:
            self.abandon(f"{progress.num_unsettled} objects did not arrive in time")
        return progress.tickets

    def unproven(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Return the tickets of which it is not known yet whether their bytes are right.

        One whose bytes are not fails the job.
        """
        try:
            return [ticket for ticket in tickets if not ticket.proven()]
        except TransferError as error:
            self.fail(slice(None), str(error))
            return []

    def wait_proven(self, tickets: Iterable[Ticket]) -> None:
        """Wait until it is known whether the bytes of fenced copies are right.

        An exchange ends, or is ended, within the job's time-out of its start.
        """
        limit = self.deadline + self._timeout_s
        while tickets := self.unproven(tickets):
            if time.monotonic() > limit:
                self.fail(slice(None), "an exchange did not end in time")
                return
            time.sleep(PROOF_POLL_S)

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    @property
    def finished(self) -> bool:
        """Whether nothing of this job touches a page any more, now or later.

        The forward pass asks in every step and must not wait for the client, which holds the lock
        as long as it takes to start a copy. One reading of a count that only falls needs none.
        """
        if not self.abandoned:
            return self._num_unfinished == 0
        with self.lock:
            return all(self._ended(t) for p in self._progress.values() for t in p.tickets)

    def _ended(self, ticket: Ticket) -> bool:
        try:
            return ticket.done()
        except TransferError as error:
            self.fail(slice(None), str(error))
            return True  # it moves nothing any more

    def wait_finished(self, timeout_s: float) -> None:
        """Return when the job is finished or abandoned, or after timeout_s."""
        with self.lock:
            self.lock.wait_for(lambda: self.abandoned or self._num_unfinished == 0, timeout_s)

    @property
    def failed_chunks(self) -> NDArray[np.bool_]:
        """Which chunks were not moved whole: bool [n]."""
        with self.lock:
            return self._failed.copy()

    @property
    def failed_blocks(self) -> set[int]:
        """Blocks whose pages were not all restored."""
        blocks = self.blocks[self.failed_chunks]
        return {int(b) for b in blocks[blocks >= 0]}

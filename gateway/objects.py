"""Objects on a card: split into fragments, spread over databases, put together again.

    object (one ring slot) ─► fragments of at most fragment_size ─► (database, key, address)

The database of a fragment is (object key + fragment number) mod databases, so that
the fragments of one object, and neighbouring objects, lie in different databases. All
fragments of a chunk and its commit record are one group, which a card evicts as a whole.

A batch that the card has not answered deadline_s after it had answered those before it is
answered UNREACHABLE here, and the memory it may still touch stays in use until the card
does answer: `quiet` says when. A slow card with a long queue is therefore not late.
Databases that fail again and again, or were part of a late batch, are probed (a value is
written, read and deleted) and left out as long as that does not work (quarantine.py).

Threads: everything here runs on the gateway's main thread; a card's completion
enters through `_on_done` from its own thread and is handled by poll().
Failure scope: an object fails when any of its fragments does, with the worst status; a
batch that the card refuses or answers wrongly has failed with IO_ERROR.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from adp_kv.units import ceil_div
from adp_kv.wire.keys import (
    KeyArray,
    commit_keys,
    equal_fragment_keys,
    fragment_keys,
    object_keys,
    whole_keys,
)
from gateway.cards.base import Batch, Card, Op, Status, StatusArray
from gateway.quarantine import Quarantine

log = logging.getLogger("adp_kv.gateway")

Then: TypeAlias = Callable[[StatusArray], None]
"""Called on the main thread with one status an object."""

Quiet: TypeAlias = Callable[[], None]
"""Called on the main thread once the card touches the memory of a batch no more."""


@dataclass(slots=True)
class _Pending:
    """A batch under way.

    Attributes:
        began: monotonic seconds.
        databases: uint16 [n], of all entries, those that were not submitted too.
        rows: entries that were submitted; None for all.
        starts: each object's first fragment, None if objects are whole.
        deadline: when it is late; put off while the card still answers earlier batches.
        probe: of the quarantine's; nobody else waits for it, and its memory is its own.
        late: `then` was told already.
    """

    op: Op
    began: float
    databases: NDArray[np.uint16]
    rows: NDArray[np.int64] | None
    starts: NDArray[np.int64] | None
    then: Then
    quiet: Quiet
    deadline: float
    probe: bool
    late: bool = False

    def tell(self, status: StatusArray) -> None:
        """Answer the caller, with the worst status of each object's fragments."""
        self.then(status if self.starts is None else np.maximum.reduceat(status, self.starts))


class ObjectStore:
    """Batches of objects against one card.

    Args:
        card: opened here, closed by close().
        fragment_size: longest fragment in bytes; lowered to what the card takes.
        deadline_s: how long the card may take for a batch once those before it are done.
        quarantine_s: how long a database that does not work is left alone.
        clock: monotonic seconds.

    Attributes:
        namespace: 32 bits of the namespace of whoever writes now, for quotas.
        num_inflight: batches the card has not answered, probes not counted.
        num_late: those of them that were given up.
        num_given_up: batches given up since the start.
        durations: of batches by operation, from submit to the main thread's taking note.
    """

    def __init__(
        self,
        card: Card,
        fragment_size: int,
        *,
        deadline_s: float = 20.0,
        quarantine_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.card = card
        limits = card.limits
        longest = min(fragment_size, limits.max_value_bytes)
        # Whole alignments, since the next fragment begins where one ends.
        self.fragment_size = max(longest - longest % limits.alignment_bytes, limits.alignment_bytes)
        self.num_inflight = self.num_late = self.num_given_up = 0
        self.durations = {op: Histogram() for op in Op}
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.namespace = 0
        self._deadline_s = deadline_s
        self._clock = clock
        self._num_databases = limits.num_databases
        self._quarantine = Quarantine(limits.num_databases, quarantine_s)
        self._next_token = 1
        self._pending: dict[int, _Pending] = {}
        self._completions: deque[tuple[int, StatusArray]] = deque()
        try:
            card.open(self._on_done)
        except BaseException:
            os.close(self.wakeup_fd)
            raise

    @property
    def num_databases_out(self) -> int:
        """Databases that are left out because they do not work."""
        return self._quarantine.num_out

    def _on_done(self, token: int, status: StatusArray) -> None:
        self._completions.append((token, status))
        os.eventfd_write(self.wakeup_fd, 1)

    def poll(self) -> None:
        """Run the continuations of batches that have ended."""
        # Always: a wake-up whose entry an earlier poll took along must not stay readable.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup_fd)
        while self._completions:
            token, status = self._completions.popleft()
            pending = self._pending.pop(token, None)
            if pending is None:
                log.error("the card answered batch %d, which is not under way", token)
                continue
            self._put_off(token)
            self.durations[pending.op].observe(time.monotonic() - pending.began)
            self.num_inflight -= not pending.probe
            if pending.late:
                self.num_late -= not pending.probe
                pending.quiet()
            else:
                self._finish(pending, status)

    def _put_off(self, token: int) -> None:
        """Let later batches have their whole time from now on: they may have queued behind it."""
        deadline = self._clock() + self._deadline_s
        for later in reversed(self._pending):
            if later < token:
                return
            self._pending[later].deadline = deadline

    def _finish(self, pending: _Pending, status: StatusArray) -> None:
        rows, num_entries = pending.rows, len(pending.databases)
        expected = num_entries if rows is None else len(rows)
        if status.shape != (expected,):
            log.error("the card gave %s answers for %d", status.shape, expected)
            status = np.full(expected, Status.IO_ERROR, dtype=np.uint8)
        asked = pending.databases if rows is None else pending.databases[rows]
        self._quarantine.note(asked, status, self._clock())
        if rows is not None:
            status, answered = np.full(num_entries, Status.UNREACHABLE, dtype=np.uint8), status
            status[rows] = answered
        pending.quiet()
        pending.tell(status)

    def tick(self) -> None:
        """Give up batches whose deadline has passed, and probe databases."""
        now = self._clock()
        for pending in [p for p in self._pending.values() if not p.late and now > p.deadline]:
            pending.late = True
            self.num_late += not pending.probe
            self.num_given_up += 1
            log.error(
                "the card did not answer %d entries within card_deadline_s = %g s",
                len(pending.databases),
                self._deadline_s,
            )
            self._quarantine.note_late(pending.databases, now)
            pending.tell(np.full(len(pending.databases), Status.UNREACHABLE, dtype=np.uint8))
        for database in self._quarantine.due(now):
            self._probe(database)

    def read(
        self,
        objects: KeyArray,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        then: Then,
        quiet: Quiet = lambda: None,
    ) -> None:
        """Read objects into memory; `then` gets one status an object."""
        batch, starts = self._fragments(Op.READ, objects, addresses, lengths)
        self._submit(batch, starts, then, quiet)

    def write(
        self,
        objects: KeyArray,
        chunks: KeyArray,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        then: Then,
        quiet: Quiet = lambda: None,
    ) -> None:
        """Write objects, each of a chunk, from memory; `then` gets one status an object."""
        batch, starts = self._fragments(Op.WRITE, objects, addresses, lengths, _groups(chunks))
        self._submit(batch, starts, then, quiet)

    def delete(
        self, objects: KeyArray, chunks: KeyArray, lengths: NDArray[np.int64], then: Then
    ) -> None:
        """Delete objects, each of a chunk; `then` gets ABSENT where a fragment was not there.

        Args:
            objects: uint64 [n, 2], no two alike.
            chunks: uint64 [n, 2].
            lengths: int64 [n] bytes, as they would be written.
            then: told of each.
        """
        nowhere = np.zeros(len(objects), dtype=np.int64)
        batch, starts = self._fragments(Op.DELETE, objects, nowhere, lengths, _groups(chunks))
        self._submit(batch, starts, then)

    def reachable(self, chunks: KeyArray, sizes: Mapping[int, int]) -> NDArray[np.bool_]:
        """Return which chunks have no fragment in a database that is left out: bool [n].

        Args:
            chunks: uint64 [n, 2].
            sizes: bytes of a chunk's object, by cache.
        """
        if not self.num_databases_out:
            return np.ones(len(chunks), dtype=np.bool_)
        objects = object_keys(chunks, list(sizes))
        lengths = np.repeat(np.array(list(sizes.values()), dtype=np.int64), len(chunks))
        nowhere = np.zeros(len(objects), dtype=np.int64)
        batch, starts = self._fragments(Op.READ, objects, nowhere, lengths)
        inside = ~self._quarantine.are_out(batch.databases)
        if starts is not None:
            inside = np.logical_and.reduceat(inside, starts)
        whole: NDArray[np.bool_] = np.all(inside.reshape(len(sizes), len(chunks)), axis=0)
        return whole

    def _fragments(
        self,
        op: Op,
        objects: KeyArray,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        groups: NDArray[np.uint64] | None = None,
    ) -> tuple[Batch, NDArray[np.int64] | None]:
        """Return the batch of objects' fragments, and where each object's begin in it."""
        if int(lengths.max()) <= self.fragment_size:
            databases = self._databases(objects[:, 0], np.zeros(1, dtype=np.int64))
            places, sizes = addresses.astype(np.uint64), lengths.astype(np.uint32)
            return Batch(op, 0, databases, whole_keys(objects), places, sizes, groups), None
        if lengths.min() == lengths.max():
            return self._equal_fragments(op, objects, addresses, int(lengths[0]), groups)
        size = self.fragment_size
        counts = -(-lengths // size)
        starts = np.cumsum(counts) - counts
        object_idx = np.repeat(np.arange(len(objects), dtype=np.int64), counts)
        fragment_idx = np.arange(len(object_idx), dtype=np.int64) - starts[object_idx]
        offsets = fragment_idx * size
        batch = Batch(
            op=op,
            token=0,
            databases=self._databases(objects[object_idx, 0], fragment_idx),
            keys=fragment_keys(objects, object_idx, fragment_idx),
            addresses=(addresses[object_idx] + offsets).astype(np.uint64),
            lengths=np.minimum(lengths[object_idx] - offsets, size).astype(np.uint32),
            groups=None if groups is None else groups[object_idx],
        )
        return batch, starts

    def _equal_fragments(
        self,
        op: Op,
        objects: KeyArray,
        addresses: NDArray[np.int64],
        length: int,
        groups: NDArray[np.uint64] | None,
    ) -> tuple[Batch, NDArray[np.int64]]:
        """As _fragments(), of objects of one length: of one cache, which most batches are."""
        num, size = len(objects), self.fragment_size
        count = ceil_div(length, size)
        numbers = np.arange(count, dtype=np.int64)
        offsets = numbers * size
        batch = Batch(
            op=op,
            token=0,
            databases=self._databases(objects[:, :1], numbers).reshape(-1),
            keys=equal_fragment_keys(objects, count),
            addresses=(addresses[:, None] + offsets).astype(np.uint64).reshape(-1),
            lengths=np.tile(np.minimum(length - offsets, size).astype(np.uint32), num),
            groups=None if groups is None else np.repeat(groups, count),
        )
        return batch, np.arange(0, num * count, count, dtype=np.int64)

    def committed(self, chunks: KeyArray, then: Then) -> None:
        """Ask which chunks have a commit record; status OK or not."""
        self._marker(Op.EXIST, chunks, then)

    def commit(self, chunks: KeyArray, then: Then) -> None:
        """Write the chunks' commit records: all their objects are on the card."""
        self._marker(Op.WRITE, chunks, then)

    def uncommit(self, chunks: KeyArray, then: Then) -> None:
        """Remove the chunks' commit records, so that they are not offered again."""
        self._marker(Op.DELETE, chunks, then)

    def _marker(self, op: Op, chunks: KeyArray, then: Then) -> None:
        keys = commit_keys(chunks)
        zero = np.zeros(len(keys), dtype=np.int64)
        databases = self._databases(keys[:, 0], zero)
        addresses, lengths = zero.astype(np.uint64), zero.astype(np.uint32)
        batch = Batch(op, 0, databases, keys, addresses, lengths, _groups(chunks))
        self._submit(batch, None, then)

    def _databases(
        self, words: NDArray[np.uint64], fragment_idx: NDArray[np.int64]
    ) -> NDArray[np.uint16]:
        spread = words + fragment_idx.astype(np.uint64)
        return (spread % np.uint64(self._num_databases)).astype(np.uint16)

    def _submit(
        self,
        batch: Batch,
        starts: NDArray[np.int64] | None,
        then: Then,
        quiet: Quiet = lambda: None,
        *,
        probe: bool = False,
    ) -> None:
        rows: NDArray[np.int64] | None = None
        if self._quarantine.num_out and not probe:
            rows = np.flatnonzero(~self._quarantine.are_out(batch.databases))
        token = self._next_token
        self._next_token += 1
        deadline = self._clock() + self._deadline_s
        self._pending[token] = _Pending(
            batch.op, time.monotonic(), batch.databases, rows, starts, then, quiet, deadline, probe
        )
        self.num_inflight += not probe
        if rows is not None and not rows.size:
            self._on_done(token, np.empty(0, dtype=np.uint8))
            return
        try:
            self.card.submit(_part(batch, rows, token, self.namespace))
        except CardError as error:
            # Answered like any batch that failed, so that whoever waits is told.
            log.error("the card refused a batch: %s", error)  # noqa: TRY400
            num_entries = len(batch.databases) if rows is None else rows.size
            self._on_done(token, np.full(num_entries, Status.IO_ERROR, dtype=np.uint8))

    def _probe(self, database: int) -> None:
        """Write a value, read it back, compare and delete it; tell the quarantine."""
        # New memory each time, and never freed by hand: a probe that is not answered may
        # still touch it, and then this continuation, which has it, stays in `_pending`.
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        view = np.frombuffer(memory, dtype=np.uint8)
        length = min(mmap.PAGESIZE, self.card.limits.max_value_bytes)
        view[:length] = np.frombuffer(secrets.token_bytes(length), dtype=np.uint8)
        key = np.frombuffer(secrets.token_bytes(16), dtype=np.uint64).reshape(1, 2)
        base = view.ctypes.data

        def step(op: Op, address: int, then: Callable[[int], None]) -> None:
            batch = Batch(
                op,
                0,
                np.array([database], dtype=np.uint16),
                key,
                np.array([address], dtype=np.uint64),
                np.array([length], dtype=np.uint32),
                _groups(key),  # one without a commit record, so that a card lets it go
            )
            self._submit(batch, None, lambda status: then(int(status[0])), probe=True)

        def end(*, works: bool) -> None:
            self._quarantine.probed(database, self._clock(), works=works)

        def written(status: int) -> None:
            if status == Status.OK:
                step(Op.READ, base + mmap.PAGESIZE, read)
            else:
                end(works=status == Status.NO_SPACE)  # full, but it answers

        def read(status: int) -> None:
            copy = view[mmap.PAGESIZE : mmap.PAGESIZE + length]
            same = status == Status.OK and np.array_equal(copy, view[:length])
            step(Op.DELETE, base, lambda _: None)
            end(works=same)

        step(Op.WRITE, base, written)

    def close(self) -> None:
        """Close the card; continuations of unfinished batches never run."""
        self.card.close()
        if self.wakeup_fd >= 0:
            os.close(self.wakeup_fd)
            self.wakeup_fd = -1


def _part(batch: Batch, rows: NDArray[np.int64] | None, token: int, namespace: int) -> Batch:
    """Return the rows of a batch that are to be submitted, under their token."""
    columns = (batch.databases, batch.keys, batch.addresses, batch.lengths, batch.groups)
    if rows is not None:
        columns = tuple(None if c is None else c[rows] for c in columns)  # type: ignore[assignment]
    return Batch(batch.op, token, *columns, namespace=namespace)


def _groups(chunks: KeyArray) -> NDArray[np.uint64]:
    """Return the group of each chunk's values: a word of its key, but never 0."""
    return np.maximum(chunks[:, 0], np.uint64(1))

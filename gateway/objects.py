"""Objects on a card: split into fragments, spread over databases, put together again.

    object (one ring slot) ─► fragments of at most fragment_size ─► (database, key, address)

The database of a fragment is (object key + fragment number) mod databases, so that
the fragments of one object, and neighbouring objects, lie in different databases.

Threads: everything here runs on the gateway's main thread; a card's completion
enters through `_on_done` from its own thread and is handled by poll().
Failure scope: an object fails when any of its fragments does, with the worst status; a
batch that the card refuses or answers wrongly has failed with IO_ERROR.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from adp_kv.wire.keys import KeyArray, commit_keys, fragment_keys, whole_keys
from gateway.cards.base import Batch, Card, Op, Status, StatusArray

log = logging.getLogger("adp_kv.gateway")

Then: TypeAlias = Callable[[StatusArray], None]
"""Called on the main thread with one status an object."""


_Fragments: TypeAlias = tuple[
    NDArray[np.uint16],
    KeyArray,
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64] | None,
]
"""Databases, keys, addresses and lengths of fragments; each object's first, None if whole."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A batch under way; starts: each object's first fragment, None if objects are whole."""

    op: Op
    began: float
    num_entries: int
    starts: NDArray[np.int64] | None
    then: Then


class ObjectStore:
    """Batches of objects against one card.

    Args:
        card: opened here, closed by close().
        fragment_size: longest fragment in bytes; lowered to what the card takes.

    Attributes:
        num_inflight: batches the card has not answered.
        durations: of batches by operation, from submit to the main thread's taking note.
    """

    def __init__(self, card: Card, fragment_size: int) -> None:
        self.card = card
        limits = card.limits
        longest = min(fragment_size, limits.max_value_bytes)
        # Whole alignments, since the next fragment begins where one ends.
        self.fragment_size = max(longest - longest % limits.alignment_bytes, limits.alignment_bytes)
        self.num_inflight = 0
        self.durations = {op: Histogram() for op in Op}
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_databases = limits.num_databases
        self._next_token = 1
        self._pending: dict[int, _Pending] = {}
        self._completions: deque[tuple[int, StatusArray]] = deque()
        try:
            card.open(self._on_done)
        except BaseException:
            os.close(self.wakeup_fd)
            raise

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
            self.num_inflight -= 1
            self.durations[pending.op].observe(time.monotonic() - pending.began)
            if status.shape != (pending.num_entries,):
                log.error("the card gave %s answers for %d", status.shape, pending.num_entries)
                status = np.full(pending.num_entries, Status.IO_ERROR, dtype=np.uint8)
            starts = pending.starts
            pending.then(status if starts is None else np.maximum.reduceat(status, starts))

    def read(
        self,
        objects: KeyArray,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        then: Then,
    ) -> None:
        """Read objects into memory; `then` gets one status an object."""
        self._move(Op.READ, objects, addresses, lengths, then)

    def write(
        self,
        objects: KeyArray,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        then: Then,
    ) -> None:
        """Write objects from memory; `then` gets one status an object."""
        self._move(Op.WRITE, objects, addresses, lengths, then)

    def _move(
        self,
        op: Op,
        objects: KeyArray,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        then: Then,
    ) -> None:
        split = self._split if int(lengths.max()) > self.fragment_size else self._keep_whole
        databases, keys, places, sizes, starts = split(objects, addresses, lengths)
        batch = Batch(
            op=op,
            token=self._next_token,
            databases=databases,
            keys=keys,
            addresses=places.astype(np.uint64),
            lengths=sizes.astype(np.uint32),
        )
        self._submit(batch, starts, then)

    def _split(
        self, objects: KeyArray, addresses: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> _Fragments:
        size = self.fragment_size
        counts = -(-lengths // size)
        starts = np.cumsum(counts) - counts
        object_idx = np.repeat(np.arange(len(objects), dtype=np.int64), counts)
        fragment_idx = np.arange(len(object_idx), dtype=np.int64) - starts[object_idx]
        offsets = fragment_idx * size
        return (
            self._databases(objects[object_idx, 0], fragment_idx),
            fragment_keys(objects, object_idx, fragment_idx),
            addresses[object_idx] + offsets,
            np.minimum(lengths[object_idx] - offsets, size),
            starts,
        )

    def _keep_whole(
        self, objects: KeyArray, addresses: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> _Fragments:
        databases = self._databases(objects[:, 0], np.zeros(1, dtype=np.int64))
        return databases, whole_keys(objects), addresses, lengths, None

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
        batch = Batch(
            op=op,
            token=self._next_token,
            databases=self._databases(keys[:, 0], zero),
            keys=keys,
            addresses=zero.astype(np.uint64),
            lengths=zero.astype(np.uint32),
        )
        self._submit(batch, None, then)

    def _databases(
        self, words: NDArray[np.uint64], fragment_idx: NDArray[np.int64]
    ) -> NDArray[np.uint16]:
        spread = words + fragment_idx.astype(np.uint64)
        return (spread % np.uint64(self._num_databases)).astype(np.uint16)

    def _submit(self, batch: Batch, starts: NDArray[np.int64] | None, then: Then) -> None:
        num_entries = len(batch.databases)
        self._pending[batch.token] = _Pending(batch.op, time.monotonic(), num_entries, starts, then)
        self._next_token += 1
        self.num_inflight += 1
        try:
            self.card.submit(batch)
        except CardError as error:
            # Answered like any batch that failed, so that whoever waits is told.
            log.error("the card refused a batch: %s", error)  # noqa: TRY400
            self._on_done(batch.token, np.full(num_entries, Status.IO_ERROR, dtype=np.uint8))

    def close(self) -> None:
        """Close the card; continuations of unfinished batches never run."""
        self.card.close()
        self._pending.clear()
        if self.wakeup_fd >= 0:
            os.close(self.wakeup_fd)
            self.wakeup_fd = -1

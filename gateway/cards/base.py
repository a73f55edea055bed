"""The contract of a card: a batch key-value store over several databases.

    submit(Batch) ──► the card's own threads ──► on_done(token, status[n])

Threads. submit() is called by the gateway's main thread alone and never blocks
on I/O. on_done is called from a thread of the card's, once per batch, in any
order, and never from inside submit(). open() and close() are called by the main
thread; close() waits (with a deadline) until nothing touches ring memory any more.

Bytes. A READ answers OK only if memory at addr holds exactly the bytes written
under that key at that length; anything else is ABSENT (never written, deleted,
torn by a crash) or CORRUPT (a checksum, length or identity did not match). A card
may scribble over [addr, addr + align_up(length, alignment)) of a read that fails.
A WRITE reads memory until its batch is done; overwriting an existing key with
the same length is allowed, and the old or the new value is what later reads see.
A zero-length value is a marker: it exists or not and moves no bytes.

Durability. A WRITE that answered OK is readable at once and survives kill -9 of
the process; what a power loss may take is each card's to say. A batch may be
partly done: each entry has its own status. Entries of a batch run in any order.

Failure scope. A failed entry concerns that entry. A card that is gone answers
every entry IO_ERROR until it is back; it raises only from open().

A card knows nothing of engines, ranks, layers, objects or the ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.metrics import Histogram
from adp_kv.wire.keys import KeyArray


class Op(IntEnum):
    """What a batch does with each of its entries."""

    EXIST = 1
    READ = 2
    WRITE = 3
    DELETE = 4


class Status(IntEnum):
    """How one entry of a batch ended."""

    OK = 0
    ABSENT = 1
    CORRUPT = 2
    IO_ERROR = 3
    NO_SPACE = 4
    TOO_LARGE = 5


StatusArray: TypeAlias = NDArray[np.uint8]
OnDone: TypeAlias = Callable[[int, StatusArray], None]


@dataclass(frozen=True, slots=True)
class CardLimits:
    """What a card can take.

    Attributes:
        max_value_bytes: the longest value of one key.
        alignment_bytes: power of two; addresses of non-empty values are multiples of it,
            and a value's memory extends to the next multiple of it.
        num_databases: independent key spaces, read in parallel.
    """

    max_value_bytes: int
    alignment_bytes: int
    num_databases: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries that run together; all arrays have the same length n >= 1.

    Attributes:
        op: what to do.
        token: the caller's own number, handed back to on_done.
        databases: uint16 [n], each < limits.num_databases.
        keys: uint64 [n, 2]; no key twice in one WRITE or DELETE batch.
        addresses: uint64 [n], host memory to fill or to read; READ and WRITE only.
        lengths: uint32 [n], value bytes; READ and WRITE only.
    """

    op: Op
    token: int
    databases: NDArray[np.uint16]
    keys: KeyArray
    addresses: NDArray[np.uint64] | None = None
    lengths: NDArray[np.uint32] | None = None


class Card(ABC):
    """A batch key-value store (see the module's contract)."""

    @property
    @abstractmethod
    def limits(self) -> CardLimits:
        """What this card can take; known before open()."""

    @abstractmethod
    def open(self, on_done: OnDone) -> None:
        """Open the store and start its threads.

        Raises:
            CardError: It can't be opened; the message names the setting and the remedy.
        """

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> None:
        """Announce memory that later batches use, so that a card may pin it (an optimisation)."""

    @abstractmethod
    def unregister(self) -> None:
        """Forget the announced memory; no batch is in flight."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Queue a batch; on_done(batch.token, status) follows exactly once.

        Raises:
            CardError: The batch breaks the contract; nothing was queued.
        """

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return counters: at least values, bytes_read, bytes_written, corrupt, io_errors."""

    def latencies(self) -> dict[int, Histogram]:
        """Return each database's durations of I/O so far; empty where a card can't tell."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Finish or abandon what is in flight, flush and stop; safe to call twice."""

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

Groups. A value may belong to a group: the values of one chunk, and the marker that says
they are whole (its commit record). A card that evicts does so by the group, marker first,
so that EXIST never finds a marker whose values are going; a group without a marker is
kept `uncommitted_s` from its last write and then may go, at a restart at once. A value that
turns out lost or damaged takes its group's marker with it.

Durability. A WRITE that answered OK is readable at once and survives kill -9 of
the process; what a power loss may take is each card's to say. A batch may be
partly done: each entry has its own status. Entries of a batch run in any order.

Failure scope. A failed entry concerns that entry. A card that is gone answers
every entry IO_ERROR until it is back; it raises only from open().

A card knows nothing of engines, ranks, layers, objects or the ring.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from adp_kv.wire.keys import KeyArray


class Op(IntEnum):
    """What a batch does with each of its entries."""

    EXIST = 1
    READ = 2
    WRITE = 3
    DELETE = 4


class Status(IntEnum):
    """How one entry of a batch ended.

    UNREACHABLE is said above the card alone: it did not answer in time, or the entry's
    database is in quarantine.
    """

    OK = 0
    ABSENT = 1
    CORRUPT = 2
    IO_ERROR = 3
    NO_SPACE = 4
    TOO_LARGE = 5
    UNREACHABLE = 6


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
        uncommitted_s: how long values of a group without marker are kept; infinite for a
            card that evicts nothing.
        exclusive: nobody but this process writes what the card holds, and a WRITE that is
            submitted after a DELETE of its key wins. Only such a card is asked to delete what
            a save that failed has written: on another it may be a second gateway's by now.
    """

    max_value_bytes: int
    alignment_bytes: int
    num_databases: int
    uncommitted_s: float = math.inf
    exclusive: bool = False


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
        groups: uint64 [n], the group of each value, 0 for none; WRITE needs it, None for none.
        namespace: 32 bits that stand for whoever writes; a quota is counted by it.
    """

    op: Op
    token: int
    databases: NDArray[np.uint16]
    keys: KeyArray
    addresses: NDArray[np.uint64] | None = None
    lengths: NDArray[np.uint32] | None = None
    groups: NDArray[np.uint64] | None = None
    namespace: int = 0


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

    def verify(self) -> dict[str, int]:
        """Read every value of the open card; damaged ones go, with their chunk's commit record.

        Returns:
            values, bytes, corrupt, failed (could not be read), and what else the kind tells.

        Raises:
            CardError: This kind can't; the message says what can be done instead.
        """
        raise CardError("this kind of card can't list its values; each load checks what it reads")

    def format(self, *, force: bool) -> None:
        """Make the closed card empty.

        Args:
            force: even if it holds a card, a file system or something unknown.

        Raises:
            CardError: It holds something; or this kind can't, and the message says what can.
        """
        del force
        raise CardError("this kind of card is emptied with its server's or device's own command")

    @abstractmethod
    def close(self) -> None:
        """Finish or abandon what is in flight, flush and stop; safe to call twice."""

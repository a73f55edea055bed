"""Reading ahead: first layers of prompts whose requests still wait in the engine's queue.

    Ahead(chunks) ─► one batch at a time ─► shelf ─► a get of the same objects takes its slots
    Forget, deadline, somebody needs the slots ─► the shelf is given back

A shelf is a batch of objects of one cache in ring slots, read before any rank asked for
them. Caches go in the order of gets. It is never in anybody's way: a shelf is begun only
when every get has all of its reads under way and only one is being read at a time; its
slots go back as soon as a get finds none; all shelves together have `most_slots`. The first
is small and each twice the one before, as the batches of gets are: a get that comes while one
is being read has something to grant.

Threads: the gateway's main. Failure scope: a shelf; what could not be read is told to the
get that takes it, which then fails as if it had read it itself. Slots of a shelf that the
card does not answer in time are not given back before it does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.ring.slots import SlotAllocator
from adp_kv.units import ceil_div
from adp_kv.wire.keys import KeyArray, object_keys
from gateway.cards.base import StatusArray
from gateway.requests import Context, Ramp

MAX_WISHES = 64
DEADLINE_S = 10.0

Take: TypeAlias = Callable[[StatusArray], None]
"""Told the status of the taken objects once they are read."""


@dataclass(slots=True)
class Wish:
    """What a waiting request will restore.

    Attributes:
        chunks: uint64 [n, 2].
        caches: whose objects, in the order of gets.
        position: the first object that is not begun, cache-major.
    """

    chunks: KeyArray
    caches: list[int]
    deadline: float
    position: int = 0


@dataclass(slots=True, eq=False)
class Shelf:
    """Objects of one cache in slots.

    Attributes:
        wish: the number of the wish it belongs to.
        chunks: uint64 [n, 2]; slots: uint32 [n].
        status: uint8 [n], None while it is being read.
        takers: rows that a get has taken while it was being read, and whom to tell.
        gone: taken or dropped; `slots` are then those that nobody took.
        at_card: the card may touch the slots; `owed` are to be freed, and `quiets` told, when
            it no longer does.
    """

    wish: int
    cache: int
    chunks: KeyArray
    slots: NDArray[np.uint32]
    deadline: float
    status: StatusArray | None = None
    takers: list[tuple[slice, Take]] = field(default_factory=list)
    gone: bool = False
    at_card: bool = True
    owed: list[NDArray[np.uint32]] = field(default_factory=list)
    quiets: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Match:
    """Objects of a get that lie on a shelf: which of the get, which of the shelf."""

    first: int
    shelf: Shelf
    rows: slice


class ReadAhead:
    """Shelves of one session.

    Args:
        context: of the session.
        slots: the read slots, shared with the gets.
        is_idle: whether no get waits for its reads to begin.
        resume: serves gets that may have waited for slots, then calls pump().

    Attributes:
        num_withheld: slots to be freed that the card may still touch.
    """

    def __init__(
        self,
        context: Context,
        slots: SlotAllocator,
        is_idle: Callable[[], bool],
        resume: Callable[[], None],
    ) -> None:
        self._ctx = context
        self._slots = slots
        self._is_idle = is_idle
        self._resume = resume
        by_bytes = context.read_ahead_bytes // context.mapping.header.slot_bytes
        self._most_slots = min(by_bytes, slots.num_slots // 2)
        self._wishes: OrderedDict[int, Wish] = OrderedDict()
        self._shelves: list[Shelf] = []
        self._ramp = Ramp(context.batch_bytes)
        self._reading: Shelf | None = None
        self.num_withheld = 0

    @property
    def num_slots(self) -> int:
        """Slots of all shelves."""
        return sum(len(shelf.slots) for shelf in self._shelves)

    def wish(self, number: int, chunks: KeyArray, caches: list[int]) -> None:
        """Note chunks that a waiting request will restore; dropped after a deadline."""
        if self._most_slots and len(self._wishes) < MAX_WISHES:
            self._wishes[number] = Wish(chunks, caches, self._ctx.clock() + DEADLINE_S)
            self._ctx.counters.add("ahead_wishes")

    def forget(self, number: int) -> None:
        """Drop a wish and what was read for it."""
        self._wishes.pop(number, None)
        for shelf in [s for s in self._shelves if s.wish == number]:
            self._drop(shelf)

    def stop(self) -> None:
        """Begin nothing more: the session has ended."""
        self._wishes.clear()

    def on_get(self, chunks: KeyArray) -> None:
        """End the wishes of requests that wait no longer; their shelves stay for their gets."""
        for number, wish in list(self._wishes.items()):
            if (chunks == wish.chunks[0]).all(axis=1).any():
                del self._wishes[number]

    def tick(self) -> None:
        """Drop what nobody came for."""
        now = self._ctx.clock()
        late = {n for n, wish in self._wishes.items() if now > wish.deadline}
        late |= {shelf.wish for shelf in self._shelves if now > shelf.deadline}
        for number in late:
            self._ctx.counters.add("ahead_expired")
            self.forget(number)

    def pump(self) -> None:
        """Begin the next shelf, if none is being read and no get waits for its reads."""
        if self._reading is not None or not self._wishes or not self._is_idle():
            return
        for number, wish in self._wishes.items():
            if wish.position < len(wish.caches) * len(wish.chunks):
                self._begin(number, wish)
                return

    def _begin(self, number: int, wish: Wish) -> None:
        position, row = divmod(wish.position, len(wish.chunks))
        cache = wish.caches[position]
        object_bytes = self._ctx.session.caches[cache].object_bytes
        left = len(wish.chunks) - row
        held = self.num_slots + self.num_withheld
        if not self._shelves:
            self._ramp.reset()
        batch_bytes = self._ramp.batch_bytes
        most = min(max(1, batch_bytes // object_bytes), self._most_slots - held)
        if most < 1:
            return
        count = ceil_div(left, ceil_div(left, most))
        slots = self._slots.try_allocate(count)
        if slots is None:
            return
        self._ramp.begun(batch_bytes)
        wish.position += count
        shelf = Shelf(number, cache, wish.chunks[row : row + count], slots, wish.deadline)
        self._shelves.append(shelf)
        self._reading = shelf
        self._ctx.store.read(
            object_keys(shelf.chunks, [cache]),
            self._ctx.mapping.read_addresses(slots),
            np.full(count, object_bytes, dtype=np.int64),
            lambda status: self._on_read(shelf, status),
            lambda: self._on_quiet(shelf),
        )

    def _on_quiet(self, shelf: Shelf) -> None:
        """Take note that the card is done with a shelf, in time or late."""
        shelf.at_card = False
        for slots in shelf.owed:
            self.num_withheld -= len(slots)
            self._slots.free(slots)
        for quiet in shelf.quiets:
            quiet()
        if shelf.owed:
            self._resume()

    def _free(self, shelf: Shelf, slots: NDArray[np.uint32]) -> None:
        if shelf.at_card:
            self.num_withheld += len(slots)
            shelf.owed.append(slots)
        else:
            self._slots.free(slots)

    def _on_read(self, shelf: Shelf, status: StatusArray) -> None:
        self._reading = None
        self._ctx.counters.add("objects_read_ahead", len(status))
        shelf.status = status
        if shelf.gone:
            self._free(shelf, shelf.slots)
        for rows, take in shelf.takers:
            take(status[rows])
        self._resume()

    def find(self, cache: int, chunks: KeyArray, first: int) -> Match | None:
        """Return the first objects of a get, from a row on, that lie on a shelf."""
        best: Match | None = None
        for shelf in self._shelves:
            if shelf.cache != cache:
                continue
            match = _overlap(shelf, chunks, first)
            if match is not None and (best is None or match.first < best.first):
                best = match
        return best

    def take(
        self, match: Match, then: Take, quiet: Callable[[], None]
    ) -> tuple[NDArray[np.uint32], StatusArray | None]:
        """Hand a shelf's slots over to a get; the shelf's other slots are given back.

        Args:
            match: what to take.
            then: told the status once it is there, if it is not yet.
            quiet: told when the card is done with the slots, perhaps at once.

        Returns:
            The slots and their objects' status, None if `then` will be told it.
        """
        shelf, rows = match.shelf, match.rows
        self._shelves.remove(shelf)
        taken = shelf.slots[rows]
        self._ctx.counters.add("objects_taken_ahead", len(taken))
        rest = np.concatenate([shelf.slots[: rows.start], shelf.slots[rows.stop :]])
        if shelf.at_card:
            shelf.quiets.append(quiet)
        else:
            quiet()
        if shelf.status is None:
            shelf.takers.append((rows, then))
            shelf.gone, shelf.slots = True, rest
            return taken, None
        self._free(shelf, rest)
        return taken, shelf.status[rows]

    def give_way(self) -> bool:
        """Give the newest shelf's slots back; False if no slot can be had that way now."""
        for shelf in reversed(self._shelves):
            if shelf.status is not None:
                self._drop(shelf)
                return True
        return False

    def _drop(self, shelf: Shelf) -> None:
        self._shelves.remove(shelf)
        shelf.gone = True
        self._ctx.counters.add("objects_unused_ahead", len(shelf.slots))
        if shelf.status is not None:
            self._free(shelf, shelf.slots)


def _overlap(shelf: Shelf, chunks: KeyArray, first: int) -> Match | None:
    """Return the run of a get's chunks, from a row on, that a shelf holds in the same order."""
    wanted = chunks[first:]
    there = np.flatnonzero(np.isin(wanted[:, 0], shelf.chunks[:, 0]))
    if not there.size:
        return None
    start = int(there[0])
    row = int(np.argmax((shelf.chunks == wanted[start]).all(axis=1)))
    length = min(len(wanted) - start, len(shelf.chunks) - row)
    same = (wanted[start : start + length] == shelf.chunks[row : row + length]).all(axis=1)
    count = length if same.all() else int(np.argmin(same))
    return Match(first + start, shelf, slice(row, row + count)) if count else None

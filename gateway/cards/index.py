"""Open-addressing hash index in numpy: 16-byte key -> 63-bit location, by the batch.

Layout: `keys` uint64 [capacity, 2] (one cache line holds both words of a key) and
`values` int64 [capacity]; a value >= 0 is a location, EMPTY ends a probe, DELETED does
not. Probing is linear from a mixed home position, so a batch walks in lockstep: each
round settles most of the rows and only the rest go on. 24 bytes a table row, at most
MAX_LOAD of them used.

Batches behave as if their entries were applied one after another, so a key may occur
twice in one.

Threads. None of its own and no lock: the owner calls from one thread at a time.
Failure scope. Nothing here can fail but for memory.
It must not know what a location means.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.wire.keys import KEY_WORDS, KeyArray

ABSENT: Final = -1
"""Answered where a key has no location."""

_EMPTY: Final = -1
_DELETED: Final = -2
_FIRST_MARK: Final = -3
_MIN_CAPACITY: Final = 64
_GROW_LOAD: Final = 0.5  # live rows at which the next rehash doubles the table
_MAX_LOAD: Final = 0.65  # used rows (live and deleted) at which a rehash is due
_LOAD_PIECE: Final = 1 << 14
_MIX_A: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_B: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT: Final = np.uint64(32)

Locations: TypeAlias = NDArray[np.int64]
"""int64 [n]: a location >= 0, or ABSENT."""

_Rows: TypeAlias = NDArray[np.int64]


class KeyIndex:
    """A map from 16-byte keys to locations (see the module's contract).

    Attributes:
        generation: changes when keys move within the table.
    """

    def __init__(self, expected_keys: int = 0) -> None:
        """Make an empty index that holds `expected_keys` without a rehash."""
        self.generation = 0
        self._allocate(_capacity_for(expected_keys))

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._live

    @property
    def capacity(self) -> int:
        """Rows of the table, a power of two."""
        return self._values.size

    def lookup(self, keys: KeyArray) -> Locations:
        """Return the location of each key or ABSENT: uint64 [n, 2] -> int64 [n]."""
        rows = self._find(keys)
        found = self._values[rows]
        found[rows < 0] = ABSENT
        return found

    def insert(self, keys: KeyArray, locations: Locations) -> Locations:
        """Set the location of each key and return the ones that this displaced.

        Args:
            keys: uint64 [n, 2].
            locations: int64 [n], all >= 0.

        Returns:
            int64 [n]: the former location, or ABSENT where the key is new.

        Raises:
            ValueError: A location is negative; nothing changed.
        """
        if locations.size and int(locations.min()) < 0:
            raise ValueError("index locations must be >= 0")
        displaced = np.full(len(keys), ABSENT, dtype=np.int64)
        for wave in _waves(keys):
            displaced[wave] = self._insert_unique(keys[wave], locations[wave])
        return displaced

    def load(self, keys: KeyArray, locations: Locations) -> None:
        """Add many keys that are not there and differ from each other.

        Args:
            keys: uint64 [n, 2].
            locations: int64 [n], all >= 0.
        """
        self._make_room(len(keys))
        self._place_many(keys, locations)

    def delete(self, keys: KeyArray, only_if: Locations | None = None) -> Locations:
        """Remove keys and return the locations they had.

        Args:
            keys: uint64 [n, 2].
            only_if: int64 [n] or None; a key whose location differs stays.

        Returns:
            int64 [n]: the location removed, or ABSENT where nothing was.
        """
        removed = np.full(len(keys), ABSENT, dtype=np.int64)
        for wave in _waves(keys):
            rows = self._find(keys[wave])
            here = rows >= 0
            if only_if is not None:
                here &= self._values[rows] == only_if[wave]
            hit = rows[here]
            removed[wave[here]] = self._values[hit]
            self._values[hit] = _DELETED
            self._live -= hit.size
            self._sweep(hit)
        return removed

    def items(self) -> tuple[KeyArray, Locations]:
        """Return a copy of all keys and locations, in no particular order."""
        return self.piece(0, self.capacity)

    def piece(self, start: int, count: int) -> tuple[KeyArray, Locations]:
        """Return the keys and locations in `count` rows of the table from `start` on, a copy.

        Pieces up to `capacity` cover every key that is there all the while, as long as
        `generation` stays the same.
        """
        rows = start + np.flatnonzero(self._values[start : start + count] >= 0)
        return self._keys[rows], self._values[rows]

    def _allocate(self, capacity: int) -> None:
        self.generation += 1
        self._keys: KeyArray = np.zeros((capacity, KEY_WORDS), dtype=np.uint64)
        self._values: Locations = np.full(capacity, _EMPTY, dtype=np.int64)
        self._mask = np.int64(capacity - 1)
        self._live = 0
        self._used = 0

    def _home(self, keys: KeyArray) -> _Rows:
        # Keys are random bits in service but not in tests: mix both words.
        mixed = (keys[:, 0] * _MIX_A) ^ (keys[:, 1] * _MIX_B)
        mixed ^= mixed >> _SHIFT
        return mixed.view(np.int64) & self._mask

    def _find(self, keys: KeyArray) -> _Rows:
        """Return the table row of each key, -1 where it has none."""
        found = np.full(len(keys), -1, dtype=np.int64)
        rows = self._home(keys)
        entries = np.arange(len(keys))
        while entries.size:
            values = self._values[rows]
            there = self._keys[rows]
            match = (there[:, 0] == keys[:, 0]) & (there[:, 1] == keys[:, 1]) & (values >= 0)
            found[entries[match]] = rows[match]
            going = np.flatnonzero(~match & (values != _EMPTY))
            entries, keys = entries[going], keys[going]
            rows = (rows[going] + 1) & self._mask
        return found

    def _insert_unique(self, keys: KeyArray, locations: Locations) -> Locations:
        displaced = np.full(len(keys), ABSENT, dtype=np.int64)
        rows = self._find(keys)
        old = rows >= 0
        displaced[old] = self._values[rows[old]]
        self._values[rows[old]] = locations[old]
        if not old.all():
            new = ~old
            self._make_room(int(np.count_nonzero(new)))
            self._place(keys[new], locations[new])
        return displaced

    def _place(self, keys: KeyArray, locations: Locations) -> None:
        """Put keys that are not in the table and differ from each other into free rows."""
        self._live += len(keys)
        rows = self._home(keys)
        while len(keys):
            values = self._values[rows]
            free = np.flatnonzero(values < 0)
            # Several keys may want one row: each leaves its mark, one mark stays, and the key
            # it belongs to overwrites it below.
            marks = _FIRST_MARK - free
            self._values[rows[free]] = marks
            won = free[self._values[rows[free]] == marks]
            self._used += int(np.count_nonzero(values[won] == _EMPTY))
            self._keys[rows[won]] = keys[won]
            self._values[rows[won]] = locations[won]
            lost = np.ones(len(keys), dtype=np.bool_)
            lost[won] = False
            keys, locations = keys[lost], locations[lost]
            rows = (rows[lost] + 1) & self._mask

    def _place_many(self, keys: KeyArray, locations: Locations) -> None:
        for start in range(0, len(keys), _LOAD_PIECE):  # temporaries that stay in the cache
            piece = slice(start, start + _LOAD_PIECE)
            self._place(keys[piece], locations[piece])

    def _make_room(self, num_new: int) -> None:
        if self._used + num_new <= _MAX_LOAD * self.capacity:
            return
        keys, locations = self.items()
        self._allocate(max(_capacity_for(len(keys) + num_new), self.capacity))
        self._place_many(keys, locations)

    def _sweep(self, rows: _Rows) -> None:
        """Turn deleted rows that end a run back into empty ones, so that churn needs no rehash."""
        while rows.size:
            ends = self._values[(rows + 1) & self._mask] == _EMPTY
            rows = np.unique(rows[ends & (self._values[rows] == _DELETED)])
            self._values[rows] = _EMPTY
            self._used -= rows.size
            rows = (rows - 1) & self._mask


def _capacity_for(num_keys: int) -> int:
    needed = int(num_keys / _GROW_LOAD)
    return max(_MIN_CAPACITY, 1 << max(0, needed - 1).bit_length())


def _waves(keys: KeyArray) -> list[NDArray[np.int64]]:
    """Return row sets in which no key occurs twice, to be applied in order; often just one."""
    everything = np.arange(len(keys))
    first_words = np.sort(keys[:, 0])
    if not (first_words[1:] == first_words[:-1]).any():
        return [everything]
    order = np.lexsort((everything, keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    starts = np.ones(len(keys), dtype=np.bool_)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.maximum.accumulate(np.where(starts, everything, 0))
    occurrence = np.empty(len(keys), dtype=np.int64)
    occurrence[order] = everything - first
    return [np.flatnonzero(occurrence == k) for k in range(int(occurrence.max()) + 1)]

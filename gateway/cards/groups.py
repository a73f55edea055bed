"""Which groups of values a card holds, and which of them go when it is full: S3-FIFO.

    FREE ─enter─► OPEN ─commit─► SMALL or MAIN ─choose, expired─► GOING ─forget─► FREE
                   ▲  └──────────────── abandoned ──────────────────┘
                   └─ uncommit, enter (a value was lost or written, the marker deleted)

A group is the values of one chunk; its marker, the commit record, is what makes them
worth anything. New groups join the small queue (a tenth of the slots), groups that were
used there or were evicted lately the main queue, which gives each used one another round.
`use` (a marker was found) sets the use bit and a grace during which the group is passed
over, `hold` (values are being read) prolongs the grace.

A group is a row of numpy columns, about 90 bytes; batches of rows are handled at once.
A row is not used again before forget(), so a row names one life of a group: values that
are written while an old life is being evicted belong to a new one.

Threads. Any; every call takes the table's own lock, which is a leaf: no other is taken
under it. Failure scope. None of its own.
It must not know files, slots' contents or databases' tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from adp_kv.wire.keys import KeyArray
from gateway.cards.group_facts import COMMIT, NO_GROUP, CommitArray, Rules, Stage
from gateway.cards.group_queue import Ghosts, GroupRows, RowQueue
from gateway.cards.index import KeyIndex

_Scalar = TypeVar("_Scalar", bound=np.generic)

_NOBODY: Final[GroupRows] = np.empty(0, dtype=np.int64)
_SMALL_SHARE: Final = 0.1
_TAKE_ROWS: Final = 256
_MOST_TAKE_ROWS: Final = 1 << 14
_FIRST_ROWS: Final = 64
_MOST_STALE: Final = 1024  # entries of a queue, beyond twice the groups


@dataclass(frozen=True, slots=True)
class Choice:
    """What choose() decided.

    Attributes:
        victims: rows that are GOING now.
        promoted: rows that got another place in the order.
    """

    victims: GroupRows
    promoted: GroupRows


class GroupTable:
    """Rows of groups (see the module's contract)."""

    def __init__(self, rules: Rules, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        """Make an empty table.

        Args:
            rules: what is kept.
            clock: monotonic seconds.
            wall: seconds since 1970, for what outlives the process.
        """
        self.rules: Final = rules
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._index = KeyIndex()
        self._queues = {Stage.SMALL: RowQueue(), Stage.MAIN: RowQueue()}
        self._ghosts = Ghosts()
        self._next_stamp = 1
        self._stage_slots = np.zeros(len(Stage), dtype=np.int64)
        self._namespaces: dict[int, int] = {}
        self._namespace_slots: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._namespace_names: list[int] = []
        self._reserved: dict[int, int] = {}
        self._more_markers: dict[int, set[tuple[int, int, int]]] = {}
        self._facts: CommitArray = np.zeros(0, dtype=COMMIT)
        self._stage: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._used: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._marked: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._slots: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._spaces: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._written_at: NDArray[np.float64] = np.zeros(0)
        self._held_until: NDArray[np.float64] = np.zeros(0)
        self._free: GroupRows = _NOBODY
        self._grow(_FIRST_ROWS)

    def _grow(self, size: int) -> None:
        """Make the columns `size` rows long."""
        fresh = np.arange(size - 1, len(self._facts) - 1, -1, dtype=np.int64)
        self._free = np.concatenate([fresh, self._free])
        self._facts = _grown(self._facts, size)
        self._stage = _grown(self._stage, size)
        self._used = _grown(self._used, size)
        self._marked = _grown(self._marked, size)
        self._slots = _grown(self._slots, size)
        self._spaces = _grown(self._spaces, size)
        self._written_at = _grown(self._written_at, size)
        self._held_until = _grown(self._held_until, size)

    def __len__(self) -> int:
        """Return the number of groups, those that are going included."""
        return len(self._facts) - self._free.size

    def enter(
        self, groups: NDArray[np.uint64], namespace: int, *, markers: bool = False
    ) -> GroupRows:
        """Return the row of each group that values are written for, new ones opened.

        A group that is written to is not committed until its marker is written, again if
        need be: so it is not chosen, and comes to two lives, between two of its values.

        Args:
            groups: uint64 [n]; 0 stands for none.
            namespace: of groups that are new.
            markers: it is their markers that are written.

        Returns:
            int64 [n]; NO_GROUP where the group is 0.
        """
        if not groups.any():
            return np.full(groups.size, NO_GROUP, dtype=np.int64)
        with self._lock:
            names, inverse = np.unique(groups, return_inverse=True)
            rows = self._index.lookup(_as_keys(names))
            new = (rows < 0) & (names != 0)
            if new.any():
                rows[new] = self._open(names[new], namespace)
            if not markers:
                self._uncommit(rows)
            self._written_at[rows[rows >= 0]] = self._clock()
            return rows[inverse]

    def _open(self, names: NDArray[np.uint64], namespace: int) -> GroupRows:
        if names.size > self._free.size:
            self._grow(max(2 * len(self._facts), len(self._facts) + names.size))
        split = self._free.size - names.size
        rows = self._free[split:][::-1].copy()
        self._free = self._free[:split]
        self._facts[rows] = np.zeros(rows.size, dtype=COMMIT)
        self._facts["group"][rows] = names
        self._facts["namespace"][rows] = namespace
        self._stage[rows] = Stage.OPEN
        self._used[rows] = self._marked[rows] = False
        self._slots[rows] = 0
        self._spaces[rows] = self._space_of(namespace)
        self._held_until[rows] = 0.0
        self._index.insert(_as_keys(names), rows)
        return rows

    def _space_of(self, namespace: int) -> int:
        """Return the small number that stands for a namespace."""
        if namespace not in self._namespaces:
            number = self._namespaces[namespace] = len(self._namespaces)
            self._namespace_names.append(namespace)
            if number >= self._namespace_slots.size:
                self._namespace_slots = _grown(self._namespace_slots, 2 * number)
        return self._namespaces[namespace]

    def count_slots(self, rows: GroupRows, sign: int) -> None:
        """Note that one more (sign 1) or one less (-1) value of each row has a slot."""
        rows = rows[rows >= 0]
        if rows.size == 0:
            return
        with self._lock:
            np.add.at(self._slots, rows, sign)
            self._stage_slots += sign * np.bincount(self._stage[rows], minlength=len(Stage))
            spaces = np.bincount(self._spaces[rows], minlength=self._namespace_slots.size)
            self._namespace_slots += sign * spaces

    def commit(self, rows: GroupRows, databases: NDArray[np.uint16], keys: KeyArray) -> CommitArray:
        """Note markers that are about to be written; OPEN rows join a queue.

        Args:
            rows: int64 [n], entered.
            databases: uint16 [n], of the markers.
            keys: uint64 [n, 2], of the markers.

        Returns:
            COMMIT [n], for the journal. Where it can't be written, uncommit() the rows.
        """
        with self._lock:
            facts = self._facts
            self._note_markers(rows, databases, keys)
            facts["committed_at"][rows] = int(self._wall())
            facts["num_values"][rows] = self._slots[rows]
            fresh = np.unique(rows[self._stage[rows] == Stage.OPEN])
            main = self._ghosts.take(facts["group"][fresh])
            self._enqueue(fresh[~main], Stage.SMALL)
            self._enqueue(fresh[main], Stage.MAIN)
            self._used[fresh] = False
            self._ghosts.fit(len(self))
            told: CommitArray = facts[rows]
            told["key"], told["database"] = keys, databases
            return told

    def _note_markers(self, rows: GroupRows, databases: NDArray[np.uint16], keys: KeyArray) -> None:
        facts = self._facts
        first = np.zeros(rows.size, dtype=np.bool_)
        first[np.unique(rows, return_index=True)[1]] = True
        first &= ~self._marked[rows]
        facts["key"][rows[first]] = keys[first]
        facts["database"][rows[first]] = databases[first]
        self._marked[rows[first]] = True
        # Two chunks whose keys share word 0, if ever: they are one group with two markers.
        other = (facts["key"][rows] != keys).any(axis=1) | (facts["database"][rows] != databases)
        for i in np.flatnonzero(other).tolist():
            marker = (int(databases[i]), int(keys[i, 0]), int(keys[i, 1]))
            self._more_markers.setdefault(int(rows[i]), set()).add(marker)

    def _enqueue(self, rows: GroupRows, stage: Stage) -> None:
        """Put rows at the end of a queue in ascending order of what they were given last."""
        stamps = np.arange(self._next_stamp, self._next_stamp + rows.size, dtype=np.int64)
        self._next_stamp += rows.size
        self._facts["stamp"][rows] = stamps
        self._facts["main"][rows] = stage is Stage.MAIN
        self._move(rows, stage)
        queue = self._queues[stage]
        queue.push(rows, stamps)
        # Groups that went without being chosen, expired ones say, are in it still.
        if len(queue) > 2 * len(self) + _MOST_STALE:
            queue.tidy(self._facts["stamp"])

    def _move(self, rows: GroupRows, stage: Stage) -> None:
        counts = self._slots[rows]
        np.subtract.at(self._stage_slots, self._stage[rows], counts)
        self._stage_slots[stage] += int(counts.sum())
        self._stage[rows] = stage

    def uncommit(self, rows: GroupRows) -> None:
        """Make committed groups OPEN again: a value was lost, or the marker is gone."""
        with self._lock:
            self._uncommit(rows)

    def _uncommit(self, rows: GroupRows) -> None:
        rows = np.unique(rows[self._is_committed(rows)])
        if rows.size:
            self._facts["stamp"][rows] = 0
            self._move(rows, Stage.OPEN)
            self._written_at[rows] = self._clock()

    def _is_committed(self, rows: GroupRows) -> NDArray[np.bool_]:
        stages = self._stage[np.maximum(rows, 0)]
        queued: NDArray[np.bool_] = (stages == Stage.SMALL) | (stages == Stage.MAIN)
        return queued & (rows >= 0)

    def committed(self, rows: GroupRows) -> NDArray[np.bool_]:
        """Return which rows are committed: bool [n]."""
        with self._lock:
            return self._is_committed(rows)

    def use(self, rows: GroupRows) -> NDArray[np.bool_]:
        """Note that markers were found; return which groups may be offered: bool [n].

        A group that is offered stays for grace_s. One that is going, lost a value or has
        outlived ttl_s is not.
        """
        with self._lock:
            alive = self._is_committed(rows)
            if self.rules.ttl_s:
                born = self._facts["committed_at"][np.maximum(rows, 0)]
                alive &= born + self.rules.ttl_s > self._wall()
            self._used[rows[alive]] = True
            self._held_until[rows[alive]] = self._clock() + self.rules.grace_s
            return alive

    def hold(self, rows: GroupRows) -> None:
        """Keep groups, values of which are being read, for another grace_s."""
        rows = rows[rows >= 0]
        with self._lock:
            self._held_until[rows] = self._clock() + self.rules.grace_s

    def reserve(self, namespace: int, wanted: int) -> int:
        """Return how many of `wanted` slots a namespace may take; release() follows."""
        if not self.rules.quota_slots:
            return wanted
        with self._lock:
            space = self._space_of(namespace)
            used = int(self._namespace_slots[space])
            reserved = self._reserved.get(namespace, 0)
            granted = max(0, min(wanted, self.rules.quota_slots - used - reserved))
            self._reserved[namespace] = reserved + granted
            return granted

    def release(self, namespace: int, count: int) -> None:
        """End a reservation: the values were counted, or not written."""
        if self.rules.quota_slots:
            with self._lock:
                self._reserved[namespace] -= count

    def over_quota(self, share: float) -> list[int]:
        """Return the namespaces that use more than `share` of their quota."""
        limit = self.rules.quota_slots * share
        with self._lock:
            used = self._namespace_slots[: len(self._namespace_names)]
            crowded = np.flatnonzero(used > limit).tolist() if limit else []
            return [self._namespace_names[i] for i in crowded]

    def used_slots(self, namespace: int) -> int:
        """Return how many slots the values of a namespace have."""
        with self._lock:
            space = self._space_of(namespace)
            return int(self._namespace_slots[space])

    def choose(self, wanted_slots: int, namespace: int | None = None) -> Choice:
        """Choose groups to evict, oldest first, that hold `wanted_slots` or as many as may go.

        Args:
            wanted_slots: slots to free.
            namespace: evict of this one alone; None: of all.
        """
        with self._lock:
            space = None if namespace is None else self._space_of(namespace)
            return self._choose(wanted_slots, space)

    def _choose(self, wanted_slots: int, space: int | None) -> Choice:
        victims: list[GroupRows] = []
        promoted: list[GroupRows] = []
        passed: dict[Stage, list[NDArray[np.int64]]] = {Stage.SMALL: [], Stage.MAIN: []}
        exhausted: set[Stage] = set()
        freed, look = 0, _TAKE_ROWS
        while freed < wanted_slots and len(exhausted) < len(passed):
            stage = self._next_queue(exhausted)
            entries = self._queues[stage].take(look)
            if not len(entries):
                exhausted.add(stage)
                continue
            entries = entries[self._facts["stamp"][entries[:, 0]] == entries[:, 1]]
            held = self._is_held(entries[:, 0], space)
            used = ~held & self._used[entries[:, 0]]
            out = ~held & ~used
            # Where all are held or another namespace's, they are passed over in large steps.
            look = _TAKE_ROWS if not held.all() else min(2 * look, _MOST_TAKE_ROWS)
            sums = np.cumsum(np.where(out, self._slots[entries[:, 0]], 0))
            upto = int(np.searchsorted(sums, wanted_slots - freed)) + 1
            self._queues[stage].put_back(entries[upto:])
            entries, held, used, out = entries[:upto], held[:upto], used[:upto], out[:upto]
            passed[stage].append(entries[held])
            again = entries[used, 0]
            self._used[again] = False
            self._enqueue(again, Stage.MAIN)
            promoted.append(again)
            gone = entries[out, 0]
            if stage is Stage.SMALL:
                self._ghosts.add(self._facts["group"][gone])
            freed += int(self._slots[gone].sum())
            self._retire(gone)
            victims.append(gone)
        for stage, kept in passed.items():
            if kept:
                self._queues[stage].put_back(np.concatenate(kept))
        left = np.unique(np.concatenate([_NOBODY, *promoted]))
        left = left[self._is_committed(left)]
        return Choice(np.concatenate([_NOBODY, *victims]), left)

    def _next_queue(self, exhausted: set[Stage]) -> Stage:
        committed = self._stage_slots[Stage.SMALL] + self._stage_slots[Stage.MAIN]
        crowded = self._stage_slots[Stage.SMALL] > _SMALL_SHARE * committed
        small = crowded if Stage.MAIN not in exhausted else True
        return Stage.SMALL if small and Stage.SMALL not in exhausted else Stage.MAIN

    def _is_held(self, rows: GroupRows, space: int | None) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = self._held_until[rows] > self._clock()
        if space is not None:
            held |= self._spaces[rows] != space
        return held

    def _retire(self, rows: GroupRows) -> None:
        self._index.delete(_as_keys(self._facts["group"][rows]))
        self._facts["stamp"][rows] = 0
        self._move(rows, Stage.GOING)

    def expired(self) -> GroupRows:
        """Choose the committed groups that have outlived ttl_s and nobody reads."""
        if not self.rules.ttl_s:
            return _NOBODY
        with self._lock:
            committed = (self._stage == Stage.SMALL) | (self._stage == Stage.MAIN)
            old = self._facts["committed_at"] + self.rules.ttl_s <= self._wall()
            rows = np.flatnonzero(committed & old & (self._held_until <= self._clock()))
            self._retire(rows)
            return rows

    def abandoned(self) -> GroupRows:
        """Choose the groups that were left without a marker open_s ago."""
        with self._lock:
            now = self._clock()
            rows = np.flatnonzero(
                (self._stage == Stage.OPEN)
                & (self._written_at + self.rules.open_s <= now)
                & (self._held_until <= now)
            )
            self._retire(rows)
            return rows

    def markers(self, rows: GroupRows) -> tuple[GroupRows, CommitArray]:
        """Return the markers that rows have: the row and the facts of each."""
        with self._lock:
            rows = rows[self._marked[rows]]
            more = [(r, m) for r in rows.tolist() for m in self._more_markers.get(r, ())]
            owners = np.concatenate([rows, np.array([r for r, _ in more], dtype=np.int64)])
            facts: CommitArray = self._facts[owners]
            for i, (_, (database, *words)) in enumerate(more, rows.size):
                facts["database"][i] = database
                facts["key"][i] = words
            return owners, facts

    def forget(self, rows: GroupRows) -> GroupRows:
        """Free rows that are GOING; return those that still have values."""
        with self._lock:
            busy = self._slots[rows] > 0
            done = rows[~busy]
            self._stage[done] = Stage.FREE
            for row in done.tolist() if self._more_markers else ():
                self._more_markers.pop(row, None)
            self._free = np.concatenate([self._free, done])
            return rows[busy]

    def restore(self, commits: CommitArray) -> GroupRows:
        """Fill an empty table in the order of the stamps; return the row of each commit.

        Args:
            commits: COMMIT [n], as commit() told them.
        """
        with self._lock:
            latest_first = np.argsort(commits["stamp"], kind="stable")[::-1]
            _, last = np.unique(commits["group"][latest_first], return_index=True)
            chosen = commits[latest_first[np.sort(last)[::-1]]]
            rows = self._open(np.ascontiguousarray(chosen["group"]), 0)
            self._facts[rows] = chosen
            self._marked[rows] = True
            for namespace in np.unique(chosen["namespace"]).tolist():
                self._spaces[rows[chosen["namespace"] == namespace]] = self._space_of(namespace)
            for stage, mine in ((Stage.SMALL, ~chosen["main"]), (Stage.MAIN, chosen["main"])):
                self._stage[rows[mine]] = stage
                self._queues[stage].push(rows[mine], chosen["stamp"][mine])
            self._next_stamp = int(chosen["stamp"].max(initial=0)) + 1
            self._ghosts.fit(len(self))
            found = self._index.lookup(_as_keys(np.ascontiguousarray(commits["group"])))
            self._note_markers(found, commits["database"], np.ascontiguousarray(commits["key"]))
            return found

    def discard(self, rows: GroupRows) -> None:
        """Forget restored groups, values of which are missing."""
        with self._lock:
            self._retire(rows)
        self.forget(rows)

    def stamps(self, rows: GroupRows) -> NDArray[np.int64]:
        """Return the place of each row in the order of the queues, 0 where it has none."""
        with self._lock:
            stamps: NDArray[np.int64] = self._facts["stamp"][np.maximum(rows, 0)]
            return np.where(rows >= 0, stamps, 0)

    def rows_of(self, groups: NDArray[np.uint64]) -> GroupRows:
        """Return the row of each group, NO_GROUP where there is none."""
        with self._lock:
            return self._index.lookup(_as_keys(groups))


def _as_keys(names: NDArray[np.uint64]) -> KeyArray:
    return np.stack([names, np.zeros_like(names)], axis=1)


def _grown(column: NDArray[_Scalar], size: int) -> NDArray[_Scalar]:
    longer = np.zeros(size, dtype=column.dtype)
    longer[: len(column)] = column
    return longer

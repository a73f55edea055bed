"""Blocks that vLLM shares although what belongs in them never came.

vLLM enters the blocks of a layer-wise restore into its prefix cache when it reserves them. When
the restore fails it fails the requests that run with them, but not those that were preempted or
ended between the scheduling of the step and its report: what they leave behind, and all that
was computed from it, would be hit by later requests. So it is forgotten here.

Threads: vLLM's scheduler. Failure scope: a block forgotten in vain costs a local hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

REMEMBERED_STEPS = 16
"""Steps that vLLM may have scheduled ahead of a report; more than it ever does."""


class EndedTables:
    """Block tables of requests that ended lately."""

    def __init__(self) -> None:
        self._tables: deque[tuple[int, Sequence[int]]] = deque()

    def add(self, step: int, table: Sequence[int]) -> None:
        """Note what a request gives away after a step was scheduled."""
        self._tables.append((step, table))
        while self._tables[0][0] < step - REMEMBERED_STEPS:
            self._tables.popleft()

    def since(self, step: int) -> list[Sequence[int]]:
        """Return the tables of requests that ended after a step was scheduled."""
        return [table for ended, table in self._tables if ended >= step]


def tainted_blocks(tables: Iterable[Sequence[int]], invalid: AbstractSet[int]) -> set[int]:
    """Return invalid blocks and whatever comes after one in a request's table."""
    found = set(invalid)
    for table in tables:
        first = next((i for i, block in enumerate(table) if block in invalid), len(table))
        found.update(table[first:])
    return found


def forget_tainted(pool: Any, tables: Iterable[Sequence[int]], invalid: AbstractSet[int]) -> None:
    """Take what a failed restore has spoilt out of vLLM's prefix cache.

    Args:
        pool: vLLM's block pool.
        tables: block ids of requests that live, or ended since the step was scheduled.
        invalid: blocks that should have been restored.
    """
    pool.evict_blocks(tainted_blocks(tables, invalid))

"""Which ranks exchange with which: pure decisions from what every rank says of itself.

Ranks of one host that all reach each other over NVLink form a group. Where only some do, each
rank joins the first group all of whose members it reaches. A rank alone copies directly.
Every rank decides for all, from the same facts, and so finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from adp_kv.errors import TransferError


def partition(reach: Sequence[Sequence[bool]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks, each ascending, in the order of their first members.

    Args:
        reach: reach[i][j]: rank i says that it reaches rank j; both must say so.

    Raises:
        TransferError: It is not square.
    """
    num = len(reach)
    if any(len(row) != num for row in reach):
        raise TransferError("every rank must say of every rank whether it reaches it")
    groups: list[list[int]] = []
    for rank in range(num):
        for group in groups:
            if all(reach[rank][other] and reach[other][rank] for other in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(tuple(group) for group in groups)


def describe(groups: Sequence[Sequence[int]]) -> str:
    """Return groups as text: "0-7" or "0-3 | 4-7" or "0,2 | 1 | 3"."""
    return " | ".join(_span(group) for group in groups)


def _span(group: Sequence[int]) -> str:
    if len(group) > 1 and list(group) == list(range(group[0], group[-1] + 1)):
        return f"{group[0]}-{group[-1]}"
    return ",".join(map(str, group))

"""What is known of groups: rules, stages of a life, and a marker's facts for the journal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

NO_GROUP: Final = -1

COMMIT: Final = np.dtype(
    [
        ("group", "<u8"),
        ("key", "<u8", (2,)),
        ("stamp", "<i8"),
        ("namespace", "<u4"),
        ("committed_at", "<u4"),
        ("num_values", "<u4"),
        ("database", "<u2"),
        ("main", "?"),
    ]
)
"""What is known of a group's marker: its key and database, its place in the order of the
queues (stamp) and in which (main), its namespace, seconds since 1970, values then."""

CommitArray: TypeAlias = NDArray[np.void]
"""COMMIT [n]."""


class Stage(IntEnum):
    """Where a row is in its life; the module's picture."""

    FREE = 0
    OPEN = 1
    SMALL = 2
    MAIN = 3
    GOING = 4


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept, for how long.

    Attributes:
        num_slots: of the card.
        grace_s: how long a group is passed over after use() and hold().
        open_s: how long a group without marker is kept after its last write.
        ttl_s: seconds after its commit a group is gone; 0: never.
        quota_slots: most slots of one namespace; 0: no limit.
    """

    num_slots: int
    grace_s: float
    open_s: float
    ttl_s: float = 0.0
    quota_slots: int = 0

"""What the scheduler side tells the workers each step, and what they answer.

These objects travel by vLLM's own means inside one engine; arrays are numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from adp_kv.wire.keys import KeyArray


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of one part to move and the blocks they belong to.

    Attributes:
        part: number of the KV cache group.
        keys: uint64 [n, 2], of the part.
        blocks: int64 [n, pages of the part]; -1 where the page is not wanted.
        request_ids: whose they are; for async restores, who waits.
    """

    part: int
    keys: KeyArray
    blocks: NDArray[np.int64]
    request_ids: list[str]


@dataclass
class AdpMetadata(KVConnectorMetadata):
    """One step's work.

    Attributes:
        step: number of the step; names its requests to the gateway on all ranks.
        idle: nothing is computed in this step; vLLM before 0.29 then skips wait_for_save.
        acknowledged_failure: the last step of which the scheduler side knows that a
            restore failed; saves wait for it, since later steps may have computed from
            pages that never came.
        restore, async_restore, save: at most one entry a part.
    """

    step: int
    idle: bool = False
    acknowledged_failure: int = -1
    restore: list[Chunks] = field(default_factory=list)
    async_restore: list[Chunks] = field(default_factory=list)
    save: list[Chunks] = field(default_factory=list)


@dataclass
class AdpWorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks report after a step, added up over ranks.

    Attributes:
        saved_steps: step → how many ranks no longer need its blocks.
        unsaved_steps: steps whose save was given up by some rank.
        failed_step: last step of which a restore failed on some rank, -1 for none.
        failed_requests: async restores that failed.
        off: some rank has turned the cache off.
        off_sessions: which sessions (generations) those ranks were in.
    """

    saved_steps: dict[int, int] = field(default_factory=dict)
    unsaved_steps: set[int] = field(default_factory=set)
    failed_step: int = -1
    failed_requests: set[str] = field(default_factory=set)
    off: bool = False
    off_sessions: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell: so it is after most steps."""
        found = self.saved_steps or self.unsaved_steps or self.failed_requests or self.off
        return not found and self.failed_step < 0

    def aggregate(self, other: Any) -> AdpWorkerMetadata:
        """Add another rank's report to this one."""
        for step, count in other.saved_steps.items():
            self.saved_steps[step] = self.saved_steps.get(step, 0) + count
        self.unsaved_steps |= other.unsaved_steps
        self.failed_step = max(self.failed_step, other.failed_step)
        self.failed_requests |= other.failed_requests
        self.off |= other.off
        self.off_sessions |= other.off_sessions
        return self

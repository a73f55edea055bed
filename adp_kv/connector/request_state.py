"""What the scheduler side knows of one request, and the chunks it picks for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adp_kv.connector.metadata import Chunks
from adp_kv.sdk.lookup import LookupTicket
from adp_kv.wire.keys import KeyArray


@dataclass(slots=True)
class RequestState:
    """What the scheduler side knows of one request.

    Attributes:
        ready_by: until then a gateway that is still being joined is waited for.
        next_chunk: of each part, the first chunk not yet considered for saving.
        due: with fewer computed tokens a step leaves nothing to save; 0: each step is looked at.
        keys: uint64 [n, 2] of the chunks hashed so far, those of part 0.
        tables: of each part, block ids in order, as the workers know them; what vLLM has
            given up since is still in them.
        hit_end: where the stored prefix ends, in tokens, as last told to vLLM.
        loads_async: how that prefix is loaded, as last told to vLLM.
        failed: a restore of it failed; it is not offered another.
        unnamed: no key of it can be built: it is neither looked up nor saved.
        most_computed: the most tokens that counted as computed in a step since its tables began;
            with rejected drafts the number falls again, what vLLM gave up does not come back.
    """

    request: Any
    ready_by: float
    next_chunk: list[int]
    due: int = 0
    namespace: bytes | None = None
    keys: KeyArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.uint64))
    tables: list[list[int]] = field(default_factory=list)
    lookup: LookupTicket | None = None
    hit_end: int = 0
    loads_async: bool = False
    failed: bool = False
    unnamed: bool = False
    most_computed: int = 0

    def forget_keys(self) -> None:
        """Begin anew with another namespace."""
        self.namespace, self.lookup, self.keys = None, None, np.zeros((0, 2), dtype=np.uint64)
        self.next_chunk, self.due, self.hit_end = [0] * len(self.next_chunk), 0, 0

    def follow_tables(self, new_blocks: Sequence[Sequence[int]], *, from_start: bool) -> None:
        """Take in the blocks of a step: all of each table, or what was added to it."""
        if from_start:
            self.tables = [list(blocks) for blocks in new_blocks]
            self.most_computed = 0
            return
        for table, blocks in zip(self.tables, new_blocks, strict=True):
            table.extend(blocks)


@dataclass(slots=True)
class _PartSelection:
    keys: list[KeyArray] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)


class Selection:
    """Chunks picked for a step: keys, block ids and owners, by part."""

    def __init__(self) -> None:
        self._parts: dict[int, _PartSelection] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def num_chunks(self) -> int:
        """Chunks of all parts."""
        return sum(len(chosen.keys) for chosen in self._parts.values())

    @property
    def num_blocks(self) -> int:
        """Their blocks."""
        return sum(len(blocks) for chosen in self._parts.values() for blocks in chosen.blocks)

    def add(self, part: int, key: KeyArray, blocks: list[int], request_id: str) -> None:
        """Add one chunk."""
        chosen = self._parts.setdefault(part, _PartSelection())
        chosen.keys.append(key)
        chosen.blocks.append(blocks)
        chosen.request_ids.append(request_id)

    def take(self) -> list[Chunks]:
        """Return what was added, by part, and start anew."""
        if not self._parts:
            return []
        taken = [
            Chunks(
                part=part,
                keys=np.stack(chosen.keys),
                blocks=np.array(chosen.blocks, dtype=np.int64),
                request_ids=chosen.request_ids,
            )
            for part, chosen in sorted(self._parts.items())
        ]
        self._parts = {}
        return taken

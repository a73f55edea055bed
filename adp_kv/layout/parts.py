"""What each part of an engine's caches needs at a boundary between chunks; numpy only.

A part is a KV cache group: layers that share a block table. Chunks are stored and
committed by part, under keys of the part, because parts keep different chunks:

    full     a hit needs every chunk before its end, each with all of its blocks
    window   the chunks that reach into the window before its end; of a chunk only the
             last blocks, where the window is shorter than a chunk
    state    the chunk that ends there; its last block holds the recurrent state

So a hit may end only where every part has what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adp_kv.units import ceil_div


@dataclass(frozen=True, slots=True)
class Part:
    """One KV cache group.

    Attributes:
        index: number of the group.
        block_tokens: tokens of a block, those of all ranks that share them.
        blocks_per_chunk: blocks of a chunk in the group's table.
        kept_tokens: how many tokens before the next one a layer still reads: a window less
            one, or 1 for a state; None for all.
        recurrent: the group keeps states, one a block.
    """

    index: int
    block_tokens: int
    blocks_per_chunk: int
    kept_tokens: int | None = None
    recurrent: bool = False

    @property
    def needed_blocks(self) -> int | None:
        """Last blocks before a hit's end that it needs; None for all."""
        if self.kept_tokens is None:
            return None
        return max(1, ceil_div(self.kept_tokens, self.block_tokens))

    @property
    def pages(self) -> int:
        """Pages of a chunk's object: its last blocks."""
        needed = self.needed_blocks
        return self.blocks_per_chunk if needed is None else min(needed, self.blocks_per_chunk)

    @property
    def depth(self) -> int | None:
        """Chunks before a hit's end that it needs; None for all."""
        needed = self.needed_blocks
        return None if needed is None else ceil_div(needed, self.blocks_per_chunk)

    def positions(self, chunk: int) -> range:
        """Return where in the block table the pages of a chunk's object are."""
        end = (chunk + 1) * self.blocks_per_chunk
        return range(end - self.pages, end)

    def first_needed(self, num_chunks: int) -> int:
        """Return the first position in the table that a hit of num_chunks needs."""
        needed = self.needed_blocks
        return 0 if needed is None else max(0, num_chunks * self.blocks_per_chunk - needed)

    def first_kept(self, num_computed: int) -> int:
        """Return the first position that vLLM keeps when num_computed tokens are computed."""
        if self.kept_tokens is None:
            return 0
        return max(0, num_computed - self.kept_tokens) // self.block_tokens


def usable_chunks(parts: Sequence[Part], present: NDArray[np.bool_]) -> int:
    """Return the most chunks after which every part has what it needs; 0 if none.

    Args:
        parts: of the engine.
        present: bool [num_parts, n], which chunks a part has.
    """
    ends = np.arange(present.shape[1] + 1)
    usable = np.ones(len(ends), dtype=np.bool_)
    for part, row in zip(parts, present, strict=True):
        absent = np.concatenate([[0], np.cumsum(~row)])
        first = np.zeros_like(ends) if part.depth is None else np.maximum(0, ends - part.depth)
        usable &= absent == absent[first]
    return int(np.flatnonzero(usable)[-1])

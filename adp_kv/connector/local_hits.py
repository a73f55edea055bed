"""Local hits that not every KV cache group has: vLLM 0.25 with a connector and recurrent states.

It takes the longest local hit of any group and leaves it to the connector to bring what the
other groups lack. Where the card has nothing longer, nobody would: the engine would go on
from a state that is not there. So what of such a hit is of no use is forgotten, and vLLM is
made to look again.

Threads: vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adp_kv.layout.parts import Part, usable_chunks


def _cached(pool: Any, part: Part, hashes: Sequence[bytes], hash_tokens: int, position: int) -> Any:
    """Return the block at a position of a group's table that vLLM's prefix cache has, or None."""
    last = (position + 1) * part.block_tokens // hash_tokens - 1
    found = pool.get_cached_block(hashes[last], [part.index])
    return found[0] if found else None


def local_chunks(
    pool: Any, parts: Sequence[Part], hashes: Sequence[bytes], hash_tokens: int, num_chunks: int
) -> int:
    """Return after how many chunks, at most num_chunks, every group has what it needs."""

    def whole(part: Part, chunk: int) -> bool:
        return all(_cached(pool, part, hashes, hash_tokens, p) for p in part.positions(chunk))

    present = [[whole(part, chunk) for chunk in range(num_chunks)] for part in parts]
    return usable_chunks(parts, np.array(present, dtype=np.bool_))


def trim_local_hit(
    pool: Any, parts: Sequence[Part], hashes: Sequence[bytes], hash_tokens: int, num_chunks: int
) -> bool:
    """Return whether every group has what a local hit of num_chunks needs.

    Where one has not, the blocks beyond the longest usable hit are forgotten by vLLM's
    prefix cache (those that run keep them), so that its next look ends there.

    Args:
        pool: vLLM's block pool.
        parts: of the engine.
        hashes: the request's block hashes.
        hash_tokens: tokens of each.
        num_chunks: as many vLLM counts as hit locally.
    """
    usable = local_chunks(pool, parts, hashes, hash_tokens, num_chunks)
    if usable == num_chunks:
        return True
    for part in parts:
        beyond = range(usable * part.blocks_per_chunk, num_chunks * part.blocks_per_chunk)
        blocks = (_cached(pool, part, hashes, hash_tokens, position) for position in beyond)
        pool.evict_blocks({block.block_id for block in blocks if block is not None})
    return False

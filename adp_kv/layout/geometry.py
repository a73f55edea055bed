"""Where a rank's pages and slices are: numbers only, no tensor library.

    object (ring slot)   [ slice of rank 0 | slice of rank 1 | ... ]
    slice                [ page of block 0 | page of block 1 | ... ]   blocks of one chunk
    page                 the bytes of one block as the engine lays them out

Ranks differ in heads, in tokens (where they share the tokens of every block), in both, or not
at all: then they hold the same slice.

A page's address is base_address + block * block_stride_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import ConfigError, TransferError

CACHES_PER_LAYER = 8


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """One cache of one layer on this rank.

    Attributes:
        index: engine-wide number of the (layer, cache kind).
        name: the engine's name of the layer.
        base_address: address of block 0's page.
        block_stride_bytes: distance between two blocks' pages.
        page_bytes: bytes of one page; at most the stride.
        num_blocks: blocks of the pool.
        blocks_per_chunk: pages of a slice: all blocks of a chunk, or its last ones where only
            those are of use.
        slice_idx, num_slices: which slice of an object this rank holds.
        replica_idx, num_replicas: this rank among those that hold the same slice.
        layout: item type, shape and strides inside a page; part of the keys' namespace.
        part: the KV cache group; its chunks are stored and committed by themselves.
    """

    index: int
    name: str
    base_address: int
    block_stride_bytes: int
    page_bytes: int
    num_blocks: int
    blocks_per_chunk: int
    slice_idx: int = 0
    num_slices: int = 1
    replica_idx: int = 0
    num_replicas: int = 1
    layout: str = ""
    part: int = 0

    @property
    def slice_bytes(self) -> int:
        """Bytes of this rank's slice of an object."""
        return self.blocks_per_chunk * self.page_bytes

    @property
    def slice_offset(self) -> int:
        """Where this rank's slice begins in a ring slot."""
        return self.slice_idx * self.slice_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of one object, all slices together."""
        return self.num_slices * self.slice_bytes

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same bytes."""
        return self.num_slices == 1 and self.num_replicas > 1

    def replica_rows(self, num_objects: int, turn: int) -> slice:
        """Return which of num_objects this rank stores when replicas share the work.

        A put of a chunk or two is shared too: from layer to layer, and from cache to cache of
        a layer, another rank's turn comes first.

        Args:
            num_objects: objects of this cache in one put.
            turn: any number all replicas agree on; rotates who gets which share.
        """
        layer, kind = divmod(self.index, CACHES_PER_LAYER)
        share = (self.replica_idx + turn + layer + kind) % self.num_replicas
        first = num_objects * share // self.num_replicas
        return slice(first, num_objects * (share + 1) // self.num_replicas)


class CacheStack:
    """Caches side by side as arrays, so that pages of many layers are one expression.

    Attributes:
        shape_ids: int64 [num_caches]; caches with the same id have slices of the same
            size at the same offset and can share one transfer.
        has_replicas: several ranks hold the same of some cache and store a part each.
    """

    def __init__(self, caches: Sequence[CacheGeometry]) -> None:
        self.caches = list(caches)
        self._bases = np.array([c.base_address for c in caches], dtype=np.int64)
        self._strides = np.array([c.block_stride_bytes for c in caches], dtype=np.int64)
        self._num_blocks = min(c.num_blocks for c in caches)
        shapes = [(c.page_bytes, c.blocks_per_chunk, c.slice_offset) for c in caches]
        numbers = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
        self.shape_ids = np.array([numbers[shape] for shape in shapes], dtype=np.int64)
        self.has_replicas = any(cache.num_replicas > 1 for cache in caches)
        self._has_one_shape = len(numbers) == 1

    def shares(
        self, positions: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.bool_] | None, list[tuple[int, int]]]]:
        """Yield what of a batch can share one transfer: the objects of one shape.

        Args:
            positions: int64 [n], ascending: which cache each object belongs to.

        Yields:
            bool [n], or None for all objects; and (cache, its objects) for each cache.
        """
        first, last = int(positions[0]), int(positions[-1])
        if first == last:  # a get has one cache
            yield None, [(first, len(positions))]
            return
        if self._has_one_shape:
            yield None, _counted(positions)
            return
        shapes = self.shape_ids[positions]
        for shape in np.unique(shapes):
            mine = shapes == shape
            yield mine, _counted(positions[mine])

    def page_addresses(
        self, positions: NDArray[np.int64], blocks: NDArray[np.int64], unwanted: int
    ) -> NDArray[np.int64]:
        """Return the addresses of pages.

        Args:
            positions: int64 [n] which cache each row belongs to.
            blocks: int64 [n, blocks_per_chunk]; negative where the page is unwanted.
            unwanted: address to give those.

        Raises:
            TransferError: A block is outside the pool.
        """
        if blocks.size and int(blocks.max()) >= self._num_blocks:
            raise TransferError(
                f"block {int(blocks.max())} is outside the pool of {self._num_blocks}"
            )
        pages = self._bases[positions, None] + blocks * self._strides[positions, None]
        return np.where(blocks < 0, np.int64(unwanted), pages)


def _counted(positions: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return how often each of ascending numbers occurs."""
    starts = np.flatnonzero(positions[1:] != positions[:-1]) + 1
    bounds = [0, *starts.tolist(), len(positions)]
    numbers = positions[bounds[:-1]].tolist()
    return [(number, b - a) for number, (a, b) in zip(numbers, pairwise(bounds), strict=True)]


@dataclass(frozen=True, slots=True)
class Dense:
    """A strided tensor as pages: bytes of one page and the distance between two."""

    page_bytes: int
    block_stride_bytes: int


def dense_pages(
    name: str, shape: Sequence[int], strides: Sequence[int], item_bytes: int, num_blocks: int
) -> Dense:
    """Find the pages in a cache tensor's strides.

    The tensor's first dimension counts blocks, or kernel blocks of which a whole number
    makes a block. The other dimensions may be in any order but must fill a page without
    holes.

    Args:
        name: for messages.
        shape: in items.
        strides: in items.
        item_bytes: bytes of an item.
        num_blocks: blocks of the pool.

    Raises:
        ConfigError: A page is not contiguous in memory.
    """
    if not shape or shape[0] % num_blocks:
        raise ConfigError(
            f"{name}: a cache of shape {tuple(shape)} does not hold {num_blocks} blocks"
        )
    split = shape[0] // num_blocks
    inner = 1
    for stride, size in sorted(zip(strides[1:], shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != inner:
            raise ConfigError(
                f"{name}: pages of a cache with shape {tuple(shape)} and strides {tuple(strides)} "
                "are not contiguous; choose a KV cache layout with blocks outside heads and tokens"
            )
        inner *= size
    if shape[0] > 1 and strides[0] < inner:
        raise ConfigError(
            f"{name}: blocks of a cache with shape {tuple(shape)} and strides {tuple(strides)} "
            "overlap"
        )
    if split > 1 and strides[0] != inner:
        raise ConfigError(
            f"{name}: the {split} kernel blocks of a block are not next to each other"
        )
    return Dense(
        page_bytes=split * inner * item_bytes, block_stride_bytes=split * strides[0] * item_bytes
    )


@dataclass(frozen=True, slots=True)
class View:
    """One tensor of a cache: its address, and shape and strides in items."""

    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    item_bytes: int


def joined_pages(name: str, views: Sequence[View], num_blocks: int) -> tuple[int, Dense]:
    """Find the pages of a cache that the engine sees as several tensors over one memory.

    The parts of a recurrent state (convolution, then state) lie side by side in a page, and
    padding follows, which is not part of it.

    Returns:
        The address of block 0's page, and its pages.

    Raises:
        ConfigError: A part is not contiguous, or they do not lie side by side.
    """
    ordered = sorted(views, key=lambda view: view.address)
    parts = [dense_pages(name, v.shape, v.strides, v.item_bytes, num_blocks) for v in ordered]
    end = ordered[0].address
    for view, part in zip(ordered, parts, strict=True):
        if view.address != end or part.block_stride_bytes != parts[0].block_stride_bytes:
            raise ConfigError(f"{name}: the {len(views)} tensors of a page are not side by side")
        end += part.page_bytes
    total = end - ordered[0].address
    if total > parts[0].block_stride_bytes:
        raise ConfigError(f"{name}: blocks of {total} bytes overlap")
    return ordered[0].address, Dense(total, parts[0].block_stride_bytes)


def head_slices(
    tp_rank: int, tp_size: int, total_kv_heads: int | None, token_shards: int = 1
) -> tuple[int, int, int, int]:
    """Return (slice_idx, num_slices, replica_idx, num_replicas) of a rank.

    Args:
        tp_rank: rank in its tensor-parallel group.
        tp_size: size of that group.
        total_kv_heads: KV heads of the model, or None where every rank holds the same
            bytes (the latent cache of MLA).
        token_shards: as many ranks next to each other share the tokens of every block, each
            with a slice of its own; what would be their replicas is split so often.
    """
    if token_shards > 1:
        head, num_heads, copy, num_copies = head_slices(tp_rank, tp_size, total_kv_heads)
        if num_copies % token_shards:  # ranks that share tokens hold unlike heads: nobody's replica
            return tp_rank, tp_size, 0, 1
        copy, shard = divmod(copy, token_shards)
        num_slices = num_heads * token_shards
        return head * token_shards + shard, num_slices, copy, num_copies // token_shards
    num_slices = 1 if total_kv_heads is None else min(tp_size, total_kv_heads)
    if tp_size % num_slices:
        num_slices = tp_size
    num_replicas = tp_size // num_slices
    return tp_rank // num_replicas, num_slices, tp_rank % num_replicas, num_replicas


def layer_indices(names: Sequence[str]) -> dict[str, int]:
    """Number caches so that every pipeline stage gives a cache the same number.

    The number is layer * 8 + the cache's rank among that layer's caches by name; the
    layer is the first number in the name (model.layers.12.self_attn.attn).

    Raises:
        ConfigError: A name has no number, or a layer more than 8 caches.
    """
    layers: dict[int, list[str]] = {}
    for name in sorted(names):
        digits = next((part for part in name.split(".") if part.isdigit()), None)
        if digits is None:
            raise ConfigError(f"cache {name!r} has no layer number in its name")
        layers.setdefault(int(digits), []).append(name)
    indices = {}
    for layer, members in layers.items():
        if len(members) > CACHES_PER_LAYER:
            raise ConfigError(f"layer {layer} has {len(members)} caches: {members}")
        for position, name in enumerate(members):
            indices[name] = layer * CACHES_PER_LAYER + position
    return indices

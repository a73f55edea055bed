"""How much ring and card a model needs, from its config.json alone.

shapes.model_shape() ─► sizes(): objects of a chunk ─► io_size ─► ring, card
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from adp_kv.cli.shapes import CacheKind, ModelShape
from adp_kv.errors import ConfigError
from adp_kv.ring.header import divide
from adp_kv.units import PAGE_BYTES, KiB, align_up, ceil_div

DEFAULT_CHUNK_TOKENS = 256
MAX_RING_BYTES = 64 << 30
USUAL_SLOT_BYTES = 256 * KiB
LEAST_PART_BYTES, MAX_SLOT_BYTES = 128 * KiB, 512 * KiB
"""What is recommended cuts no object into smaller parts, and has no longer ones."""
FILL_PERCENT = 90
"""How full a card gets before it evicts: evict_above, as it is by default."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What one kind of cache comes to.

    Attributes:
        layers: with such a cache.
        object_bytes, fragments: of one object; slice_bytes: of one rank's part of it.
        objects_per_prompt: of each layer, of a conversation that is kept.
        longest_get: objects that the longest prompt asks for at once, of one layer.
    """

    kind: str
    layers: int
    object_bytes: int
    slice_bytes: int
    fragments: int
    objects_per_prompt: int
    longest_get: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What `adp-kv size` says; bytes unless the name tells otherwise.

    Attributes:
        stored_bytes_per_token, card_capacity_bytes: in whole slots; the latter such that the card
            evicts nothing of it.
        recommended_slot_bytes: of a slab card that wastes least.
    """

    kind: str
    layers: int
    block_tokens: int
    chunk_tokens: int
    bytes_per_token: int
    io_size: int
    slot_bytes: int
    shared_memory_size: int
    max_parallel_ios: int
    longest_get_slots: int
    longest_get_batches: int
    recommended_shared_memory_size: int
    fragments_per_object: int
    stored_bytes_per_token: int
    prompt_bytes: int
    card_capacity_bytes: int
    recommended_slot_bytes: int
    caches: tuple[CacheSizes, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served and kept.

    Attributes:
        block_tokens, chunk_tokens: as vLLM and the connector are set; chunk 0: about 256, or
            with recurrent layers vLLM's block.
        shared_memory_size: of the gateway.
        fragment_size, slot_bytes: of the card.
        users, tokens: how many conversations of how many tokens the card shall keep.
        longest: tokens of the longest prompt.
        batched_tokens: vLLM's --max-num-batched-tokens: a long prompt leaves a state so often.
    """

    block_tokens: int
    chunk_tokens: int
    shared_memory_size: int
    fragment_size: int
    slot_bytes: int
    users: int
    tokens: int
    longest: int
    batched_tokens: int = 8192

    @property
    def longest_value(self) -> int:
        """Bytes of the longest fragment: no longer than a slot of the card."""
        return min(self.fragment_size, self.slot_bytes)


def sizes(shape: ModelShape, load: Load) -> Sizes:
    """Return what a model needs for a load.

    Raises:
        ConfigError: chunk_size does not fit the blocks, or a slot the card.
        RingError: The ring holds not even one object a direction; says what it needs.
    """
    if load.slot_bytes % PAGE_BYTES:
        raise ConfigError(f"--slot-bytes {load.slot_bytes}: no multiple of {PAGE_BYTES}")
    block = shape.block_tokens(load.block_tokens)
    chunk = _chunk_tokens(shape, load, block)
    chunks = load.tokens // chunk
    caches = tuple(_cache_sizes(kind, load, block, chunk) for kind in shape.kinds)
    io_size = max(cache.object_bytes for cache in caches)
    ring = divide(load.shared_memory_size, io_size, generation=1)
    longest = max(cache.longest_get for cache in caches)
    objects = [cache.layers * cache.objects_per_prompt for cache in caches]
    stored = sum(
        n * cache.fragments * load.slot_bytes for n, cache in zip(objects, caches, strict=True)
    )
    return Sizes(
        kind=" + ".join(kind.name for kind in shape.kinds),
        layers=sum(kind.num_layers for kind in shape.kinds),
        block_tokens=block,
        chunk_tokens=chunk,
        bytes_per_token=sum(k.token_bytes * k.num_layers for k in shape.kinds if not k.window),
        io_size=io_size,
        slot_bytes=ring.slot_bytes,
        shared_memory_size=load.shared_memory_size,
        max_parallel_ios=ring.num_slots,
        longest_get_slots=longest,
        longest_get_batches=ceil_div(longest, ring.num_slots),
        # Two layers of the longest prompt in flight, reads and writes alike.
        recommended_shared_memory_size=min(
            MAX_RING_BYTES, align_up(2 * 2 * longest * ring.slot_bytes, 1 << 30)
        ),
        fragments_per_object=ceil_div(io_size, load.longest_value),
        stored_bytes_per_token=stored // (chunks * chunk) if chunks else 0,
        prompt_bytes=sum(n * c.object_bytes for n, c in zip(objects, caches, strict=True)),
        card_capacity_bytes=align_up(
            ceil_div(load.users * stored * 100, FILL_PERCENT), load.slot_bytes
        ),
        recommended_slot_bytes=thrifty_slot_bytes(
            [(c.object_bytes, c.layers * max(1, c.objects_per_prompt)) for c in caches]
        ),
        caches=caches,
        note="; ".join([*shape.notes, *_load_notes(shape, load, chunk, chunks)]),
    )


def _chunk_tokens(shape: ModelShape, load: Load, block: int) -> int:
    if shape.has_states:
        if load.chunk_tokens not in {0, block}:
            raise ConfigError(
                f"--chunk-size {load.chunk_tokens}: with recurrent layers a chunk is vLLM's block, "
                f"{block} tokens here; leave it out"
            )
        return block
    chunk = load.chunk_tokens or ceil_div(DEFAULT_CHUNK_TOKENS, block) * block
    if chunk % block:
        shards = shape.token_shards
        of = f" {block // shards} times --dcp {shards}" if shards > 1 else f" {block}"
        raise ConfigError(
            f"--chunk-size {chunk}: no multiple of the block size{of}: use "
            f"{ceil_div(chunk, block) * block}, or leave it out"
        )
    return chunk


def _cache_sizes(kind: CacheKind, load: Load, block: int, chunk: int) -> CacheSizes:
    object_bytes = kind.object_bytes(block, chunk)
    chunks, longest = load.tokens // chunk, max(1, load.longest // chunk)
    depth = kind.part(block, chunk).depth
    if kind.state_bytes:  # one where a step ends: each a whole number of chunks
        chunks = ceil_div(chunks, max(1, load.batched_tokens // chunk))
    return CacheSizes(
        kind=kind.name,
        layers=kind.num_layers,
        object_bytes=object_bytes,
        slice_bytes=object_bytes // kind.num_slices,
        fragments=ceil_div(object_bytes, load.longest_value),
        objects_per_prompt=chunks,
        longest_get=longest if depth is None else min(longest, depth),
    )


def _load_notes(shape: ModelShape, load: Load, chunk: int, chunks: int) -> list[str]:
    notes = []
    if not chunks:
        notes.append(f"conversations of {load.tokens} tokens fill no chunk of {chunk}")
    if shape.has_states:
        notes.append(
            f"states are counted as one every {load.batched_tokens} tokens "
            "(--max-num-batched-tokens): further turns, and decoding, leave more, up to one a chunk"
        )
    return notes


def as_facts(found: Sizes) -> dict[str, object]:
    """Return sizes as names and numbers."""
    return asdict(found)


def thrifty_slot_bytes(objects: Sequence[tuple[int, int]]) -> int:
    """Return the slot of a slab card that wastes least; of equal ones the nearest to the usual.

    Args:
        objects: bytes of an object and how many there are of it.
    """
    parts = {
        align_up(ceil_div(size, number), PAGE_BYTES)
        for size, _ in objects
        for number in range(1, max(1, size // LEAST_PART_BYTES) + 1)
    }

    def cost(slot: int) -> tuple[int, int]:
        stored = sum(count * ceil_div(size, slot) * slot for size, count in objects)
        return stored, abs(slot - USUAL_SLOT_BYTES)

    least = min(LEAST_PART_BYTES, max(size for size, _ in objects))
    fit = {part for part in parts if least <= part <= MAX_SLOT_BYTES}
    return min(fit | {USUAL_SLOT_BYTES}, key=cost)


def slot_bytes_for(fragment_size: int) -> int:
    """Return the slab card's slot for fragments of a size: whole 4 KiB pages."""
    return align_up(fragment_size, PAGE_BYTES)

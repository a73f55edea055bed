"""vLLM's KV cache groups and tensors, as parts and geometry.

    groups    view_parts()    what a hit needs of each group (layout/parts.py)
    tensors   view_caches()   where the pages of each layer are (layout/geometry.py)

Which caches there are and what they are called differs between vLLM's releases: a state is
a list of tensors until 0.28 and one tensor since, groups alias one storage or have one each.
Both are found in addresses and strides; padding is never part of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from adp_kv.errors import ConfigError
from adp_kv.layout.geometry import (
    CacheGeometry,
    Dense,
    View,
    head_slices,
    joined_pages,
    layer_indices,
)
from adp_kv.layout.parts import Part

NULL_BLOCK = 0
"""vLLM's null block: stands in tables where there is none."""
_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_WINDOW = "SlidingWindowSpec"
_STATE = "MambaSpec"


def common_block_tokens(kv_cache_config: Any, token_shards: int = 1) -> int:
    """Return the tokens after which blocks of all groups end together."""
    sizes = [int(g.kv_cache_spec.block_size) for g in kv_cache_config.kv_cache_groups]
    return math.lcm(*sizes) * token_shards


def view_parts(kv_cache_config: Any, chunk_tokens: int, token_shards: int = 1) -> tuple[Part, ...]:
    """Return the groups as parts.

    Args:
        kv_cache_config: vLLM's caches.
        chunk_tokens: of a chunk.
        token_shards: ranks over which the tokens of a block are spread (vllm_dcp.py).

    Raises:
        ConfigError: A kind of cache that this release can't serve.
    """
    parts = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = layer_specs(group)
        for name, spec in specs.items():
            _check_kind(name, spec)
        if not getattr(group, "enable_kv_transfer", True):
            raise ConfigError(
                f"vLLM keeps KV cache group {index} ({next(iter(specs), 'empty')}) from external "
                "caches: this model is not available in this release of adp-kv"
            )
        spec = next(iter(specs.values()), group.kv_cache_spec)
        block_tokens = int(group.kv_cache_spec.block_size) * token_shards
        parts.append(
            Part(
                index=index,
                block_tokens=block_tokens,
                blocks_per_chunk=chunk_tokens // block_tokens,
                kept_tokens=_kept_tokens(spec),
                recurrent=is_recurrent(spec),
            )
        )
    return tuple(parts)


def _check_kind(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in _FULL | {_WINDOW, _STATE}:
        raise ConfigError(
            f"layer {name} has a cache of kind {kind}: full attention, MLA, sliding windows and "
            "recurrent states are available in this release of adp-kv"
        )
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            f"layer {name} attends to later tokens too: what it keeps of a prefix depends on what "
            "follows, which no key tells; not available in this release of adp-kv"
        )
    if kind == _STATE and spec.mamba_cache_mode == "none":
        raise ConfigError(
            f"layer {name} has a recurrent state of which vLLM keeps no copies at block boundaries "
            "(mamba_cache_mode none): leave prefix caching on (--enable-prefix-caching)"
        )


def _kept_tokens(spec: Any) -> int | None:
    if type(spec).__name__ == _WINDOW:
        return int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0))
    return 1 if is_recurrent(spec) else None


def is_full_attention(spec: Any) -> bool:
    """Return whether a layer keeps something of every token, MLA's latent included."""
    return type(spec).__name__ in _FULL


def is_recurrent(spec: Any) -> bool:
    """Return whether a layer keeps one state a block and not something of each token."""
    return type(spec).__name__ == _STATE


def _states(kv_cache_config: Any) -> list[Any]:
    groups = kv_cache_config.kv_cache_groups  # of a pipeline stage; some may be empty there
    specs = [spec for g in groups for spec in (*layer_specs(g).values(), g.kv_cache_spec)]
    return [spec for spec in specs if is_recurrent(spec)]


def has_states(kv_cache_config: Any) -> bool:
    """Return whether some layer is recurrent."""
    return bool(_states(kv_cache_config))


def keeps_every_state(kv_cache_config: Any) -> bool:
    """Return whether states are kept at every block boundary a step passes, not only at its end."""
    return any(spec.mamba_cache_mode == "all" for spec in _states(kv_cache_config))


def layer_specs(group: Any) -> dict[str, Any]:
    """Return each layer's cache spec in a group."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: (per_layer or {}).get(name, group.kv_cache_spec) for name in group.layer_names}


def view_caches(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    vllm_config: Any,
    kv_cache_config: Any,
    parts: Sequence[Part],
    tp_rank: int,
) -> list[CacheGeometry]:
    """Return this rank's caches in layer order, from the tensors vLLM registered.

    Raises:
        ConfigError: A cache whose pages this release can't address.
    """
    groups = [layer_specs(group) for group in kv_cache_config.kv_cache_groups]
    indices = layer_indices([name for specs in groups for name in specs])
    num_blocks = kv_cache_config.num_blocks
    caches = []
    for part, specs in zip(parts, groups, strict=True):
        for name, spec in specs.items():
            address, pages = _pages(name, _tensors(kv_caches[name]), spec, num_blocks)
            slice_idx, num_slices, replica_idx, num_replicas = _slices(spec, vllm_config, tp_rank)
            caches.append(
                CacheGeometry(
                    index=indices[name],
                    name=name,
                    base_address=address,
                    block_stride_bytes=pages.block_stride_bytes,
                    page_bytes=pages.page_bytes,
                    num_blocks=num_blocks,
                    blocks_per_chunk=part.pages,
                    slice_idx=slice_idx,
                    num_slices=num_slices,
                    replica_idx=replica_idx,
                    num_replicas=num_replicas,
                    layout=_layout(kv_caches[name], spec),
                    part=part.index,
                )
            )
    return sorted(caches, key=lambda cache: cache.index)


def first_tensor(cache: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of a layer's cache, to ask for its device."""
    return _tensors(cache)[0]


def _tensors(cache: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _pages(name: str, tensors: list[torch.Tensor], spec: Any, num_blocks: int) -> tuple[int, Dense]:
    views = [View(t.data_ptr(), t.shape, t.stride(), t.element_size()) for t in tensors]
    address, pages = joined_pages(name, views, num_blocks)
    if pages.page_bytes not in {spec.page_size_bytes, _used_bytes(spec)}:
        raise ConfigError(
            f"{name}: pages have {pages.page_bytes} bytes, vLLM says {_used_bytes(spec)}"
        )
    return address, pages


def _used_bytes(spec: Any) -> int:
    """Return the bytes of a page without what pads it to the size of other groups' pages."""
    padded = any(field.name == "page_size_padded" for field in fields(spec))
    return int((replace(spec, page_size_padded=None) if padded else spec).page_size_bytes)


def _slices(spec: Any, vllm_config: Any, tp_rank: int) -> tuple[int, int, int, int]:
    """Return (slice_idx, num_slices, replica_idx, num_replicas) of this rank's cache."""
    parallel = vllm_config.parallel_config
    tp_size = int(parallel.tensor_parallel_size)
    token_shards = int(getattr(parallel, "decode_context_parallel_size", 1))
    heads: int | None = tp_size  # a slice for every rank
    if is_recurrent(spec):
        heads = None if getattr(spec, "tp_replicated", False) else tp_size
    elif type(spec).__name__ == "MLAAttentionSpec":
        heads = None
    else:
        total = int(vllm_config.model_config.get_total_num_kv_heads())
        if max(1, total // tp_size) == spec.num_kv_heads:
            heads = total
    return head_slices(tp_rank, tp_size, heads, token_shards)


def _layout(cache: torch.Tensor | Sequence[torch.Tensor], spec: Any) -> str:
    if is_recurrent(spec):  # the tensor may be bytes: what they are is in the spec
        return f"{spec.mamba_type} {spec.dtypes} {spec.shapes} {spec.block_size}"
    tensor = first_tensor(cache)
    return f"{tensor.dtype} {tuple(tensor.shape[1:])} {tensor.stride()[1:]}"

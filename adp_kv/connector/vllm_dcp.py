"""Decode context parallelism (DCP) as vLLM has it: ranks that share the tokens of every block.

    group     `size` tensor-parallel ranks next to each other, which hold the same heads
    block     of the block table: block_size * size tokens of the sequence; on each rank a page
              of block_size of them
    token i   lies on the rank (i // interleave) % size of its group

So the scheduler counts in blocks of block_size * size tokens (hashes, hits, failed blocks), and
what a rank holds of a block is a slice of its own (layout/geometry.py). Size and interleave are
facts of the keys: another layout never reads these objects.

Threads: none. Failure scope: what can't be served is refused at the engine's start.
"""

from __future__ import annotations

import logging
from typing import Any

from adp_kv.connector.vllm_caches import is_full_attention, layer_specs
from adp_kv.errors import ConfigError

log = logging.getLogger("adp_kv")


def dcp_size(parallel: Any) -> int:
    """Return the ranks of a DCP group; 1 without DCP."""
    return int(getattr(parallel, "decode_context_parallel_size", 1))


def token_shards(parallel: Any, kv_cache_config: Any, *, draft_cache: bool) -> int:
    """Return over how many ranks the tokens of a block are spread; 1 without DCP.

    Args:
        parallel: vLLM's parallel configuration.
        kv_cache_config: its caches.
        draft_cache: a draft model has caches of its own.

    Raises:
        ConfigError: Context parallelism that this release can't serve; names the remedy.
    """
    prefill = int(getattr(parallel, "prefill_context_parallel_size", 1))
    if prefill > 1:
        raise ConfigError(
            f"prefill_context_parallel_size = {prefill}: not available in this release of adp-kv; "
            "set it to 1"
        )
    size = dcp_size(parallel)
    if size == 1:
        return 1
    if draft_cache:
        raise _refusal(size, "speculative decoding by a model with caches", "--speculative-config")
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise _refusal(size, f"{len(kv_cache_config.kv_cache_groups)} KV cache groups")
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in layer_specs(group).items():
            _check_layer(size, name, spec)
        _check_interleave(parallel, int(group.kv_cache_spec.block_size))
    return size


def _check_layer(size: int, name: str, spec: Any) -> None:
    if not is_full_attention(spec) or getattr(spec, "sliding_window", None):
        kind = type(spec).__name__
        raise _refusal(size, f"layer {name}, whose cache is of kind {kind} or has a window")
    if not getattr(spec, "dcp_sharded", True):
        raise _refusal(size, f"layer {name}, whose tokens every rank keeps")


def _refusal(size: int, found: str, or_remove: str = "") -> ConfigError:
    remedy = f", or remove {or_remove}" if or_remove else ""
    return ConfigError(
        f"decode_context_parallel_size = {size} with {found}: this release of adp-kv serves it for "
        "models whose layers are all full attention or MLA in one KV cache group; set it to 1"
        + remedy
    )


def _check_interleave(parallel: Any, block_size: int) -> None:
    """Refuse what leaves it open where a token lies.

    VLLM copies the old name of the setting over the new one in some of its processes: 0.25 in the
    engine core and not in the workers, which place the tokens.
    """
    old = int(getattr(parallel, "dcp_kv_cache_interleave_size", 1))
    if old > 1:
        raise ConfigError(
            f"dcp_kv_cache_interleave_size = {old}: not all of vLLM's processes heed this name of "
            f"the setting, so which rank holds a token is not known; remove it and set "
            f"cp_kv_cache_interleave_size = {old}"
        )
    if block_size % _interleave(parallel):
        raise ConfigError(
            f"cp_kv_cache_interleave_size = {_interleave(parallel)} does not divide the block size "
            f"{block_size}: use one that does, such as 1"
        )


def _interleave(parallel: Any) -> int:
    return int(getattr(parallel, "cp_kv_cache_interleave_size", 1))


def dcp_facts(parallel: Any) -> dict[str, object]:
    """Return what keys have to say of DCP: nothing without it, so that such keys stay as they are.

    Ranks that hold other tokens have other bytes, and the same objects in another order are wrong.
    """
    size = dcp_size(parallel)
    return {"dcp": [size, _interleave(parallel)]} if size > 1 else {}


def check_dcp_rank(size: int, tp_rank: int) -> None:
    """Check that this worker's place in its DCP group is the one its slices are made for.

    Raises:
        ConfigError: This vLLM forms the groups of other ranks than those next to each other.
    """
    if size == 1:
        return
    from vllm.distributed.parallel_state import get_dcp_group  # noqa: PLC0415

    group = get_dcp_group()
    if (group.world_size, group.rank_in_group) != (size, tp_rank % size):
        raise ConfigError(
            f"decode_context_parallel_size = {size}: to this vLLM tensor-parallel rank {tp_rank} "
            f"is rank {group.rank_in_group} of {group.world_size} that share tokens, not "
            f"{tp_rank % size} of {size}; set it to 1"
        )


def tell_fanout_is_off(size: int, rank: int) -> None:
    """Say once an engine that ranks have nothing to exchange, though nvlink_fanout asks for it."""
    log.log(
        logging.WARNING if rank == 0 else logging.DEBUG,
        "NVLink fan-out is off, every rank reads its own: with decode_context_parallel_size = %d "
        "ranks hold different tokens of every page",
        size,
    )

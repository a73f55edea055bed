"""Decode context parallelism on CPUs, where vLLM has none: a worker extension that brings it.

Stand-ins, in every worker: which slot a token gets (vLLM's C++ code for CPUs refuses DCP), and
attention, which gathers the tokens of all ranks and computes in plain torch. Everything else is
vLLM's own: process groups, block tables, scheduler, prefix cache, hashes, hooks of the layers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.block_table import BlockTable

from tests.support.worker_extension import WorkerExtension as Usual

PAD = -1


def slots_of(table: Any, _num_reqs: int, starts: torch.Tensor, positions: torch.Tensor) -> None:
    """Stand in for BlockTable.compute_slot_mapping: the rule of vLLM's kernel for GPUs."""
    each, size, block = table.cp_kv_cache_interleave_size, table.dcp_world_size, table.block_size
    slots = table.slot_mapping.gpu
    slots.fill_(PAD)
    for request, (first, end) in enumerate(pairwise(starts.tolist())):
        where = positions[first:end]
        offsets = where % (block * size)
        local = offsets // (each * size) * each + offsets % each
        blocks = table.block_table.gpu[request, where // (block * size)].to(torch.int64)
        mine = offsets // each % size == table.dcp_rank
        slots[first:end] = torch.where(mine, blocks * block + local, PAD)


def write(
    _impl: Any,
    _layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stand in for do_kv_cache_update: key and value of a token side by side."""
    block = kv_cache.shape[2]
    rows = (slot_mapping[: len(key)] >= 0).nonzero()[:, 0]
    slots = slot_mapping[rows]
    both = torch.cat([key, value], dim=-1)[rows]
    kv_cache[slots // block, :, slots % block] = both.to(kv_cache.dtype)


def attend(
    impl: Any,
    _layer: Any,
    query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: Any,
    output: torch.Tensor,
    *_scales: Any,
    **_more: Any,
) -> torch.Tensor:
    """Stand in for forward."""
    if meta is None:
        return output
    group, block = get_dcp_group(), kv_cache.shape[2]
    interleave = impl.adp_interleave
    result = output.view(len(output), impl.num_heads, impl.head_size)
    queries = query.view(len(query), impl.num_heads, impl.head_size)
    for request, (first, end) in enumerate(pairwise(meta.query_start_loc.tolist())):
        length = int(meta.seq_lens[request])
        if end == first:
            continue
        num_blocks = -(-length // (block * group.world_size))
        pages = kv_cache[meta.block_table[request, :num_blocks].to(torch.int64)].contiguous()
        every = group.all_gather(pages, dim=0).view(group.world_size, *pages.shape)
        key, value = _in_order(every, interleave)[:length].split(impl.head_size, dim=-1)
        mask = torch.ones(end - first, length, dtype=torch.bool).tril(length - (end - first))
        result[first:end] = torch.nn.functional.scaled_dot_product_attention(
            queries[first:end].transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=mask,
            scale=impl.scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return output


def _in_order(pages: torch.Tensor, each: int) -> torch.Tensor:
    """Return [tokens, heads, n] in the order of tokens, of [ranks, blocks, heads, block, n]."""
    ranks, blocks, heads, block, width = pages.shape
    rounds = pages.view(ranks, blocks, heads, block // each, each, width)
    ordered = rounds.permute(1, 3, 0, 4, 2, 5)  # block, round, rank, token of the round
    return ordered.reshape(blocks * ranks * block, heads, width)


_make = CPUAttentionBackendImpl.__init__


def make(impl: Any, *args: Any, **how: Any) -> None:
    """Make a layer's attention, which keeps how vLLM is set."""
    _make(impl, *args, **how)
    impl.adp_interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size


CPUAttentionBackendImpl.__init__ = make
CPUAttentionBackendImpl.can_return_lse_for_decode = True  # that is what vLLM looks at
CPUAttentionBackendImpl.do_kv_cache_update = write
CPUAttentionBackendImpl.forward = attend
BlockTable.compute_slot_mapping = slots_of


class WorkerExtension(Usual):
    """What tests call; importing this module has done the rest."""

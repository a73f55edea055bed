"""DeepSeek Sparse Attention as the connector sees it: two caches a layer, pages of two sizes.

Shapes are those that vLLM 0.25.1 and 0.32 register on a GPU; this test needs none.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adp_kv.config import ConnectorSettings
from adp_kv.layout.geometry import CacheStack
from adp_kv.sdk.rank_client import declare
from gateway.session import Session
from tests.support.process import free_port

pytestmark = pytest.mark.vllm

BLOCKS, TOKENS, LAYERS = 10, 64, 3
LATENT = {"bf16": (torch.bfloat16, 576), "fp8": (torch.uint8, 656)}
INDEXER_BYTES = 132
NAMES = [
    f"model.layers.{layer}.self_attn.{part}"
    for layer in range(LAYERS)
    for part in ("attn", "indexer.k_cache")
]


def spec_of(vllm, name, latent):
    if name.endswith("k_cache"):
        return vllm.specs.MLAAttentionSpec(
            block_size=TOKENS, num_kv_heads=1, head_size=INDEXER_BYTES, dtype=torch.uint8
        )
    dtype, width = LATENT[latent]
    return vllm.specs.MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=width, dtype=dtype
    )


def configs(vllm, latent, **parallel):
    """Return vLLM's configuration and its single group of layers with unlike pages."""
    per_layer = {name: spec_of(vllm, name, latent) for name in NAMES}
    group = SimpleNamespace(
        layer_names=NAMES,
        kv_cache_spec=SimpleNamespace(block_size=TOKENS, kv_cache_specs=per_layer),
    )
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    model = SimpleNamespace(
        model="no such folder", seed=0, dtype=torch.bfloat16, quantization=None,
        hf_config=SimpleNamespace(to_dict=dict), get_total_num_kv_heads=lambda: 1,
    )  # fmt: skip
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank=0, **(sizes | parallel)),
        model_config=model,
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="dummy"),
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_load_failure_policy="fail"),
    )
    return config, SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)


def tensors_of_0_25(latent):
    """Return a tensor of its own for each cache: [blocks, tokens, width]."""
    dtype, width = LATENT[latent]
    return {
        name: torch.zeros(BLOCKS, TOKENS, INDEXER_BYTES, dtype=torch.uint8)
        if name.endswith("k_cache")
        else torch.zeros(BLOCKS, TOKENS, width, dtype=dtype)
        for name in NAMES
    }


def tensors_of_0_32(latent):
    """Return views of one storage: [blocks, 1, tokens, width], one cache after the other."""
    dtype, width = LATENT[latent]
    sizes = [
        TOKENS * (INDEXER_BYTES if n.endswith("k_cache") else width * dtype.itemsize) for n in NAMES
    ]
    storage = torch.zeros(BLOCKS * sum(sizes), dtype=torch.int8)
    found, first = {}, 0
    for name, size in zip(NAMES, sizes, strict=True):
        flat = storage[first : first + BLOCKS * size]
        kind = torch.uint8 if name.endswith("k_cache") else dtype
        found[name] = flat.view(kind).view(BLOCKS, 1, TOKENS, -1)
        first += BLOCKS * size
    return found


@pytest.mark.parametrize("latent", LATENT)
@pytest.mark.parametrize("register", [tensors_of_0_25, tensors_of_0_32])
def test_layer_has_two_replicated_caches_of_their_own_size(vllm, register, latent):
    config, groups = configs(vllm, latent)
    settings = ConnectorSettings(gateway=f"tcp://127.0.0.1:{free_port()}")
    engine = vllm.view.view_engine(config, groups, settings)
    tensors = register(latent)
    ranks = [
        vllm.caches.view_caches(tensors, config, groups, engine.parts, rank) for rank in range(2)
    ]
    dtype, width = LATENT[latent]
    for rank, caches in enumerate(ranks):
        assert [cache.index for cache in caches] == [0, 1, 8, 9, 16, 17]
        assert [cache.page_bytes for cache in caches] == [
            TOKENS * width * dtype.itemsize,
            TOKENS * INDEXER_BYTES,
        ] * LAYERS
        assert all(cache.is_replicated for cache in caches)
        assert {(cache.replica_idx, cache.num_replicas) for cache in caches} == {(rank, 2)}
        assert [cache.base_address for cache in caches] == [
            tensors[c.name].data_ptr() for c in caches
        ]
    # The gateway takes them as one engine's, and cuts its ring for the larger one.
    session = Session("e", 2, bytes(16))
    for rank, caches in enumerate(ranks):
        hello = SimpleNamespace(
            engine="e", rank=rank, world_size=2, namespace=bytes(16), caches=declare(caches), pid=1
        )
        session.join(bytes([rank]), hello, 0.0)
    assert session.settle() == 4 * TOKENS * width * dtype.itemsize


def test_pages_of_both_sizes_are_addressed_in_one_put(vllm):
    config, groups = configs(vllm, "fp8")
    engine = vllm.view.view_engine(config, groups, ConnectorSettings())
    tensors = tensors_of_0_32("fp8")
    caches = vllm.caches.view_caches(tensors, config, groups, engine.parts, 0)
    stack = CacheStack(caches)
    assert stack.shape_ids.tolist() == [0, 1] * LAYERS
    positions = np.arange(len(caches))
    blocks = np.full((len(caches), engine.parts[0].pages), 7)
    pages = stack.page_addresses(positions, blocks, -1)
    for cache, row in zip(caches, pages, strict=True):
        assert (row == tensors[cache.name][7].data_ptr()).all()


def test_both_caches_are_sharded_by_tokens_with_dcp(vllm):
    config, groups = configs(vllm, "fp8", tensor_parallel_size=4, decode_context_parallel_size=2)
    engine = vllm.view.view_engine(config, groups, ConnectorSettings())
    assert engine.parts[0].block_tokens == 2 * TOKENS
    tensors = tensors_of_0_32("fp8")
    for rank in range(4):
        caches = vllm.caches.view_caches(tensors, config, groups, engine.parts, rank)
        slices = {(c.slice_idx, c.num_slices, c.replica_idx, c.num_replicas) for c in caches}
        assert slices == {(rank % 2, 2, rank // 2, 2)}
        assert not any(cache.is_replicated for cache in caches)

"""Decode context parallelism as the connector sees it: blocks, slices, keys, what is refused."""

from types import SimpleNamespace
from unittest import mock

import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.errors import ConfigError

pytestmark = pytest.mark.vllm

BLOCK = 64
SHARED = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}


def spec_of(vllm, kind="MLAAttentionSpec", **changes):
    facts = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": vllm.torch.bfloat16}
    facts["head_size"] = 576 if kind == "MLAAttentionSpec" else 128
    return getattr(vllm.specs, kind)(**(facts | changes))


def state_of(vllm):
    shapes, dtypes = ((3, 32), (4, 32)), (vllm.torch.bfloat16, vllm.torch.float32)
    return vllm.specs.MambaSpec(
        block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align"
    )


def caches_of(vllm, *specs, **told):
    groups = [vllm.specs.KVCacheGroupSpec([f"model.layers.{i}.x"], s) for i, s in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=4, **told)


def config_of(speculative=None, heads=2, **parallel):
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_load_failure_policy="fail"),
        parallel_config=SimpleNamespace(data_parallel_rank=0, **(sizes | parallel)),
        speculative_config=speculative,
        model_config=SimpleNamespace(
            model="m", dtype="bf16", quantization=None, seed=0,
            hf_config=SimpleNamespace(to_dict=dict), get_total_num_kv_heads=lambda: heads,
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", cache_dtype="auto", block_size=BLOCK,
            prefix_match_unit=None, enable_prefix_caching=True,
        ),
        load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip


def engine_of(vllm, caches=None, speculative=None, settings=None, **parallel):
    caches = caches or caches_of(vllm, spec_of(vllm))
    config = config_of(speculative, **(SHARED | parallel))
    return vllm.view.view_engine(config, caches, ConnectorSettings(**(settings or {})))


def test_block_is_that_of_all_ranks_together(vllm):
    caches = caches_of(vllm, spec_of(vllm))
    engine = engine_of(vllm, caches)
    (part,) = engine.parts
    assert (engine.token_shards, part.block_tokens, engine.hash_tokens) == (2, 128, 128)
    assert (engine.chunk_tokens, part.blocks_per_chunk, part.pages) == (256, 2, 2)
    config = config_of(**SHARED)
    assert vllm.utils.resolve_kv_cache_block_sizes(caches, config) == (128, 128), "vLLM's own"
    told = caches_of(vllm, spec_of(vllm), hash_block_size=128)  # as 0.32 says it
    assert engine_of(vllm, told).hash_tokens == 128


def test_group_of_layers_with_unlike_pages_is_one_group(vllm):
    per_layer = {"model.layers.0.attn": spec_of(vllm)}
    per_layer["model.layers.0.k_cache"] = spec_of(vllm, head_size=132)
    whole = SimpleNamespace(block_size=BLOCK, kv_cache_specs=per_layer)
    group = SimpleNamespace(layer_names=list(per_layer), kv_cache_spec=whole)
    caches = SimpleNamespace(kv_cache_groups=[group], num_blocks=4)
    assert engine_of(vllm, caches).parts[0].block_tokens == 128


def test_default_chunk_is_a_whole_number_of_such_blocks(vllm):
    engine = engine_of(vllm, tensor_parallel_size=8, decode_context_parallel_size=8)
    assert (engine.chunk_tokens, engine.parts[0].blocks_per_chunk) == (512, 1)


@pytest.mark.parametrize("chunk", [64, 192, 320])
def test_chunk_of_part_of_a_block_is_refused(vllm, chunk):
    use = -(-chunk // 128) * 128
    told = rf"chunk_size = {chunk} .*block size 64 times decode_context_parallel_size 2: use {use},"
    with pytest.raises(ConfigError, match=told):
        engine_of(vllm, settings={"chunk_size": chunk})
    assert engine_of(vllm, settings={"chunk_size": use}).chunk_tokens == use


def test_keys_name_size_and_interleave(vllm):
    plain = engine_of(vllm, decode_context_parallel_size=1).facts
    assert "dcp" not in plain, "keys without DCP are those of earlier releases"
    assert engine_of(vllm).facts["dcp"] == [2, 1]
    assert engine_of(vllm, cp_kv_cache_interleave_size=16).facts["dcp"] == [2, 16]
    four = engine_of(vllm, decode_context_parallel_size=4).facts
    assert four["dcp"] == [4, 1]


def refused(vllm):
    """Return by name what is refused: caches, changes of the configuration, words of the error."""
    full = spec_of(vllm, "FullAttentionSpec")
    window = spec_of(vllm, "SlidingWindowSpec", sliding_window=129)
    as_full = spec_of(vllm, "FullAttentionSpec", sliding_window=129)
    whole = spec_of(vllm, dcp_sharded=False)
    return {
        "hybrid": (caches_of(vllm, full, state_of(vllm)), {}, "2 KV cache groups"),
        "groups": (caches_of(vllm, full, window), {}, "2 KV cache groups"),
        "window": (caches_of(vllm, window), {}, "model.layers.0.x.*SlidingWindowSpec"),
        "window kept whole": (caches_of(vllm, as_full), {}, "model.layers.0.x.*window"),
        "state": (caches_of(vllm, state_of(vllm)), {}, "model.layers.0.x.*MambaSpec"),
        "not sharded": (caches_of(vllm, whole), {}, "model.layers.0.x, whose tokens every rank"),
        "draft model": (
            None,
            {"speculative": SimpleNamespace(method="eagle")},
            "speculative decoding",
        ),
    }


@pytest.mark.parametrize("name", [
    "hybrid", "groups", "window", "window kept whole", "state", "not sharded", "draft model",
])  # fmt: skip
def test_what_dcp_can_not_be_with_is_refused(vllm, name):
    caches, changes, words = refused(vllm)[name]
    told = rf"decode_context_parallel_size = 2 with .*{words}.*set it to 1"
    with pytest.raises(ConfigError, match=told) as raised:
        engine_of(vllm, caches, **changes)
    assert ("--speculative-config" in str(raised.value)) is (name == "draft model")


def test_drafts_without_caches_are_served(vllm):
    assert engine_of(vllm, speculative=SimpleNamespace(method="ngram")).token_shards == 2


def test_prefill_context_parallelism_is_refused(vllm):
    with pytest.raises(ConfigError, match=r"prefill_context_parallel_size = 2.*set it to 1"):
        engine_of(vllm, prefill_context_parallel_size=2)


def test_old_name_of_the_interleave_is_refused(vllm):
    """VLLM 0.25 takes it over in the engine core alone: its workers place tokens otherwise."""
    for new in (1, 16):  # before and after a process has taken it over
        told = "dcp_kv_cache_interleave_size = 16.*set cp_kv_cache_interleave_size = 16"
        with pytest.raises(ConfigError, match=told):
            engine_of(vllm, dcp_kv_cache_interleave_size=16, cp_kv_cache_interleave_size=new)
    alone = engine_of(vllm, decode_context_parallel_size=1, dcp_kv_cache_interleave_size=16)
    assert alone.token_shards == 1, "without DCP it says nothing"


@pytest.mark.parametrize("interleave", [48, 128])
def test_interleave_that_leaves_pages_unequal_is_refused(vllm, interleave):
    told = f"cp_kv_cache_interleave_size = {interleave} does not divide the block size 64"
    with pytest.raises(ConfigError, match=told):
        engine_of(vllm, cp_kv_cache_interleave_size=interleave)


MLA, GQA = ("MLAAttentionSpec", (4, BLOCK, 576)), ("FullAttentionSpec", (4, 2, BLOCK, 1, 128))


@pytest.mark.parametrize(
    ("cache", "heads", "tp_size", "slices"),
    [
        (MLA, 1, 2, [(0, 2, 0, 1), (1, 2, 0, 1)]),
        (MLA, 1, 4, [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        (GQA, 1, 2, [(0, 2, 0, 1), (1, 2, 0, 1)]),
        (GQA, 1, 4, [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        (GQA, 2, 4, [(0, 4, 0, 1), (1, 4, 0, 1), (2, 4, 0, 1), (3, 4, 0, 1)]),
    ],
    ids=["mla-2", "mla-4", "mqa-2", "mqa-4", "gqa-4"],
)
def test_each_rank_s_pages_are_its_own_slice(vllm, cache, heads, tp_size, slices):
    (kind, shape), parallel = cache, {**SHARED, "tensor_parallel_size": tp_size}
    caches = caches_of(vllm, spec_of(vllm, kind))
    engine = engine_of(vllm, caches, **parallel)
    tensors = {"model.layers.0.x": vllm.torch.zeros(shape, dtype=vllm.torch.bfloat16)}
    found = []
    for rank in range(tp_size):
        config = config_of(heads=heads, **parallel)
        (one,) = vllm.caches.view_caches(tensors, config, caches, engine.parts, rank)
        assert one.page_bytes == tensors["model.layers.0.x"][0].numel() * 2
        assert one.blocks_per_chunk == 2
        assert not one.is_replicated
        found.append((one.slice_idx, one.num_slices, one.replica_idx, one.num_replicas))
    assert found == slices


@pytest.mark.parametrize(
    ("world_size", "place", "served"),
    [(2, 1, True), (2, 0, False), (4, 1, False), (1, 0, False)],
)
def test_groups_of_other_ranks_are_refused(vllm, world_size, place, served):
    group = SimpleNamespace(world_size=world_size, rank_in_group=place)
    with mock.patch.object(vllm.state, "_DCP", group):
        vllm.dcp.check_dcp_rank(1, 3)  # nobody asks without DCP
        if served:
            vllm.dcp.check_dcp_rank(2, 3)
            return
        with pytest.raises(ConfigError, match=r"rank 3 is rank .* not 1 of 2; set it to 1"):
            vllm.dcp.check_dcp_rank(2, 3)


def test_worker_says_its_ranks_if_its_group_is_as_expected(vllm):
    groups = {
        "_TP": SimpleNamespace(world_size=2, rank_in_group=1),
        "_PP": SimpleNamespace(rank_in_group=1),
        "_DCP": SimpleNamespace(world_size=2, rank_in_group=0),
    }
    with mock.patch.multiple(vllm.state, **groups):
        assert vllm.view.worker_ranks(1) == (3, 1)
        with pytest.raises(ConfigError, match="decode_context_parallel_size = 2"):
            vllm.view.worker_ranks(2)

"""vLLM's groups and tensors as parts and geometry: what is served, what is refused and how."""

from types import SimpleNamespace

import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.errors import ConfigError

pytestmark = pytest.mark.vllm


def attention(vllm, kind="FullAttentionSpec", **changes):
    facts = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": vllm.torch.bfloat16}
    return getattr(vllm.specs, kind)(**(facts | changes))


def state(vllm, **changes):
    """192 bytes of convolution, 512 of state, in pages of 1024."""
    facts = {
        "block_size": 64,
        "shapes": ((3, 32), (4, 32)),
        "dtypes": (vllm.torch.bfloat16, vllm.torch.float32),
        "page_size_padded": 1024,
        "mamba_cache_mode": "align",
    }
    return vllm.specs.MambaSpec(**(facts | changes))


def groups_of(vllm, *specs):
    groups = [vllm.specs.KVCacheGroupSpec([f"model.layers.{i}.x"], s) for i, s in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=10, hash_block_size=32)


def engine_of(vllm, config, settings=None, speculative=None, policy="fail"):
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_load_failure_policy=policy),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
        ),
        speculative_config=speculative,
        model_config=SimpleNamespace(
            model="m",
            dtype="bf16",
            quantization=None,
            seed=0,
            hf_config=SimpleNamespace(to_dict=dict),
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
    )
    return vllm.view.view_engine(vllm_config, config, settings or ConnectorSettings())


def test_groups_become_parts(vllm):
    window = attention(vllm, "SlidingWindowSpec", sliding_window=129)
    config = groups_of(vllm, attention(vllm), window, state(vllm))
    full, window, state_part = vllm.caches.view_parts(config, 192)
    assert (full.pages, full.depth) == (6, None)
    assert (window.kept_tokens, window.pages, window.depth) == (128, 4, 1)
    assert (state_part.pages, state_part.depth, state_part.recurrent) == (1, 1, True)
    assert [part.index for part in (full, window, state_part)] == [0, 1, 2]


def test_chunk_is_the_common_block_where_there_are_states(vllm):
    engine = engine_of(vllm, groups_of(vllm, attention(vllm), state(vllm)))
    assert engine.chunk_tokens == 64
    assert engine.async_loads
    window = attention(vllm, "SlidingWindowSpec", sliding_window=129, block_size=48)
    engine = engine_of(vllm, groups_of(vllm, attention(vllm), window))
    assert engine.chunk_tokens == 288, "about 256, whole blocks of 32 and of 48"


def test_what_can_be_undone_is_restored_layer_by_layer(vllm):
    assert not engine_of(vllm, groups_of(vllm, attention(vllm))).async_loads
    window = attention(vllm, "SlidingWindowSpec", sliding_window=129)
    for config in (groups_of(vllm, attention(vllm), window), groups_of(vllm, window)):
        assert engine_of(vllm, config).async_loads
        assert not engine_of(vllm, config, ConnectorSettings(load_mode="layerwise")).async_loads


def test_restores_beside_others_are_asynchronous_by_choice_of_auto(vllm):
    config = groups_of(vllm, attention(vllm))
    assert engine_of(vllm, config).async_beside_others
    assert not engine_of(vllm, config, ConnectorSettings(load_mode="layerwise")).async_beside_others
    window = attention(vllm, "SlidingWindowSpec", sliding_window=129)
    assert not engine_of(vllm, groups_of(vllm, attention(vllm), window)).async_beside_others


def test_what_is_computed_anew_is_restored_asynchronously(vllm):
    """Layer by layer, others would share it before anybody knows that it never came."""
    config = groups_of(vllm, attention(vllm))
    assert engine_of(vllm, config, policy="recompute").async_loads
    with pytest.raises(ConfigError, match=r"load_mode = layerwise .*recompute.*async"):
        engine_of(vllm, config, ConnectorSettings(load_mode="layerwise"), policy="recompute")


def test_failed_restores_on_a_vllm_that_takes_no_failed_requests(vllm, monkeypatch):
    """0.25: windows layer by layer, states asynchronously; a failure stops the engine."""
    monkeypatch.setattr(vllm.view, "takes_failed_requests", lambda: False)
    window = attention(vllm, "SlidingWindowSpec", sliding_window=129)
    assert not engine_of(vllm, groups_of(vllm, attention(vllm), window)).async_loads
    assert engine_of(vllm, groups_of(vllm, attention(vllm), state(vllm))).async_loads


@pytest.mark.parametrize(
    ("settings", "speculative", "message"),
    [
        ({"load_mode": "layerwise"}, None, "use load_mode async or auto"),
        ({"chunk_size": 128}, None, "keeps one every 64 tokens; use 64"),
        ({}, SimpleNamespace(method="mtp"), "speculative decoding with recurrent states"),
        ({"reconnect": True}, None, "reconnect = true with recurrent states.*remove it"),
    ],
)
def test_what_can_not_be_right_with_states_is_refused(vllm, settings, speculative, message):
    config = groups_of(vllm, attention(vllm), state(vllm))
    with pytest.raises(ConfigError, match=message):
        engine_of(vllm, config, ConnectorSettings(**settings), speculative)


def test_windows_may_reconnect(vllm):
    window = attention(vllm, "SlidingWindowSpec", sliding_window=129)
    for config in (groups_of(vllm, attention(vllm)), groups_of(vllm, attention(vllm), window)):
        engine_of(vllm, config, ConnectorSettings(reconnect=True))


def test_states_of_which_no_copies_are_kept_are_refused(vllm):
    config = groups_of(vllm, attention(vllm), state(vllm, mamba_cache_mode="none"))
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        engine_of(vllm, config)


def test_unknown_kinds_of_cache_are_refused(vllm):
    local = attention(vllm, "ChunkedLocalAttentionSpec", attention_chunk_size=128)
    with pytest.raises(ConfigError, match=r"model.layers.1.x has a cache of kind ChunkedLocal"):
        engine_of(vllm, groups_of(vllm, attention(vllm), local))


def test_layers_that_see_later_tokens_are_refused(vllm):
    """VLLM turns its own prefix caching off then, and keeps hashing for connectors."""
    config = groups_of(vllm, attention(vllm), attention(vllm, non_causal=True))
    with pytest.raises(ConfigError, match=r"model.layers.1.x attends to later tokens"):
        engine_of(vllm, config)


def test_other_windows_are_other_namespaces(vllm):
    facts = [
        engine_of(vllm, groups_of(vllm, attention(vllm), spec)).facts
        for spec in (
            attention(vllm),
            attention(vllm, "SlidingWindowSpec", sliding_window=129),
            attention(vllm, "SlidingWindowSpec", sliding_window=65),
        )
    ]
    assert len({str(one) for one in facts}) == 3


def model_of(num_kv_heads, text):
    config = SimpleNamespace(to_dict=lambda: text)
    return SimpleNamespace(get_total_num_kv_heads=lambda: num_kv_heads, hf_text_config=config)


def caches_of(vllm, tensors, spec, tp_size=1, tp_rank=0, text=None, draft=None):
    config = groups_of(vllm, spec)
    parts = vllm.caches.view_parts(config, spec.block_size)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=model_of(2, {"num_key_value_heads": 2} | (text or {})),
        speculative_config=draft and SimpleNamespace(draft_model_config=model_of(0, draft)),
    )
    (cache,) = vllm.caches.view_caches(
        {"model.layers.0.x": tensors}, vllm_config, config, parts, tp_rank
    )
    return cache


def state_views(vllm, pool):
    """Convolution and state over one pool, as vLLM 0.25 has them."""
    torch = vllm.torch
    conv = torch.as_strided(pool.view(torch.bfloat16), (10, 3, 32), (512, 32, 1))
    ssm = torch.as_strided(pool.view(torch.float32), (10, 4, 32), (256, 32, 1), 48)
    return [conv, ssm]


def test_state_is_the_same_page_in_both_of_vllm_s_forms(vllm):
    """A list of views (0.25), or one tensor of bytes (0.32); the padding is left out."""
    pool = vllm.torch.zeros(10 * 1024, dtype=vllm.torch.int8)
    whole = vllm.torch.as_strided(pool, (10, 1, 1, 704), (1024, 704, 704, 1))
    for tensors in (state_views(vllm, pool), whole):
        cache = caches_of(vllm, tensors, state(vllm))
        assert cache.base_address == pool.data_ptr()
        assert (cache.page_bytes, cache.block_stride_bytes) == (704, 1024)
        assert (cache.blocks_per_chunk, cache.part) == (1, 0)


def test_state_with_a_part_missing_is_refused(vllm):
    pool = vllm.torch.zeros(10 * 1024, dtype=vllm.torch.int8)
    with pytest.raises(ConfigError, match="192 bytes, vLLM says 704"):
        caches_of(vllm, state_views(vllm, pool)[:1], state(vllm))


def test_states_are_a_slice_a_rank_and_replicated_ones_are_stored_once(vllm):
    pool = vllm.torch.zeros(10 * 1024, dtype=vllm.torch.int8)
    views = state_views(vllm, pool)
    sharded = [caches_of(vllm, views, state(vllm), 4, rank) for rank in range(4)]
    assert [(c.slice_idx, c.num_slices) for c in sharded] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    whole = caches_of(vllm, views, state(vllm, tp_replicated=True), 4, 3)
    assert (whole.slice_idx, whole.num_slices, whole.replica_idx) == (0, 1, 3)


def test_attention_page_padded_to_a_state_s_is_used_without_the_padding(vllm):
    spec = attention(vllm, page_size_padded=20480)  # 16384 used
    pool = vllm.torch.zeros(10 * 10240, dtype=vllm.torch.bfloat16)
    tensor = vllm.torch.as_strided(pool, (10, 2, 32, 128), (10240, 4096, 128, 1))
    cache = caches_of(vllm, tensor, spec)
    assert (cache.page_bytes, cache.block_stride_bytes) == (16384, 20480)


def heads_of(vllm, num_heads, **more):
    """Return (slice, slices, replica) of rank 3 of 4, with as many heads a rank in the spec."""
    spec = attention(vllm, num_kv_heads=num_heads)
    tensor = vllm.torch.zeros(10, 32, num_heads, 128, dtype=vllm.torch.bfloat16)
    cache = caches_of(vllm, tensor, spec, tp_size=4, tp_rank=3, **more)
    return cache.slice_idx, cache.num_slices, cache.replica_idx


def test_fewer_heads_than_ranks_are_stored_once_each(vllm):
    assert heads_of(vllm, 1) == (1, 2, 1)
    assert heads_of(vllm, 1, draft={"num_key_value_heads": 2}) == (1, 2, 1)
    other_tower = {"vision_config": {"num_key_value_heads": 16}, "id2label": {0: "a"}}
    assert heads_of(vllm, 1, text=other_tower) == (1, 2, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"text": {"swa_num_key_value_heads": 4}},  # MiMo-V2
        {"text": {"attention_other_setting": {"num_attention_groups": 4}}},  # Step-3.5
        {"text": {"num_kv_heads": [2, 2, 4]}},  # OpenELM
        {"text": {"block_configs": [{"attention": {"n_heads_in_group": 4}}]}},  # Nemotron-NAS
        {"draft": {"num_key_value_heads": 4}},
    ],
)
def test_ranks_are_nobody_s_replicas_where_layers_differ_in_heads(vllm, more):
    """A rank's one head may be one of 2 or of 4: ranks 2 and 3 then hold different bytes."""
    assert heads_of(vllm, 1, **more) == (3, 4, 0)
    assert heads_of(vllm, 2, **more) == (3, 4, 0)

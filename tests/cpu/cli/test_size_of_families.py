"""`adp-kv size` of every family of docs/models.md, against what vLLM's own layers declare."""

import json
from collections import Counter

import pytest

from adp_kv.cli.model_config import read_config
from adp_kv.cli.shapes import model_shape
from adp_kv.cli.size import Load, sizes
from adp_kv.errors import ConfigError
from tests.support import tiny_models
from tests.support.gateways import Gateway
from tests.support.serving import Rank, welcome_all

GiB = 1 << 30
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
FAMILIES = {
    "llama": {"num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096},
    "mla": {},
    "dsa": {"num_hidden_layers": 6, "index_topk_freq": 4},
    "gemma3": {
        "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "num_hidden_layers": 14, "sliding_window": 1024, "sliding_window_pattern": 6,
        "layer_types": None,
    },
    "gpt_oss": {"num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3_next": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "num_hidden_layers": 12, "layer_types": None,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 8,
    },
    "granite_hybrid": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "mamba_n_heads": 128, "mamba_d_state": 128,
    },
    "nemotron_h": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 52, "hybrid_override_pattern": PATTERN,
        "mamba_num_heads": 128, "n_groups": 8, "ssm_state_size": 128,
    },
    "falcon_h1": {
        "hidden_size": 5120, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
        "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_n_groups": 2,
        "mamba_d_state": 256,
    },
    "zamba2": {
        "hidden_size": 3584, "num_attention_heads": 32, "num_key_value_heads": 32,
        "n_mamba_heads": 112, "mamba_ngroups": 2,
    },
    "lfm2": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_dim": 2048,
        "block_dim": 2048,
    },
}  # fmt: skip
"""Sizes of real models, with a few of their layers and experts, over the tiny ones."""


def config_of(name, size):
    config = tiny_models.load(name).config
    if size == "full":
        config = {k: v for k, v in (config | FAMILIES[name]).items() if v is not None}
    return config


def load(**how):
    usual = {
        "block_tokens": 16,
        "chunk_tokens": 0,
        "shared_memory_size": 6 * GiB,
        "fragment_size": 261120,
        "slot_bytes": 262144,
        "users": 1,
        "tokens": 16384,
        "longest": 16384,
    }
    return Load(**(usual | how))


def said_by_vllm(tmp_path, config, tp, block, **engine):
    """Return vLLM's block, the connector's chunk, what each rank declares."""
    from tests.support import spec_rig

    (tmp_path / "config.json").write_text(json.dumps(config))
    rig = spec_rig.specs(tmp_path, tp, block_size=block, max_model_len=4096, **engine)
    return rig.block_tokens, rig.engine.chunk_tokens, spec_rig.hellos(rig)


def objects_of(hellos):
    """Return how many caches have objects and slices of each size, all ranks together."""
    caches = {decl.index: decl for hello in hellos for decl in hello.caches}
    return Counter((decl.object_bytes, decl.slice_bytes) for decl in caches.values())


def counted(found):
    objects = Counter()
    for cache in found.caches:
        objects[cache.object_bytes, cache.slice_bytes] += cache.layers
    return objects


vllm = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class TestAgainstVllm:
    """vLLM's layers, its block sizes, its groups; the connector's view of them."""

    pytestmark = vllm

    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize("size", ["tiny", "full"])
    @pytest.mark.parametrize("name", FAMILIES)
    def test_size_is_what_the_ranks_of_a_family_declare(self, tmp_path, name, size, tp):
        config = config_of(name, size)
        block = 16 if name in {"mla", "dsa"} else 32  # as vLLM has them on a CPU
        vllm_block, chunk, said = said_by_vllm(tmp_path, config, tp, block)
        found = sizes(model_shape(config, "auto", tp), load(block_tokens=block))
        assert (found.block_tokens, found.chunk_tokens) == (vllm_block, chunk)
        assert counted(found) == objects_of(said)

    @pytest.mark.parametrize(("name", "tp"), [("qwen3_next", 8), ("nemotron_h", 8), ("gpt_oss", 8)])
    def test_size_at_tp_8(self, tmp_path, name, tp):
        config = config_of(name, "full")
        vllm_block, chunk, said = said_by_vllm(tmp_path, config, tp, 32)
        found = sizes(model_shape(config, "auto", tp), load(block_tokens=32))
        assert (found.block_tokens, found.chunk_tokens) == (vllm_block, chunk)
        assert counted(found) == objects_of(said)

    @pytest.mark.parametrize(
        ("name", "heads", "tp", "dcp"),
        [
            ("llama", 1, 4, 2),
            ("llama", 2, 8, 4),
            ("mla", None, 4, 4),
            ("mla", None, 8, 2),
            ("dsa", None, 4, 2),
        ],
    )
    def test_ranks_that_share_tokens(self, tmp_path, name, heads, tp, dcp):
        """Decode context parallelism: longer blocks, objects of every token once, more slices."""
        config = config_of(name, "full")
        if heads:
            config |= {"num_key_value_heads": heads}
        shared = {"decode_context_parallel_size": dcp}
        _, chunk, said = said_by_vllm(tmp_path, config, tp, 32, **shared)
        found = sizes(model_shape(config, "auto", tp, dcp_size=dcp), load(block_tokens=32))
        assert (found.block_tokens, found.chunk_tokens) == (32 * dcp, chunk)
        assert counted(found) == objects_of(said)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("name", ["granite_hybrid", "nemotron_h", "lfm2"])
    def test_types_of_states_follow_the_model_or_vllm(self, tmp_path, name, dtype):
        config = config_of(name, "tiny")
        vllm_block, _, said = said_by_vllm(tmp_path, config, 1, 32, dtype=dtype)
        found = sizes(model_shape(config, "auto", 1, dtype), load(block_tokens=32))
        assert found.block_tokens == vllm_block
        assert counted(found) == objects_of(said)

    @pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "dsa"])
    def test_gateway_cuts_its_ring_as_size_says(self, tmp_path, name):
        config = config_of(name, "tiny")
        block = 16 if name == "dsa" else 32
        _, _, said = said_by_vllm(tmp_path, config, 2, block)
        ring = {"shared_memory_size": 64 << 20}
        found = sizes(model_shape(config, "auto", 2), load(block_tokens=block, **ring))
        with Gateway.serve(card_options={"capacity_bytes": "1MiB"}, **ring) as gateway:
            ranks = [Rank(gateway.address, hello.rank) for hello in said]
            for rank, hello in zip(ranks, said, strict=True):
                rank.hello = hello
                rank.send(hello)
            welcome = welcome_all(ranks)[0]
            for rank in ranks:
                rank.close("done")
            gateway.stop()  # no rank has mapped the ring: killed, it would leave the file
        assert (welcome.io_size, welcome.num_slots) == (found.io_size, found.max_parallel_ios)


def by_kind(found):
    return {cache.kind: cache for cache in found.caches}


@pytest.mark.parametrize(("tp", "state", "block"), [(1, 1_097_728, 544), (8, 137_216, 144)])
def test_qwen3_next_by_hand(tp, state, block):
    """80B: 36 layers of gated delta net beside 12 of attention; vLLM's own figures."""
    config = config_of("qwen3_next", "full") | {"num_hidden_layers": 48}
    found = sizes(model_shape(config, "auto", tp), load())
    kinds = by_kind(found)
    assert found.block_tokens == found.chunk_tokens == block
    assert (kinds["attention"].layers, kinds["gated delta net"].layers) == (12, 36)
    assert kinds["gated delta net"].object_bytes == state * tp
    assert found.io_size == max(1_097_728, kinds["attention"].object_bytes)


@pytest.mark.parametrize(("tp", "state"), [(4, 1_067_008), (8, 533_504)])
def test_qwen3_5_by_hand(tp, state):
    """397B: as Qwen3-Next, with states in the type that the file names."""
    config = config_of("qwen3_next", "full") | {"linear_num_value_heads": 64}
    config |= {"model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}
    found = sizes(model_shape(config, "auto", tp), load())
    assert by_kind(found)["gated delta net"].object_bytes == state * tp
    assert found.block_tokens == {4: 1056, 8: 528}[tp]


def test_nemotron_h_by_hand():
    """8B: states in float32, and a block of 1040 tokens."""
    found = sizes(model_shape(config_of("nemotron_h", "full"), "auto", 1), load())
    assert found.block_tokens == 1040
    assert by_kind(found)["Mamba-2"].object_bytes == 4_255_744
    assert found.io_size == 1040 * 4096
    assert (found.layers, by_kind(found)["Mamba-2"].layers) == (28, 24)


def test_deepseek_v3_2_by_hand():
    config = config_of("dsa", "tiny") | {"num_hidden_layers": 61, "torch_dtype": "bfloat16"}
    shape = model_shape(config, "fp8_ds_mla", 8)
    found = sizes(shape, load(block_tokens=64))
    assert [(k.name, k.num_layers, k.token_bytes) for k in shape.kinds] == [
        ("MLA", 61, 656),
        ("DSA indexer", 61, 132),
    ]
    assert found.bytes_per_token * 64 == 3_076_352
    assert "fp8_ds_mla" in sizes(model_shape(config, "fp8", 8), load()).note


def test_card_holds_what_is_stored_of_a_conversation():
    """Windows: the last blocks of every chunk; states: one where a step ends; attention: all."""
    config = config_of("gpt_oss", "tiny")
    found = sizes(model_shape(config, "auto", 1), load(block_tokens=32, users=3, tokens=1000))
    kinds = by_kind(found)
    token = 2 * 2 * 64 * 2
    assert kinds["attention"].object_bytes == 256 * token
    assert kinds["window of 128"].object_bytes == 4 * 32 * token  # 127 tokens are in 4 blocks
    assert {k.objects_per_prompt for k in found.caches} == {3}
    assert found.prompt_bytes == 3 * 2 * (256 + 128) * token
    # 36 values of a slot each, and room before a card that is 90% full evicts.
    assert found.card_capacity_bytes == 40 * 262144
    assert kinds["window of 128"].longest_get == 1

    config = config_of("qwen3_next", "full")
    how = {"tokens": 100_000, "longest": 100_000}
    one, more = (
        sizes(model_shape(config, "auto", 1), load(batched_tokens=n, **how)) for n in (8192, 2048)
    )
    # 183 chunks of 544 tokens; steps end after 15, or 3, of them.
    assert by_kind(one)["attention"].objects_per_prompt == 183
    assert by_kind(one)["gated delta net"].objects_per_prompt == 13
    assert by_kind(more)["gated delta net"].objects_per_prompt == 61
    assert by_kind(one)["gated delta net"].longest_get == 1
    assert "one every 8192 tokens" in one.note


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_next", {"full_attention_interval": 4}),
        ("qwen3_next", {}),
        ("lfm2", {"full_attn_idxs": [1]}),
        ("gemma3", {"sliding_window_pattern": 3}),
        ("gpt_oss", {}),
    ],
)
def test_layers_are_known_without_their_list(name, changes):
    """Some files give a period or indices instead of layer_types, or leave it to the family."""
    listed = config_of(name, "tiny")
    bare = {k: v for k, v in listed.items() if k != "layer_types"} | changes
    assert model_shape(bare, "auto", 1) == model_shape(listed, "auto", 1)


def test_what_is_not_in_the_file_is_said(tmp_path):
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "model_type": "gemma3"}))
    shape = model_shape(read_config(str(tmp_path)), "auto", 1)
    assert [(k.num_layers, k.token_bytes) for k in shape.kinds] == [(5, 4096), (29, 4096)]
    assert any("head_dim = 256" in note for note in shape.notes)
    assert any("bfloat16" in n for n in model_shape(config_of("llama", "tiny"), "auto", 1).notes)


def test_window_that_is_switched_off_is_none():
    config = config_of("llama", "tiny") | {"sliding_window": 96}
    (kind,) = model_shape(config, "auto", 1).kinds
    assert kind.window == 96
    (kind,) = model_shape(config | {"use_sliding_window": False}, "auto", 1).kinds
    assert kind.window == 0


@pytest.mark.parametrize(
    ("name", "tp", "changes", "message"),
    [
        ("nemotron_h", 4, {}, "--tp 4: n_groups = 2"),
        ("qwen3_next", 3, {}, "--tp 3: linear_num_key_heads = 2"),
        ("lfm2", 1, {"conv_dim": None}, "no conv_dim"),
        ("granite_hybrid", 1, {"mamba_expand": None}, "no mamba_expand"),
        ("mla", 1, {"layer_types": ["full_attention", "linear_attention"]}, "MLA beside"),
    ],
)
def test_what_can_not_be_divided_or_is_missing_is_named(name, tp, changes, message):
    with pytest.raises(ConfigError, match=message):
        model_shape(config_of(name, "tiny") | changes, "auto", tp)


def test_chunk_of_a_recurrent_model_is_vllm_s_block():
    shape = model_shape(config_of("qwen3_next", "full"), "auto", 1)
    assert sizes(shape, load(chunk_tokens=544)).chunk_tokens == 544
    with pytest.raises(ConfigError, match=r"--chunk-size 256.*544 tokens here"):
        sizes(shape, load(chunk_tokens=256))
    few = sizes(shape, load(tokens=100))
    assert (few.card_capacity_bytes, few.stored_bytes_per_token) == (0, 0)
    assert "fill no chunk of 544" in few.note

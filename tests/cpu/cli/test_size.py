"""`adp-kv size` against what ranks of a real configuration declare, and by hand."""

import json

import pytest

from adp_kv.cli import main
from adp_kv.cli.model_config import read_config
from adp_kv.cli.shapes import CacheKind, model_shape
from adp_kv.cli.size import FILL_PERCENT, Load, sizes, thrifty_slot_bytes
from adp_kv.errors import ConfigError, RingError
from adp_kv.units import GiB
from gateway.cards.retention import RetentionSettings
from tests.support import tiny_models
from tests.support.gateways import Gateway
from tests.support.serving import Rank, welcome_all

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def load(**how):
    usual = {
        "block_tokens": 16,
        "chunk_tokens": 0,
        "shared_memory_size": 6 * GiB,
        "fragment_size": 261120,
        "slot_bytes": 262144,
        "users": 1,
        "tokens": 256,
        "longest": 256,
    }
    return Load(**(usual | how))


def test_llama_8b_by_hand():
    shape = model_shape(LLAMA_8B, "auto", 1)
    assert shape.kinds == (CacheKind("attention", 32, 2 * 8 * 128 * 2),)
    found = sizes(shape, load(users=10, tokens=1000, longest=131072))
    assert found.bytes_per_token == 131072
    assert found.io_size == 1 << 20
    assert found.max_parallel_ios == 3 * 1024
    assert found.longest_get_slots == 512
    assert found.longest_get_batches == 1
    assert found.fragments_per_object == 5  # 261120 is a little less than a quarter of a MiB
    assert found.card_capacity_bytes == 5334 * 262144  # 10 * 3 * 32 * 5 slots are 90% of it
    assert found.prompt_bytes == 3 * 256 * 131072


def test_deepseek_v3_by_hand():
    """47,000 objects of a 196,000-token prompt: decisions' own figure."""
    shape = model_shape(DEEPSEEK_V3, "auto", 8)
    assert shape.kinds == (CacheKind("MLA", 61, 576 * 2),)
    found = sizes(shape, load(longest=196_000))
    assert found.longest_get_slots * found.layers == pytest.approx(47_000, rel=0.01)
    assert model_shape(DEEPSEEK_V3, "fp8", 8).kinds[0].token_bytes == 576
    assert model_shape(DEEPSEEK_V3, "fp8_ds_mla", 8).kinds[0].token_bytes == 656


@pytest.mark.parametrize(("tp", "stored"), [(1, 8), (4, 8), (8, 8), (16, 8), (3, 3), (32, 8)])
def test_heads_are_stored_once_where_ranks_share_them(tp, stored):
    (kind,) = model_shape(LLAMA_8B, "auto", tp).kinds
    assert kind.token_bytes == 2 * stored * 128 * 2


def test_card_of_that_size_evicts_nothing_by_itself():
    assert 100 * RetentionSettings().evict_above == FILL_PERCENT


def test_values_are_no_longer_than_a_slot():
    """A card's fragments are what fits its slots, whatever fragment_size would allow."""
    found = sizes(model_shape(LLAMA_8B, "auto", 1), load(slot_bytes=131072))
    assert (found.fragments_per_object, found.caches[0].fragments) == (8, 8)
    assert found.stored_bytes_per_token == 32 * 8 * 131072 // 256
    with pytest.raises(ConfigError, match="--slot-bytes 5000: no multiple of 4096"):
        sizes(model_shape(LLAMA_8B, "auto", 1), load(slot_bytes=5000))


@pytest.mark.parametrize(
    ("objects", "slot"),
    [
        ([(1 << 20, 10)], 262144),
        ([(294912, 10)], 294912),  # MLA, 256 tokens: two usual slots would waste 0.44
        ([(32768, 10)], 32768),
        ([(655360, 10)], 327680),
        ([(294912, 10), (33792, 10)], 147456),  # 36864 would waste less, in 8 parts
        ([(3 << 20, 1), (1 << 20, 100)], 262144),
        ([(137 * 4096, 10)], 69 * 4096),  # one part would waste nothing, and is too long
    ],
    ids=["llama", "mla", "small", "five quarters", "two kinds", "states", "too long"],
)
def test_recommended_slot_wastes_least(objects, slot):
    assert thrifty_slot_bytes(objects) == slot


def test_ranks_that_share_tokens_by_hand():
    """Decode context parallelism: a block is that of all of them, an object has a token once."""
    found = sizes(model_shape(DEEPSEEK_V3, "auto", 8, dcp_size=8), load(block_tokens=64))
    assert (found.block_tokens, found.chunk_tokens) == (512, 512)
    assert (found.io_size, found.caches[0].slice_bytes) == (512 * 1152, 64 * 1152)
    assert found.bytes_per_token == 61 * 1152
    found = sizes(model_shape(LLAMA_8B, "auto", 16, dcp_size=2), load())
    assert (found.chunk_tokens, found.io_size) == (256, 1 << 20)
    assert found.caches[0].slice_bytes == (1 << 20) // 16
    with pytest.raises(ConfigError, match="block size 64 times --dcp 8: use 512, or leave it out"):
        sizes(
            model_shape(DEEPSEEK_V3, "auto", 8, dcp_size=8),
            load(block_tokens=64, chunk_tokens=256),
        )


@pytest.mark.parametrize(
    ("changes", "tp", "dcp", "message"),
    [
        ({}, 4, 3, "--dcp 3: does not divide --tp 4"),
        ({}, 8, 2, "--dcp 2: with 8 KV heads vLLM takes at most 1 at --tp 8"),
        ({}, 16, 4, "at most 2 at --tp 16"),
        ({"sliding_window": 128}, 16, 2, "all full attention or MLA"),
    ],
)
def test_ranks_that_can_not_share_tokens_are_named(changes, tp, dcp, message):
    with pytest.raises(ConfigError, match=message):
        model_shape(LLAMA_8B | changes, "auto", tp, dcp_size=dcp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "model_type unknown"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "kind chunked_attention"),
        ({"layer_types": ["mamba", "attention"], "model_type": "bamba"}, "bamba.*granite"),
        ({"layer_types": ["conv"], "model_type": "lfm2", "conv_dim": 64}, "recurrent layers alone"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"torch_dtype": "int3"}, "--dtype int3"),
    ],
)
def test_what_can_not_be_sized_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_shape(LLAMA_8B | changes, "auto", 1)


def test_too_small_a_ring_says_what_it_needs():
    with pytest.raises(RingError, match="at least 2097152"):
        sizes(model_shape(LLAMA_8B, "auto", 1), load(shared_memory_size=1 << 20))
    with pytest.raises(ConfigError, match="no multiple of the block size 16"):
        sizes(model_shape(LLAMA_8B, "auto", 1), load(chunk_tokens=100))


def test_config_is_found_by_file_folder_and_cache(tmp_path, monkeypatch):
    text = json.dumps({"text_config": LLAMA_8B, "model_type": "pictures"})
    (tmp_path / "config.json").write_text(text)
    assert read_config(str(tmp_path))["num_hidden_layers"] == 32
    assert read_config(str(tmp_path / "config.json"))["model_type"] == "pictures"
    snapshot = tmp_path / ".cache/huggingface/hub/models--meta--x/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert read_config("meta/x")["kv_lora_rank"] == 512
    with pytest.raises(ConfigError, match=r"hf download meta/y config\.json"):
        read_config("meta/y")
    with pytest.raises(ConfigError, match=r"no config\.json there; give"):
        read_config(str(snapshot.parent))
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("HF_HOME", str(tmp_path / ".cache/huggingface"))
    assert read_config("meta/x")["kv_lora_rank"] == 512
    monkeypatch.setenv("HF_HOME", "/")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / ".cache/huggingface/hub"))
    assert read_config("meta/x")["kv_lora_rank"] == 512
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a model"):
        read_config(str(tmp_path))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tp", [1, 2])
def test_size_is_what_ranks_declare_and_the_gateway_says(tmp_path, tp):
    """The ring of a real gateway, cut for what vLLM's own configuration leads to."""
    from adp_kv.wire.messages import Hello
    from tests.support.key_rig import Setup, hellos

    config = tiny_models.load("llama").config
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = {"tensor_parallel_size": tp}
    said = hellos(Setup(str(tmp_path), engine=engine, num_layers=4))
    found = sizes(
        model_shape(config, "auto", tp, "float32"),
        load(block_tokens=32, shared_memory_size=64 << 20),
    )
    with Gateway.serve(shared_memory_size=64 << 20, card_options={"capacity_bytes": "1MiB"}) as g:
        ranks = [Rank(g.address, hello.rank) for hello in said]
        for rank, hello in zip(ranks, said, strict=True):
            assert isinstance(hello, Hello)
            rank.hello = hello
            rank.send(hello)
        welcome = welcome_all(ranks)[0]
        for rank in ranks:
            rank.close("done")
        g.stop()  # no rank has mapped the ring: a gateway that is killed leaves it
    assert (welcome.io_size, welcome.num_slots) == (found.io_size, found.max_parallel_ios)
    assert found.layers == len(said[0].caches)


def test_command_line_tells_json_and_text(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main.main(["size", str(tmp_path), "--users", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["io_size"] == 1 << 20
    assert told["fragments_per_object"] == 4  # by default of the slab card, whose slots they fill
    assert told["stored_bytes_per_token"] == told["bytes_per_token"]
    assert main.main(["size", str(tmp_path), "--shared-memory-size", "10GiB"]) == 0
    out = capsys.readouterr().out
    assert "io size" in out
    assert "1048576 (1.0 MiB)" in out
    assert "attention:" in out
    assert main.main(["size", str(tmp_path / "nothing")]) == 2
    assert "no config.json there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--tp", ["0", "-1", "two"]),
        ("--dcp", ["0"]),
        ("--block-size", ["0", "-16"]),
        ("--chunk-size", ["-16"]),
        ("--users", ["0", "-1"]),
        ("--tokens", ["0"]),
        ("--longest", ["-4"]),
        ("--batched-tokens", ["0"]),
        ("--fragment-size", ["0", "-1", "many", "1 QB"]),
        ("--slot-bytes", ["0"]),
        ("--shared-memory-size", ["0", "-5", "xGiB"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, capsys, flag, values):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for value in values:
        with pytest.raises(SystemExit) as ended:
            main.main(["size", str(tmp_path), f"{flag}={value}"])
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert f"argument {flag}: {value!r}: expected" in told


def test_sizes_have_the_gateway_s_units(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for text, ring in (("10GB", 10**10), ("1.5 GiB", 3 << 29), ("8388608", 1 << 23)):
        assert main.main(["size", str(tmp_path), "--shared-memory-size", text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["shared_memory_size"] == ring

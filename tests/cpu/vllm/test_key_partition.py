"""Which facts are in a key: all that change the bytes or who may read them, and no other.

On vLLM's own configuration and hash functions; no engine, no device, some seconds
(tests/support/key_rig.py). A fact missing here is a wrong answer for somebody; a fact too
many is a cache that forgets at every restart.
"""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adp_kv.errors import ConfigError
from tests.support import tiny_models
from tests.support.key_rig import PROMPT, Setup, chunk_keys, keys

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def weights(folder, value):
    """Write a weight file as large as the last one."""
    header = {"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    text = json.dumps(header).encode()
    data = np.full(64, value, dtype=np.float32).tobytes()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def model(folder, value=1.0, **changes):
    folder.mkdir(exist_ok=True)
    config = tiny_models.load("llama").config | changes
    (folder / "config.json").write_text(json.dumps(config))
    weights(folder, value)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def base(folder):
    return keys(Setup(folder))


def put(path, value):
    """Return a function that sets an attribute of a VllmConfig."""

    def mutate(config):
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        object.__setattr__(config, name, value)

    return mutate


def image(identifier, offset=32):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    where = PlaceholderRange(offset=offset, length=32)
    return MultiModalFeatureSpec(None, "image", identifier, where)


def adapter(path, name="a"):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, str(path))


def media(**facts):
    """Return a function that makes the model a multimodal one."""
    usual = {"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, "video_pruning_rate": None}
    return put("model_config.multimodal_config", SimpleNamespace(**(usual | facts)))


def quantized(name):
    """Return a function that has weights quantized at load, by --quantization-config."""

    def mutate(config):
        from vllm.config.quantization import resolve_quantization_config

        put("model_config.quantization_config", resolve_quantization_config(name, None))(config)

    return mutate


ENGINE = {
    "key_namespace": {"settings": {"key_namespace": "b"}},
    "chunk size": {"settings": {"chunk_size": 128}},
    "block size": {"engine": {"block_size": 64}},
    "revision": {"engine": {"revision": "v2"}},
    "commit": {"mutate": put("model_config.hf_config._commit_hash", "abc")},
    "dtype": {"engine": {"dtype": "bfloat16"}},
    "quantization": {"mutate": put("model_config.quantization", "fp8")},
    "quantization of linear layers": {"mutate": quantized("fp8_per_tensor")},
    "KV dtype, as set": {"mutate": put("cache_config.cache_dtype", "fp8_e5m2")},
    "KV dtype, as stored": {"dtype": torch.bfloat16},
    "rope through --hf-overrides": {"engine": {"hf_overrides": {"rope_theta": 5e5}}},
    "layout, by strides": {"layout": "HND"},
    "layout, by name": {"layout_name": "LBHNC"},
    "head size": {"head_size": 128},
    "KV heads": {"heads": 4},
    "layers": {"num_layers": 3},
    "TP": {"engine": {"tensor_parallel_size": 2}},
    "PP": {"engine": {"pipeline_parallel_size": 2}},
    "hash algorithm": {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "hash seed": {"environment": {"PYTHONHASHSEED": "1"}},
    "dummy weights": {"engine": {"load_format": "dummy"}},
    "draft model": {
        "mutate": put("speculative_config", type("S", (), {"model": "d", "method": "eagle"}))
    },
    "image processor": {"mutate": media(mm_processor_kwargs={"num_crops": 4})},
    "video decoder": {"mutate": media(media_io_kwargs={"video": {"num_frames": 8}})},
    "video pruning": {"mutate": media(video_pruning_rate=0.5, video_pruning_method="evs")},
    "image encoder": {"mutate": media(mm_encoder_attn_dtype="fp8")},
    "format version": {"patches": {"FORMAT_VERSION": 2}},
    "byte order": {"patches": {"sys": type("S", (), {"byteorder": "big"})}},
    "Python, where it pickles": {
        "patches": {"platform": type("P", (), {"python_version_tuple": lambda: ("3", "99", "0")})}
    },
}


@pytest.mark.parametrize("changed", ENGINE.values(), ids=ENGINE)
def test_engine_fact_changes_every_key(folder, base, changed):
    other = keys(replace(Setup(folder), **changed))
    assert other
    assert other.isdisjoint(base)


SAME = {
    "multimodal, nothing set": {"mutate": media()},
    "multimodal, cache size": {"mutate": media(mm_processor_cache_gb=0)},
    "written by a loaded MiniMax-M2": {"mutate": put("model_config.hf_config.max_model_len", 77)},
    "engine_id": {"process": {"engine_id": "two"}},
    "pid": {"process": {"pid": 4711}},
    "request id": {"process": {"request_id": "another"}},
    "kv_port": {"process": {"kv_port": 9999}},
    "gateway's port": {"settings": {"gateway": "tcp://127.0.0.1:6000"}},
    "gateway by ipc": {"settings": {"gateway": "ipc:///tmp/g"}},
    "host": {"environment": {"VLLM_HOST_IP": "127.0.0.9", "HOSTNAME": "other"}},
    "gpu memory": {"engine": {"gpu_memory_utilization": 0.5}},
    "number of blocks": {"engine": {"num_gpu_blocks_override": 99}},
    "batch size": {"engine": {"max_num_seqs": 3, "max_num_batched_tokens": 4096}},
    "chunked prefill off": {"engine": {"enable_chunked_prefill": False}},
    "model length": {"engine": {"max_model_len": 1024}},
    "eager": {"engine": {"enforce_eager": True}},
    "seed of sampling": {"engine": {"seed": 7}},
    "load mode": {"settings": {"load_mode": "async"}},
    "time-outs": {"settings": {"load_timeout_s": 1.0, "gateway_timeout_s": 1.0}},
    "read only": {"settings": {"save": False}},
    "staging": {"settings": {"staging_bytes": 1 << 20}},
    "chunk size given as the default": {"settings": {"chunk_size": 256}},
    "load policy": {"mutate": put("kv_transfer_config.kv_load_failure_policy", "recompute")},
    "served name": {"engine": {"served_model_name": "nice"}},
    "empty salt": {"request": {"cache_salt": ""}},
    "priority": {"request": {"priority": 5}},
}


@pytest.mark.parametrize("changed", SAME.values(), ids=SAME)
def test_other_fact_changes_no_key(folder, base, changed):
    assert keys(replace(Setup(folder), **changed)) == base


REQUEST = {
    "salt": lambda: {"cache_salt": "tenant"},
    "adapter": lambda: {"lora_request": adapter("absent")},
    "image": lambda: {"mm_features": [image("one")]},
    "embeds": lambda: {"prompt_embeds": torch.zeros(len(PROMPT), 4)},
}


@pytest.mark.parametrize("changed", REQUEST.values(), ids=REQUEST)
def test_request_fact_changes_every_key(folder, base, changed):
    assert keys(Setup(folder, request=changed())).isdisjoint(base)


def test_two_values_of_a_request_fact_differ(folder):
    """Not only present and absent: each salt, image, adapter is its own."""

    def of(**request):
        return keys(Setup(folder, request=request))

    assert of(cache_salt="a").isdisjoint(of(cache_salt="b"))
    assert of(cache_salt="a") == of(cache_salt="a")
    one, two = of(mm_features=[image("one")]), of(mm_features=[image("two")])
    assert one.isdisjoint(two)
    assert of(lora_request=adapter("x", "a")).isdisjoint(of(lora_request=adapter("x", "b")))
    ones, zeros = (torch.full((len(PROMPT), 4), value) for value in (1.0, 0.0))
    assert of(prompt_embeds=ones).isdisjoint(of(prompt_embeds=zeros))


def test_image_changes_the_chunks_from_it_on(folder):
    setup = Setup(folder, settings={"chunk_size": 32})
    plain = chunk_keys(setup)
    with_image = chunk_keys(replace(setup, request={"mm_features": [image("one", offset=64)]}))
    assert (plain[:2] == with_image[:2]).all()
    assert not (plain[2:] == with_image[2:]).any()


def test_adapter_counts_by_its_content(folder, tmp_path):
    """Same name, same path, other weights: the file was trained further."""
    weights(tmp_path, 1.0)
    before = keys(Setup(folder, request={"lora_request": adapter(tmp_path)}))
    assert keys(Setup(folder, request={"lora_request": adapter(tmp_path)})) == before
    weights(tmp_path, 2.0)
    assert keys(Setup(folder, request={"lora_request": adapter(tmp_path)})).isdisjoint(before)


def test_adapter_counts_by_what_scales_its_weights(folder, tmp_path):
    weights(tmp_path, 1.0)
    found = []
    for alpha in (16, 32):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
        found.append(keys(Setup(folder, request={"lora_request": adapter(tmp_path)})))
    assert found[0].isdisjoint(found[1])


def test_length_counts_with_long_rope(tmp_path):
    """Longer than the model was first trained on, and vLLM takes the long factors for all."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
        "original_max_position_embeddings": 512,
    }
    folder = model(tmp_path / "m", rope_parameters=rope, max_position_embeddings=2048)
    short, long = (keys(Setup(folder, engine={"max_model_len": n})) for n in (512, 1024))
    assert short.isdisjoint(long)


def without_prefix_caching(*changes):
    def mutate(config):
        for change in (put("cache_config.enable_prefix_caching", False), *changes):
            change(config)

    return mutate


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (without_prefix_caching(media(mm_processor_cache_gb=0)), "names images by a number"),
        (without_prefix_caching(put("model_config.runner_type", "pooling")), "every token"),
        (put("model_config.is_diffusion", True), "diffusion"),
        (put("model_config.enable_sleep_mode", True), "sleep mode"),
    ],
)
def test_what_block_hashes_do_not_tell_is_refused(folder, mutate, message):
    with pytest.raises(ConfigError, match=message):
        keys(Setup(folder, mutate=mutate))


@pytest.mark.parametrize("mutate", [without_prefix_caching(), without_prefix_caching(media())])
def test_prefix_caching_may_be_off_where_hashes_tell_all(folder, base, mutate):
    assert keys(Setup(folder, mutate=mutate)) == base


def test_weights_and_config_of_a_folder_change_every_key(tmp_path):
    first = keys(Setup(model(tmp_path / "m")))
    assert keys(Setup(model(tmp_path / "m"))) == first
    tuned = keys(Setup(model(tmp_path / "m", 2.0)))
    assert tuned.isdisjoint(first)
    assert keys(Setup(model(tmp_path / "m", rope_theta=5e5))).isdisjoint(first)
    assert keys(Setup(model(tmp_path / "n"))).isdisjoint(first)
    (tmp_path / "m" / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    assert keys(Setup(model(tmp_path / "m"))).isdisjoint(first)


def test_ways_to_quantize_weights_at_load_differ(folder):
    """All that --quantization online says; the same in every process."""
    names = ["fp8_per_tensor", "fp8_per_tensor", "fp8_per_block"]
    one, again, other = (keys(Setup(folder, mutate=quantized(name))) for name in names)
    assert one == again
    assert one.isdisjoint(other)


def test_seed_of_dummy_weights_changes_every_key(folder):
    one, two = (
        keys(Setup(folder, engine={"load_format": "dummy", "seed": seed})) for seed in (1, 2)
    )
    assert one.isdisjoint(two)


def test_prefix_decides_and_tail_does_not(folder):
    setup = Setup(folder, settings={"chunk_size": 64})
    whole = chunk_keys(setup)
    longer = chunk_keys(replace(setup, prompt=(*PROMPT, *range(900, 1100))))
    assert (longer[: len(whole)] == whole).all()
    other_head = chunk_keys(replace(setup, prompt=(4, *PROMPT[1:])))
    assert not (other_head == whole).any()
    other_tail = chunk_keys(replace(setup, prompt=(*PROMPT[:64], 4, *PROMPT[65:])))
    assert (other_tail[0] == whole[0]).all()
    assert not (other_tail[1:] == whole[1:]).any()


def test_scales_taken_from_the_first_batch_are_refused(folder):
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        keys(Setup(folder, mutate=put("cache_config.calculate_kv_scales", True)))


def test_ranks_that_share_tokens_otherwise_have_keys_of_their_own(folder):
    """DCP: the same ranks hold other tokens; the gateway sees that only in part."""
    four = {"tensor_parallel_size": 4}
    two = four | {"decode_context_parallel_size": 2}
    layouts = [four, two, two | {"cp_kv_cache_interleave_size": 2}]
    layouts.append(two | {"cp_kv_cache_interleave_size": 32})
    found = [keys(Setup(folder, engine=engine)) for engine in layouts]
    for one, other in itertools.combinations(found, 2):
        assert one
        assert one.isdisjoint(other)
    assert keys(Setup(folder, engine=two | {"dcp_comm_backend": "a2a"})) == found[1]

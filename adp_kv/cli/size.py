"""How much ring and card a model needs, from its config.json alone.

    config.json ─► bytes of a token in one layer ─► object (io_size) ─► ring, card

An object is one chunk of one layer, all ranks together (docs/keys.md). Knows no torch and no
vLLM; a test compares with what the ranks of a real configuration declare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adp_kv.errors import ConfigError
from adp_kv.ring.header import divide
from adp_kv.units import KiB, align_up, ceil_div

DEFAULT_CHUNK_TOKENS = 256
MAX_RING_BYTES = 64 << 30
_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_FP8_DS_MLA_BYTES = 656  # of a token: vLLM's packed latent with its scales
_NOT_ATTENTION = ("linear", "mamba", "recurrent", "conv", "rwkv")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """KV cache of one token in one layer, all ranks together.

    Attributes:
        kind: "MLA" or "attention".
        num_layers: with a cache.
        token_bytes: of distinct bytes; ranks that hold the same heads count once.
        note: what the reader should know; empty if nothing.
    """

    kind: str
    num_layers: int
    token_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What `adp-kv size` says; bytes unless the name tells otherwise."""

    kind: str
    layers: int
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
    note: str


def read_config(model: str) -> dict[str, Any]:
    """Return a model's config.json: of a file, a folder, or a name in the Hugging Face cache.

    Raises:
        ConfigError: There is none, or it is no JSON object; names where it was looked for.
    """
    tried = [Path(model), Path(model) / "config.json"]
    cached = Path("~/.cache/huggingface/hub").expanduser() / f"models--{model.replace('/', '--')}"
    tried += sorted(cached.glob("snapshots/*/config.json"))[-1:]
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{model}: no config.json there, nor in {cached}; give the path of the file, or fetch "
            f"it: huggingface-cli download {model} config.json"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a model's config.json")
    # Models with pictures keep the language model's numbers one level down.
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def cache_shape(config: Mapping[str, Any], kv_dtype: str, tp_size: int) -> CacheShape:
    """Return what a model keeps of a token.

    Args:
        config: of read_config().
        kv_dtype: as vLLM's --kv-cache-dtype; "auto" is the model's own.
        tp_size: tensor-parallel ranks.

    Raises:
        ConfigError: A number is missing, or a kind of layer this can't size.
    """
    kinds = [str(kind) for kind in config.get("layer_types") or []]
    strange = sorted({k for k in kinds if any(word in k for word in _NOT_ATTENTION)})
    if strange or "ssm_state_size" in config or "mamba_d_state" in config:
        raise ConfigError(
            f"layers of kind {', '.join(strange) or 'mamba'}: their states can't be sized from "
            "config.json; the gateway logs io_size when the engine joins"
        )
    note = ""
    if any("full" not in kind for kind in kinds) or config.get("sliding_window"):
        note = "sliding-window layers are counted like full ones"
    num_layers = _number(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        if config.get("index_head_dim"):
            note = "the DSA indexer's cache is not counted: about a fifth more"
        width = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        packed = kv_dtype == "fp8_ds_mla"
        token = _FP8_DS_MLA_BYTES if packed else width * _item_bytes(config, kv_dtype)
        return CacheShape("MLA", num_layers, token, note)
    heads = int(config.get("num_key_value_heads") or _number(config, "num_attention_heads"))
    size = config.get("head_dim") or (
        _number(config, "hidden_size") // _number(config, "num_attention_heads")
    )
    # Heads that do not divide evenly among the ranks are stored by every rank for itself.
    stored = heads if heads % tp_size == 0 or tp_size % heads == 0 else tp_size
    token = 2 * stored * int(size) * _item_bytes(config, kv_dtype)
    return CacheShape("attention", num_layers, token, note)


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json has no {name}: is it a language model's?")
    return value


def _item_bytes(config: Mapping[str, Any], kv_dtype: str) -> int:
    name = kv_dtype
    if name == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        # vLLM runs a float32 checkpoint in bfloat16 on a GPU, unless --dtype says otherwise.
    if name not in _ITEM_BYTES:
        raise ConfigError(f"--kv-dtype {name}: one of auto, fp8_ds_mla, {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[name]


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served and kept.

    Attributes:
        block_tokens, chunk_tokens: as vLLM and the connector are set; chunk 0: about 256.
        shared_memory_size: of the gateway.
        fragment_size, slot_bytes: of the card.
        users, tokens: how many conversations of how many tokens the card shall keep.
        longest: tokens of the longest prompt.
    """

    block_tokens: int
    chunk_tokens: int
    shared_memory_size: int
    fragment_size: int
    slot_bytes: int
    users: int
    tokens: int
    longest: int


def sizes(shape: CacheShape, load: Load) -> Sizes:
    """Return what a model needs for a load.

    Raises:
        ConfigError: chunk_size is no multiple of the block size.
        RingError: The ring holds not even one object a direction; says what it needs.
    """
    block = load.block_tokens
    chunk = load.chunk_tokens or ceil_div(DEFAULT_CHUNK_TOKENS, block) * block
    if chunk % block:
        raise ConfigError(f"--chunk-size {chunk}: no multiple of the block size {block}")
    io_size = chunk * shape.token_bytes
    ring = divide(load.shared_memory_size, io_size, generation=1)
    longest = max(1, load.longest // chunk)
    fragments = ceil_div(io_size, load.fragment_size)
    stored_chunk = shape.num_layers * fragments * load.slot_bytes
    chunks = load.users * (load.tokens // chunk)
    return Sizes(
        kind=shape.kind,
        layers=shape.num_layers,
        chunk_tokens=chunk,
        bytes_per_token=shape.token_bytes * shape.num_layers,
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
        fragments_per_object=fragments,
        stored_bytes_per_token=stored_chunk // chunk,
        prompt_bytes=(load.tokens // chunk) * chunk * shape.token_bytes * shape.num_layers,
        card_capacity_bytes=chunks * stored_chunk,
        note=shape.note,
    )


def as_facts(found: Sizes) -> dict[str, object]:
    """Return sizes as names and numbers."""
    return asdict(found)


def slot_bytes_for(fragment_size: int) -> int:
    """Return the slab card's slot for fragments of a size: whole 4 KiB pages."""
    return align_up(fragment_size, 4 * KiB)

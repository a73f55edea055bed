"""A model's config.json: where it is, its numbers, and what each of its layers keeps.

    read_config() ─► number(), item_bytes() ─► layer_caches(): per layer "full", "window", "state"

Knows no torch, no transformers and no vLLM. What is not in the file is transformers' default for
that family, and is then noted; where there is none, it is an error that names what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from adp_kv.config import environment
from adp_kv.errors import ConfigError

FULL, WINDOW, STATE = "full", "window", "state"
_KEPT: Final = {
    "attention": {FULL},
    "full_attention": {FULL},
    "sliding_attention": {WINDOW},
    "linear_attention": {STATE},
    "mamba": {STATE},
    "conv": {STATE},
    "hybrid": {FULL, STATE},
    "mlp": set[str](),
    "moe": set[str](),
}
_PATTERN: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_PERIODS: Final = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""Every so many layers one sees all, the others a window, where layer_types are not given."""
_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "nemotron_h": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256},
}
_ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

Config = Mapping[str, Any]


def read_config(model: str) -> dict[str, Any]:
    """Return a model's config.json: of a file, a folder, or a name in the Hugging Face cache.

    Raises:
        ConfigError: There is none, or it is no JSON object; names where it was looked for.
    """
    tried = [Path(model), Path(model) / "config.json"]
    cached = _hub_cache() / f"models--{model.replace('/', '--')}"
    tried += sorted(cached.glob("snapshots/*/config.json"))[-1:]
    path = next((path for path in tried if path.is_file()), None)
    if path is None and Path(model).exists():
        raise ConfigError(f"{model}: no config.json there; give the path of the file")
    if path is None:
        raise ConfigError(
            f"{model}: no config.json there, nor in {cached}; give the path of the file, or fetch "
            f"it: hf download {model} config.json"
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


def _hub_cache() -> Path:
    """Return where Hugging Face keeps what it fetched."""
    if hub := environment("HF_HUB_CACHE"):
        return Path(hub)
    home = environment("HF_HOME")
    return (Path(home) if home else Path("~/.cache/huggingface").expanduser()) / "hub"


def family(config: Config) -> str:
    """Return the model_type, "" if there is none."""
    return str(config.get("model_type") or "")


def with_defaults(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with transformers' defaults of its family, and notes of those."""
    absent = {
        name: value
        for name, value in _DEFAULTS.get(family(config), {}).items()
        if config.get(name) is None
    }
    told = ", ".join(f"{name} = {value}" for name, value in absent.items())
    notes = [f"not in config.json, taken from transformers: {told}"] if absent else []
    return {**config, **absent}, notes


def number(config: Config, name: str) -> int:
    """Return a number that must be there.

    Raises:
        ConfigError: It is not.
    """
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json has no {name}: is it a language model's?")
    return value


def model_dtype(config: Config, dtype: str) -> tuple[str, list[str]]:
    """Return the type that vLLM runs a model in, and notes.

    Args:
        config: of read_config().
        dtype: as vLLM's --dtype.
    """
    if dtype != "auto":
        return dtype, []
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if name != "float32":
        return name, []
    return "bfloat16", ["a float32 checkpoint runs in bfloat16 unless --dtype says otherwise"]


def item_bytes(name: str, setting: str) -> int:
    """Return the bytes of an item of a type.

    Raises:
        ConfigError: An unknown type; names the setting.
    """
    if name not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        raise ConfigError(f"{setting} {name}: one of auto, fp8_ds_mla, {known}")
    return _ITEM_BYTES[name]


def layer_caches(config: Config) -> list[set[str]]:
    """Return what each layer keeps: any of FULL, WINDOW and STATE.

    Raises:
        ConfigError: A kind of layer that can't be sized, or too few numbers.
    """
    kinds = _layer_kinds(config)
    strange = sorted(set(kinds) - set(_KEPT))
    if strange:
        raise ConfigError(
            f"layers of kind {', '.join(strange)}: they can't be sized from config.json; the "
            "gateway logs io_size when the engine joins"
        )
    if family(config) == "falcon_h1":  # each has both, side by side
        return [{FULL, STATE} for _ in kinds]
    return [_KEPT[kind] for kind in kinds]


def _layer_kinds(config: Config) -> list[str]:
    named = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(named, list):
        return [str(kind) for kind in named]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_PATTERN.get(letter, letter) for letter in pattern]
    layers = list(range(number(config, "num_hidden_layers")))
    other, seen_by_all = "full_attention", layers
    if family(config).startswith(("qwen3_next", "qwen3_5")):
        other, seen_by_all = (
            "linear_attention",
            _every(layers, config, "full_attention_interval", 4),
        )
    elif isinstance(config.get("full_attn_idxs"), list):
        other, seen_by_all = "conv", config["full_attn_idxs"]
    elif config.get("sliding_window") and config.get("use_sliding_window") is not False:
        period = _PERIODS.get(family(config), 0)
        other = "sliding_attention"
        seen_by_all = _every(layers, config, "sliding_window_pattern", period)
    return ["full_attention" if i in seen_by_all else other for i in layers]


def _every(layers: list[int], config: Config, name: str, usual: int) -> list[int]:
    """Return the last layer of each period; none where there is no period."""
    period = int(config.get(name) or usual)
    return [i for i in layers if period and (i + 1) % period == 0]

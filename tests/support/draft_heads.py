"""Targets with draft heads of their own (EAGLE, MTP) that guess well because of how they are made.

A head of random weights would never guess a token, and whatever its cache holds nobody would
see it. So a head computes what its target computes: it has copies of the target's layers, the
projection at its entry passes the embedding on (and a trace of the target's hidden state, so that
the head's pages depend on that too), and embeddings have a root mean square of 1, which makes the
norms that differ between head and target do nothing. What is left: a head does not see the first
token of a prompt (MTP: nor the second). It is right most of the time, unless its cache is wrong.

The weights are those of a tiny model, changed with numpy: neither torch nor transformers is
loaded into the process that tests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support import tiny_models
from tests.support.engine import Engine

VERSION = 1  # raise it when the way the weights are made changes
TRACE = 0.01
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Drafted:
    """A target and what makes it draft.

    Attributes:
        target: its folder.
        needs: by device, the engine arguments without which it does not run there.
        speculative_config: as for --speculative-config.
        target_layers, draft_layers: how many they have; the draft's are counted on.
    """

    target: Path
    needs: dict[str, dict[str, Any]]
    speculative_config: dict[str, Any]
    target_layers: int
    draft_layers: int

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of Engine.start() beside the folder."""
        return {"needs": self.needs, "speculative_config": dict(self.speculative_config)}

    def is_draft(self, cache: str) -> bool:
        """Return whether a cache, by vLLM's name of the layer, is the draft's."""
        return layer_of(cache) >= self.target_layers


def layer_of(cache: str) -> int:
    """Return the number of the layer in vLLM's name of it."""
    return next(int(part) for part in cache.split(".") if part.isdigit())


def accepted_tokens(engine: Engine) -> int:
    """Return how many guesses were accepted since the engine's start."""
    return int(engine.metrics().get("vllm:spec_decode_num_accepted_tokens", 0))


def eagle(num_tokens: int = 3) -> Drafted:
    """Return a Llama with an EAGLE head of as many layers, which share no weights on disk."""
    tiny = tiny_models.load("llama")
    base = tiny_models.random_weights(tiny.config)
    target = _folder("eagle-target", base, tiny.config, _level)
    head = _folder("eagle-head", base, tiny.config, _eagle_head)
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": num_tokens}
    layers = int(tiny.config["num_hidden_layers"])
    return Drafted(target, tiny.engine_args, config, layers, layers)


def mtp(num_tokens: int = 2) -> Drafted:
    """Return a DeepSeek-V3 of one dense layer, with an MTP layer that is like it."""
    tiny = tiny_models.load("mtp")
    base = tiny_models.random_weights(tiny.config)
    target = _folder("mtp", base, tiny.config, _with_mtp_layer)
    config = {"method": "mtp", "num_speculative_tokens": num_tokens}
    return Drafted(target, tiny.engine_args, config, 1, 1)


def _level(weights: Weights) -> Weights:
    """Give every embedding a root mean square of 1."""
    rows = weights[EMBEDDING]
    level = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    return weights | {EMBEDDING: level.astype(np.float32)}


def _entry(weights: Weights) -> NDArray[np.float32]:
    """Return a projection of (embedding, state) to the embedding and a trace of the state."""
    unit = np.eye(weights[EMBEDDING].shape[1], dtype=np.float32)
    return np.concatenate([unit, TRACE * unit], axis=1)


def _eagle_head(weights: Weights) -> Weights:
    """Embedding and output are the target's; the first layer has no norm at its entry."""
    layers = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    return layers | {"fc.weight": _entry(weights)}


def _with_mtp_layer(weights: Weights) -> Weights:
    level, norm = _level(weights), weights["model.norm.weight"]
    layer = "model.layers.1."
    copies = {
        name.replace("model.layers.0.", layer): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    return (
        level
        | copies
        | {
            f"{layer}embed_tokens.weight": level[EMBEDDING],
            f"{layer}enorm.weight": np.ones_like(norm),
            f"{layer}hnorm.weight": np.ones_like(norm),
            f"{layer}eh_proj.weight": _entry(weights),
            f"{layer}shared_head.norm.weight": norm,
            f"{layer}shared_head.head.weight": weights[HEAD],
        }
    )


def _folder(
    name: str, base: Path, config: dict[str, Any], change: Callable[[Weights], Weights]
) -> Path:
    """Return a cached folder with the base's weights changed."""
    from safetensors.numpy import load_file, save_file

    text = json.dumps(config, sort_keys=True)
    digest = hashlib.sha256(f"{VERSION} {TRACE} {base.name} {text}".encode()).hexdigest()[:16]
    folder = tiny_models.cache_folder() / f"{name}-{digest}"
    if (folder / "model.safetensors").exists():
        return folder
    aside = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        (aside / "config.json").write_text(text)
        changed = change(load_file(base / "model.safetensors"))
        tensors = {key: np.array(weight, order="C", copy=True) for key, weight in changed.items()}
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        try:
            aside.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "model.safetensors").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder

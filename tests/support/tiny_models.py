"""Tiny models with random weights: a real engine in seconds, without a download.

The weights are random and not "dummy" (vLLM's own are ±1e-3): with those every
greedy token is the same whatever the KV cache holds, and a test of a restore
could not fail. A folder of weights is cached by the digest of its config.

Run as a program it makes one folder; random_weights() does so in a child process,
so that neither torch nor transformers is loaded into the process that tests.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).with_name("models")
SEED = 20250801
WEIGHTS_VERSION = 1  # raise it when the way the weights are drawn changes
_BUILD_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One tests/support/models/*.json.

    Attributes:
        name: file name without suffix.
        config: what goes to the model's config.json.
        engine_args: by device ("cpu", "cuda"), the engine arguments without which it does
            not run there, or runs wrongly.
    """

    name: str
    config: dict[str, Any]
    engine_args: dict[str, dict[str, Any]]


def names() -> list[str]:
    """Return the names of all tiny models."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def load(name: str) -> TinyModel:
    """Return a tiny model by name; FileNotFoundError if there is none."""
    data = json.loads((MODELS / f"{name}.json").read_text())
    return TinyModel(name, data["config"], data["engine_args"])


def resolve(model: str | Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return the folder and the engine arguments by device of a tiny model or of any folder."""
    if isinstance(model, str) and model in names():
        tiny = load(model)
        return random_weights(tiny.config), tiny.engine_args
    return Path(model), {}


def cache_folder() -> Path:
    """Return this user's folder of generated weights (made if absent)."""
    folder = Path(tempfile.gettempdir()) / f"adp-kv-models-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def random_weights(config: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Return a model folder (config.json, model.safetensors) of random weights.

    Args:
        config: the model's config.json.
        folder: where to put it; by default a cached folder named by the config's digest.

    Raises:
        RuntimeError: The weights could not be made; the message ends with the child's output.
    """
    text = json.dumps(config, sort_keys=True)
    if folder is None:
        digest = hashlib.sha256(f"{WEIGHTS_VERSION} {SEED} {text}".encode()).hexdigest()[:16]
        folder = cache_folder() / f"{config['model_type']}-{digest}"
    if (folder / "model.safetensors").exists():
        return folder
    # Made aside and renamed: two processes may want the same folder at once.
    aside = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        _build_in_child(text, aside)
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _build_in_child(config_text: str, folder: Path) -> None:
    (folder / "config.json").write_text(config_text)
    env = dict(os.environ, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"no random weights in {folder}:\n{(done.stdout + done.stderr)[-4000:]}")


def _build(folder: Path) -> None:
    """Fill a folder that holds only config.json; config.json stays as it is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config_path = folder / "config.json"
    config_text = config_path.read_text()
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    config_path.write_text(config_text)  # transformers writes its own dialect of it


if __name__ == "__main__":
    _build(Path(sys.argv[1]))

"""LoRA adapters and changed weights for the tiny models, written without a tensor library."""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANK = 8
_SCALE = 0.3


def write(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write a LoRA adapter of a Llama model's value projections.

    Args:
        folder: made, or overwritten.
        config: the model's config.json.
        seed: of its weights.
    """
    folder.mkdir(exist_ok=True)
    hidden = int(config["hidden_size"])
    values = int(config["num_key_value_heads"]) * int(config["head_dim"])
    numbers = random.Random(seed)
    tensors = {}
    for layer in range(int(config["num_hidden_layers"])):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = _random(numbers, (RANK, hidden))
        tensors[f"{name}.lora_B.weight"] = _random(numbers, (values, RANK))
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def shuffle_rows(weights: Path) -> None:
    """Change a safetensors file in place: the data of its embedding, half a table turned round."""
    data = bytearray(weights.read_bytes())
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    begin, end = header["model.embed_tokens.weight"]["data_offsets"]
    start, stop = 8 + header_bytes + begin, 8 + header_bytes + end
    middle = (start + stop) // 2
    data[start:stop] = data[middle:stop] + data[start:middle]
    weights.write_bytes(data)


_Tensor = tuple[tuple[int, ...], bytes]


def _random(numbers: random.Random, shape: tuple[int, int]) -> _Tensor:
    values = array("f", (numbers.gauss(0, _SCALE) for _ in range(shape[0] * shape[1])))
    return shape, values.tobytes()


def _safetensors(tensors: Mapping[str, _Tensor]) -> bytes:
    header, body, offset = {}, [], 0
    for name, (shape, data) in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        body.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(body)

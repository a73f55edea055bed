"""Digests of what changes the bytes of a page: the namespace of keys.

Two engines may read each other's objects only if their digests are equal, so every
fact that changes bytes and is not in the block hash belongs here, and nothing that
only says who or where a process is (host, pid, port, engine id).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec

from adp_kv.wire.keys import KEY_BYTES

FORMAT_VERSION = 1
"""Version of what an object's bytes mean; a new one makes every older object invisible."""

_LIKE_WEIGHTS = ("adapter_config.json", "*processor_config.json")
"""What scales an adapter's weights (lora_alpha, use_rslora), or pictures before their encoder."""
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", *_LIKE_WEIGHTS)
_SAMPLE_BYTES = 4096
_MIN_SAMPLES = 16  # of a file
_MAX_SAMPLES = 4096  # of a folder, if its files are few
_MAX_HEADER_BYTES = 100 << 20  # as safetensors itself has it

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def digest(facts: Mapping[str, object]) -> bytes:
    """Return 16 bytes for a set of named facts (str, int, float, bool, bytes, None, lists)."""
    return blake2b(
        _encoder.encode(dict(facts)), digest_size=KEY_BYTES, person=b"adpkv-namespace"
    ).digest()


def weights_fingerprint(folder: Path) -> str | None:
    """Return a cheap digest of the weight files in a folder, or None if there are none.

    Reads each file's size and samples of 4 KiB: one of every tensor of a safetensors file
    (about 4096 in all, spread evenly where there are more), else sixteen spread over the
    file. So a fine-tune with the same shapes differs, even one of a few layers, and
    nothing is read whole.
    """
    files = _weight_files(folder)
    if not files:
        return None
    budget = max(_MIN_SAMPLES, _MAX_SAMPLES // len(files))
    total = blake2b(digest_size=KEY_BYTES, person=b"adpkv-weights")
    for file in files:
        size = file.stat().st_size
        total.update(f"{file.name}:{size};".encode())
        with file.open("rb") as data:
            for offset in _sample_offsets(data, size, budget):
                data.seek(offset)
                total.update(data.read(_SAMPLE_BYTES))
    return total.hexdigest()


class Fingerprints:
    """weights_fingerprint() of folders that are asked for again and again. Threads: one."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[list[tuple[str, int, int]], str | None]] = {}

    def fingerprint(self, folder: Path) -> str | None:
        """Return a folder's fingerprint; files are read if sizes or times have changed.

        Raises:
            OSError: A file can't be read, or went away meanwhile.
        """
        found = [(file.name, file.stat()) for file in _weight_files(folder)]
        facts = [(name, told.st_size, told.st_mtime_ns) for name, told in found]
        known = self._known.get(folder)
        if known is None or known[0] != facts:
            known = self._known[folder] = facts, weights_fingerprint(folder)
        return known[1]


def _weight_files(folder: Path) -> list[Path]:
    return sorted({f for pattern in _WEIGHT_PATTERNS for f in folder.glob(pattern)})


def _sample_offsets(data: BinaryIO, size: int, budget: int) -> list[int]:
    """Return where to look: in the middle of tensors, or spread over what is no safetensors."""
    middles = _tensor_middles(data, size)
    if len(middles) > budget:
        middles = [middles[i * len(middles) // budget] for i in range(budget)]
    last = max(0, size - _SAMPLE_BYTES)
    spread = [last * sample // (_MIN_SAMPLES - 1) for sample in range(_MIN_SAMPLES)]
    return [max(0, middle - _SAMPLE_BYTES // 2) for middle in middles] or spread


def _tensor_middles(data: BinaryIO, size: int) -> list[int]:
    """Return the file offset of each tensor's middle, ascending; empty if it has no header."""
    length = int.from_bytes(data.read(8), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        return []
    try:
        header = _decode_header(data.read(length))
    except msgspec.MsgspecError:
        return []
    spans = [tensor.data_offsets for tensor in header.values()]
    return sorted(
        8 + length + (first + end) // 2 for first, end in spans if 0 <= first < end <= size
    )


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)  # absent in the entry __metadata__


_decode_header = msgspec.json.Decoder(dict[str, _Tensor]).decode

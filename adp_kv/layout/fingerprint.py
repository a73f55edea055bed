"""Digests of what changes the bytes of a page: the namespace of keys.

Two engines may read each other's objects only if their digests are equal, so every
fact that changes bytes and is not in the block hash belongs here, and nothing that
only says who or where a process is (host, pid, port, engine id).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from adp_kv.wire.keys import KEY_BYTES

FORMAT_VERSION = 1
"""Version of what an object's bytes mean; a new one makes every older object invisible."""

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def digest(facts: Mapping[str, object]) -> bytes:
    """Return 16 bytes for a set of named facts (str, int, float, bool, bytes, None, lists)."""
    return blake2b(
        _encoder.encode(dict(facts)), digest_size=KEY_BYTES, person=b"adpkv-namespace"
    ).digest()


def weights_fingerprint(folder: Path) -> str | None:
    """Return a cheap digest of the weight files in a folder, or None if there are none.

    Reads each file's size and sixteen samples of 4 KiB spread over it, so that a
    fine-tune with the same shapes differs, without reading the whole.
    """
    files = sorted({f for pattern in _WEIGHT_PATTERNS for f in folder.glob(pattern)})
    if not files:
        return None
    total = blake2b(digest_size=KEY_BYTES, person=b"adpkv-weights")
    for file in files:
        size = file.stat().st_size
        total.update(f"{file.name}:{size};".encode())
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)))
                total.update(data.read(_SAMPLE_BYTES))
    return total.hexdigest()

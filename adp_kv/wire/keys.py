"""Storage keys: 16 bytes, derived without regard to process, host or port.

    namespace key  = blake2b-128 of the namespace facts (see Namespace digest, docs/keys.md)
    chunk key      = blake2b-128(vLLM block hash of the chunk's last block, keyed by namespace)
    chunk key of a part (a KV cache group of a hybrid model)
                   = chunk key  XOR  salt("part", part), part 0 as it is
    object key     = chunk key  XOR  salt("object", cache_idx)
    fragment key   = object key XOR  salt("fragment", fragment_idx)
    commit key     = chunk key  XOR  salt("commit")

A chunk key behaves like 128 random bits. Two different (chunk, part, cache, fragment)
collide only if the XOR of two chunk keys equals the XOR of two fixed salts:
probability 2^-128 a pair, so among n stored keys at most n^2 / 2^129. For 2^33
keys (a petabyte of 128 KiB fragments) that is 2^-63.

Keys travel and are computed as uint64 arrays of shape [n, 2] (little-endian,
word 0 = bytes 0..7): one XOR serves 47,000 keys of a restore at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import WireError

KEY_BYTES = 16
KEY_WORDS = 2

KeyArray: TypeAlias = NDArray[np.uint64]
"""uint64 [n, 2], little-endian; 16 bytes a key."""


@lru_cache(maxsize=65536)
def _salt(kind: str, index: int) -> tuple[int, int]:
    digest = blake2b(
        index.to_bytes(8, "little"), digest_size=KEY_BYTES, person=f"adpkv-{kind}".encode()
    ).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _salts(kind: str, indices: Iterable[int]) -> KeyArray:
    return np.array([_salt(kind, int(i)) for i in indices], dtype="<u8").reshape(-1, KEY_WORDS)


def chunk_keys(namespace: bytes, block_hashes: Sequence[bytes]) -> KeyArray:
    """Return the chunk keys of block hashes.

    Args:
        namespace: 16-byte namespace digest (`adp_kv.layout.fingerprint`).
        block_hashes: vLLM's hash of each chunk's last block; any length > 0.

    Returns:
        uint64 [len(block_hashes), 2].
    """
    digests = b"".join(
        blake2b(h, digest_size=KEY_BYTES, key=namespace, person=b"adpkv-chunk").digest()
        for h in block_hashes
    )
    return np.frombuffer(digests, dtype="<u8").reshape(-1, KEY_WORDS)


def part_keys(chunks: KeyArray, part: int) -> KeyArray:
    """Return the keys under which one part of an engine's caches stores chunks: uint64 [n, 2]."""
    return chunks ^ _salts("part", (part,)) if part else chunks


def object_keys(chunks: KeyArray, cache_indices: Sequence[int]) -> KeyArray:
    """Return the object keys of every (cache, chunk) pair, cache-major.

    Args:
        chunks: uint64 [n, 2] chunk keys.
        cache_indices: the engine-wide index of each (layer, cache kind).

    Returns:
        uint64 [len(cache_indices) * n, 2]; row c * n + i is cache c of chunk i.
    """
    salts = _salts("object", cache_indices)
    return (salts[:, None, :] ^ chunks[None, :, :]).reshape(-1, KEY_WORDS)


def fragment_keys(
    objects: KeyArray, object_idx: NDArray[np.int64], fragment_idx: NDArray[np.int64]
) -> KeyArray:
    """Return the key of each (object, fragment) pair.

    Args:
        objects: uint64 [n, 2] object keys.
        object_idx: int64 [m], row of objects that each fragment belongs to.
        fragment_idx: int64 [m], number of the fragment in its object.

    Returns:
        uint64 [m, 2].
    """
    table = _fragment_salts(int(fragment_idx.max()) + 1)
    return objects[object_idx] ^ table[fragment_idx]


def equal_fragment_keys(objects: KeyArray, count: int) -> KeyArray:
    """Return the keys of objects that are `count` fragments each.

    Args:
        objects: uint64 [n, 2] object keys.
        count: fragments of each.

    Returns:
        uint64 [n * count, 2]; row i * count + f is fragment f of object i.
    """
    return (objects[:, None, :] ^ _fragment_salts(count)).reshape(-1, KEY_WORDS)


@lru_cache(maxsize=1024)
def _fragment_salts(count: int) -> KeyArray:
    return _salts("fragment", range(count))


def whole_keys(objects: KeyArray) -> KeyArray:
    """Return the keys of objects that are one fragment each: uint64 [n, 2]."""
    return objects ^ _fragment_salts(1)


def commit_keys(chunks: KeyArray) -> KeyArray:
    """Return the key of each chunk's commit record: uint64 [n, 2]."""
    return chunks ^ _salts("commit", (0,))


def pack_keys(keys: KeyArray) -> bytes:
    """Return the keys as n * 16 bytes, the form in which they travel."""
    return np.ascontiguousarray(keys, dtype="<u8").tobytes()


def unpack_keys(packed: bytes) -> KeyArray:
    """Return uint64 [n, 2] over packed keys, without a copy.

    Raises:
        WireError: The length is no multiple of 16.
    """
    if len(packed) % KEY_BYTES:
        raise WireError(f"packed keys: {len(packed)} bytes is no multiple of {KEY_BYTES}")
    return np.frombuffer(packed, dtype="<u8").reshape(-1, KEY_WORDS)

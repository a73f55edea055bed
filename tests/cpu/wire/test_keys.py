"""Keys: what is stored under them must be found again by every later release."""

import itertools

import numpy as np
import pytest

from adp_kv.errors import WireError
from adp_kv.wire.keys import (
    chunk_keys,
    commit_keys,
    fragment_keys,
    object_keys,
    pack_keys,
    part_keys,
    unpack_keys,
)

NAMESPACE = bytes(range(16))
HASHES = [b"\x00", b"block", bytes(32)]
CHUNKS = chunk_keys(NAMESPACE, HASHES)
ZEROS = np.zeros(1, dtype=np.int64)


def hexes(keys):
    return [key.tobytes().hex() for key in np.ascontiguousarray(keys)]


def test_keys_are_those_of_the_format():
    assert hexes(CHUNKS) == [
        "8931e68137bd1225909bf3487ba8d3aa",
        "457b7b3f0f5dfe10a970ec52692f3a14",
        "068cb6a2b8be7cc01d361d6d485648d0",
    ]
    assert hexes(object_keys(CHUNKS[:1], [0, 8])) == [
        "d4da7e7edcda7aad532116ea1f5964bd",
        "83070871687188cb221419fb3a655080",
    ]
    fragments = fragment_keys(object_keys(CHUNKS[:1], [8]), np.zeros(2, int), np.arange(2))
    assert hexes(fragments) == [
        "cb379fbcf1401b0e10c2200ba0b27a20",
        "c08f22c0b046e8a18ba206c5693e0715",
    ]
    assert hexes(commit_keys(CHUNKS[:1])) == ["1937f867de21c369543da40bd547f1e3"]


def test_no_two_keys_are_equal():
    rng = np.random.default_rng(0)
    chunks = chunk_keys(NAMESPACE, [rng.bytes(32) for _ in range(50)])
    objects = object_keys(chunks, range(40))
    rows = np.repeat(np.arange(len(objects)), 8)
    fragments = fragment_keys(objects, rows, np.tile(np.arange(8), len(objects)))
    every = np.concatenate([chunks, objects, fragments, commit_keys(chunks)])
    assert len(np.unique(every, axis=0)) == len(every)


def test_namespace_and_hash_both_matter():
    other = bytes(15) + b"\x01"
    keys = np.concatenate(
        [chunk_keys(n, [h]) for n, h in itertools.product([NAMESPACE, other], HASHES)]
    )
    assert len(np.unique(keys, axis=0)) == len(keys)


def test_array_forms_equal_one_by_one():
    assert (np.concatenate([chunk_keys(NAMESPACE, [h]) for h in HASHES]) == CHUNKS).all()
    caches = [3, 0, 65535]
    objects = object_keys(CHUNKS, caches)
    for (c, cache), (i, chunk) in itertools.product(enumerate(caches), enumerate(CHUNKS)):
        single = object_keys(chunk[None], [cache])
        assert (objects[c * len(CHUNKS) + i] == single[0]).all()
    rows, numbers = np.array([4, 0, 4, 8]), np.array([0, 3, 1, 1000])
    found = fragment_keys(objects, rows, numbers)
    for key, row, number in zip(found, rows, numbers, strict=True):
        single = fragment_keys(objects[row][None], ZEROS, np.array([number]))
        assert (key == single[0]).all()
    assert (commit_keys(CHUNKS)[1] == commit_keys(CHUNKS[1:2])[0]).all()


def test_packed_keys_come_back():
    assert pack_keys(CHUNKS) == b"".join(key.tobytes() for key in CHUNKS)
    assert (unpack_keys(pack_keys(CHUNKS)) == CHUNKS).all()
    assert (unpack_keys(pack_keys(CHUNKS[::2])) == CHUNKS[::2]).all()
    assert unpack_keys(b"").shape == (0, 2)
    assert chunk_keys(NAMESPACE, []).shape == (0, 2)


@pytest.mark.parametrize("length", [1, 15, 17, 31])
def test_cut_keys_are_refused(length):
    with pytest.raises(WireError, match="multiple of 16"):
        unpack_keys(bytes(length))


def test_parts_never_share_a_key():
    keys = [hexes(part_keys(CHUNKS, part)) for part in range(64)]
    assert keys[0] == hexes(CHUNKS), "the first part's keys are the chunks' own"
    assert len({key for part in keys for key in part}) == 64 * len(HASHES)
    commits = [hexes(commit_keys(part_keys(CHUNKS, part))) for part in range(64)]
    objects = [hexes(object_keys(part_keys(CHUNKS, part), range(64))) for part in range(64)]
    everything = [key for group in keys + commits + objects for key in group]
    assert len(set(everything)) == len(everything)


def test_part_keys_are_those_of_the_format():
    assert hexes(part_keys(CHUNKS[:1], 1)) == ["d80ef066ce108cb0037b8f33b05ca57c"]

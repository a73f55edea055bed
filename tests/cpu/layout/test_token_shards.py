"""Ranks that share the tokens of every block (DCP): who holds what, as vLLM places it.

What is said here of vLLM is written down once more, from its slot mapping and its groups, and
compared with the slices that adp-kv takes.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_kv.layout.geometry import CacheGeometry, head_slices

BLOCK = 4
EMPTY = -1
LAYOUTS = [  # TP, KV heads (None: MLA), DCP
    (2, None, 2),
    (4, None, 2),
    (4, None, 4),
    (8, None, 2),
    (2, 1, 2),
    (4, 1, 2),
    (4, 2, 2),
    (8, 2, 2),
    (8, 2, 4),
    (8, 1, 4),
]
DIVIDING = [  # with others vLLM does not start
    (tp_size, heads)
    for tp_size in (1, 2, 3, 4, 6, 8, 12, 16)
    for heads in (None, 1, 2, 4, 8, 16)
    if heads is None or tp_size % heads == 0 or heads % tp_size == 0
]


def heads_of(rank, tp_size, heads):
    """Return the heads of a rank, the same for all with MLA."""
    if heads is None:
        return [0]
    if heads >= tp_size:
        each = heads // tp_size
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (tp_size // heads)]


def tokens_of(rank, shards, interleave):
    """Return which of a block's BLOCK * shards tokens are on a rank, in the order of its slots."""
    slots = {}
    for token in range(BLOCK * shards):
        if token // interleave % shards == rank % shards:
            turn = token // (interleave * shards)
            slots[turn * interleave + token % interleave] = token
    assert sorted(slots) == list(range(BLOCK)), "a page is full"
    return [slots[i] for i in range(BLOCK)]


def content(rank, tp_size, heads, shards, interleave=1):
    return tuple(heads_of(rank, tp_size, heads)), tuple(tokens_of(rank, shards, interleave))


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize(("tp_size", "heads"), DIVIDING)
def test_ranks_with_one_slice_hold_the_same_bytes(tp_size, heads):
    for shards in divisors(tp_size):
        ranks = [head_slices(rank, tp_size, heads, shards) for rank in range(tp_size)]
        contents = [content(rank, tp_size, heads, shards) for rank in range(tp_size)]
        by_slice = {}
        for rank, (slice_idx, _, _, _) in enumerate(ranks):
            by_slice.setdefault(slice_idx, []).append(rank)
        assert sorted(by_slice) == list(range(ranks[0][1]))
        for members in by_slice.values():
            assert len({contents[rank] for rank in members}) == 1
            assert [ranks[rank][2] for rank in members] == list(range(len(members)))
            assert {ranks[rank][3] for rank in members} == {len(members)}
        copies = 1 if heads is None else min(heads, tp_size)
        if tp_size // copies % shards == 0:  # a group has one set of heads: what vLLM asks for
            assert len(by_slice) == len(set(contents)), "nothing is stored twice"


def test_ranks_that_share_tokens_across_heads_are_nobody_s_replica():
    """Three ranks a head, groups of two: rank 2 shares tokens with one that has another head."""
    slices = [head_slices(rank, 6, 2, 2) for rank in range(6)]
    assert slices == [(rank, 6, 0, 1) for rank in range(6)]


@pytest.mark.parametrize(("tp_size", "heads"), [(4, None), (4, 2), (8, 1)])
def test_without_shared_tokens_nothing_changes(tp_size, heads):
    for rank in range(tp_size):
        assert head_slices(rank, tp_size, heads, 1) == head_slices(rank, tp_size, heads)


def test_mla_on_four_ranks_in_two_groups():
    """Ranks 0 and 1 hold other tokens; 2 and 3 are their copies and share the work of saving."""
    slices = [head_slices(rank, 4, None, 2) for rank in range(4)]
    assert slices == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]


def test_two_heads_on_four_ranks_in_two_groups():
    slices = [head_slices(rank, 4, 2, 2) for rank in range(4)]
    assert slices == [(rank, 4, 0, 1) for rank in range(4)]


def cache(rank, tp_size, heads, shards):
    slice_idx, num_slices, replica, num_replicas = head_slices(rank, tp_size, heads, shards)
    page = len(heads_of(rank, tp_size, heads)) * BLOCK
    return CacheGeometry(
        0, "l", 0, page, page, 64, 2, slice_idx, num_slices, replica, num_replicas
    )  # fmt: skip


def page_of(rank, layout, block, interleave):
    """Return a page's items: each tells its head and where in the sequence its token is."""
    tp_size, heads, shards = layout
    tokens = [block * BLOCK * shards + t for t in tokens_of(rank, shards, interleave)]
    return [head * 100_000 + token for head in heads_of(rank, tp_size, heads) for token in tokens]


@given(
    layout=st.sampled_from(LAYOUTS),
    interleave=st.sampled_from([1, 2, BLOCK]),
    num_chunks=st.integers(1, 5),
    turn=st.integers(0, 100),
)
def test_every_rank_gets_back_what_it_held(layout, interleave, num_chunks, turn):
    tp_size, heads, shards = layout
    caches = [cache(rank, tp_size, heads, shards) for rank in range(tp_size)]
    assert len({c.object_bytes for c in caches}) == 1
    objects = np.full((num_chunks, caches[0].object_bytes), EMPTY)
    for rank, one in enumerate(caches):
        for chunk in range(num_chunks)[one.replica_rows(num_chunks, turn)]:
            slot = objects[chunk, one.slice_offset : one.slice_offset + one.slice_bytes]
            assert (slot == EMPTY).all(), "two ranks store it"
            blocks = (2 * chunk, 2 * chunk + 1)
            slot[:] = list(
                itertools.chain(*(page_of(rank, layout, block, interleave) for block in blocks))
            )
    assert (objects != EMPTY).all(), "nobody stores it"
    for rank, one in enumerate(caches):
        for chunk in range(num_chunks):
            found = objects[chunk, one.slice_offset : one.slice_offset + one.slice_bytes]
            for i, block in enumerate((2 * chunk, 2 * chunk + 1)):
                page = found[i * one.page_bytes : (i + 1) * one.page_bytes].tolist()
                assert page == page_of(rank, layout, block, interleave)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_object_holds_every_token_of_every_head_once(layout):
    _, heads, shards = layout
    one = cache(0, *layout)
    assert one.object_bytes == 2 * BLOCK * shards * (heads or 1)
    assert not one.is_replicated, "there is nothing to exchange"

"""Shares of a transfer: every page once, all ranks alike, whatever the sizes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_kv.errors import TransferError
from adp_kv.fanout.plan import (
    REGION_ALIGN,
    SAVED_BYTES,
    SLICES_PER_RANK,
    TAIL_BYTES,
    Shape,
    fits,
    least_bytes,
    make_pieces,
    offsets_in_buffer,
)

RANKS = st.integers(1, 16)
SHAPES = st.builds(Shape, st.integers(0, 400), st.integers(1, 20), st.integers(1, 80_000))


@settings(max_examples=400, deadline=None)
@given(SHAPES, RANKS, st.integers(1 << 14, 1 << 24), st.integers(16, 5000), st.integers(0, 15))
def test_pieces_cover_every_page_once_and_fit(shape, num_ranks, buffer_bytes, max_pages, turn):
    turn %= num_ranks
    if not fits(shape.page_bytes, num_ranks, buffer_bytes):
        if shape.num_pages:
            with pytest.raises(TransferError, match="staging buffer"):
                make_pieces(shape, num_ranks, buffer_bytes, max_pages)
        return
    pieces = make_pieces(shape, num_ranks, buffer_bytes, max_pages, turn)
    expected = 0
    for piece in pieces:
        assert len(piece.borders) == num_ranks + 1
        assert piece.first_page == expected
        assert 0 < piece.num_pages <= max_pages
        shares = [end - first for first, end in pairwise(piece.borders)]
        unit = shape.pages_per_slice if max(shares) - min(shares) > 1 else 1
        assert max(shares) - min(shares) in {0, unit}
        assert max(shares) * shape.page_bytes <= piece.region_bytes
        assert piece.region_bytes % REGION_ALIGN == 0
        assert piece.region_bytes * num_ranks <= buffer_bytes
        offsets = np.concatenate(
            [rank * piece.region_bytes + np.arange(n) * shape.page_bytes for rank, n in
             enumerate(shares)]
        )  # fmt: skip
        assert (offsets_in_buffer(piece.layout) == offsets).all()
        expected = piece.borders[-1]
    assert expected == shape.num_pages
    sizes = [piece.num_pages for piece in pieces]
    assert not sizes or max(sizes) == sizes[0]


@given(st.integers(1, 16), st.integers(1, 400), st.integers(1, 9))
def test_over_the_turns_every_rank_copies_the_same(num_ranks, num_slices, per_slice):
    copied = [0] * num_ranks
    for turn in range(num_ranks):
        for piece in make_pieces(
            Shape(num_slices, per_slice, 70_000), num_ranks, 1 << 24, 1 << 14, turn
        ):
            for rank, (first, end) in enumerate(pairwise(piece.borders)):
                copied[rank] += end - first
    assert copied == [num_slices * per_slice] * num_ranks


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 9))
def test_shares_of_many_slices_are_whole_slices(num_ranks, extra, per_slice):
    shape = Shape(SLICES_PER_RANK * num_ranks + extra, per_slice, 512)
    for piece in make_pieces(shape, num_ranks, 1 << 24, 1 << 14):
        assert all(border % per_slice == 0 for border in piece.borders)


def test_fewer_pages_than_ranks_leave_shares_empty():
    (piece,) = make_pieces(Shape(1, 3, 1000), 8, 1 << 20, 1 << 14)
    shares = [end - first for first, end in pairwise(piece.borders)]
    assert sorted(shares) == [0] * 5 + [1] * 3


def test_batch_of_slots_is_one_piece():
    assert len(make_pieces(Shape(56, 4, 73728), 2, 32 << 20, 1 << 14)) == 1


def test_large_transfer_is_cut_so_that_little_is_left_behind_the_copies():
    pieces = make_pieces(Shape(228, 4, 73728), 2, 32 << 20, 1 << 14)
    assert [piece.num_pages for piece in pieces] == [4 * 46] * 4 + [4 * 44]


@given(st.integers(2, 16), st.integers(0, 64 << 20))
def test_exchange_pays_by_what_a_rank_is_spared(num_ranks, total_bytes):
    spared = total_bytes - total_bytes / num_ranks
    assert (total_bytes >= least_bytes(num_ranks)) == (spared >= SAVED_BYTES)


def test_very_large_transfer_has_larger_pieces():
    pieces = make_pieces(Shape(3640, 4, 73728), 2, 32 << 20, 1 << 14)
    assert {piece.num_pages for piece in pieces[:-4]} == {4 * 112}


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_little_is_exchanged_behind_the_last_copy_of_a_large_transfer(num_ranks):
    shape = Shape(3640, 4, 73728)
    for turn in range(num_ranks):
        pieces = make_pieces(shape, num_ranks, 32 << 20, 1 << 14, turn)
        shares = [piece.region_bytes for piece in pieces]
        assert shares[-1] < 2 * TAIL_BYTES
        assert all(b >= a / 3 for a, b in pairwise(shares)), "a copy hides the exchange before it"

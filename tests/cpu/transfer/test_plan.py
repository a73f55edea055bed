from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_kv.errors import TransferError
from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.extents import Extents, OneCopy
from adp_kv.transfer.plan import NEVER, RESTORE, SAVE, Limits, Thresholds, Way, make_plan
from adp_kv.units import GiB, KiB, MiB

BASE = 1 << 20


def a_copy(slice_addrs, pages_per_slice, page_bytes, seed=0):
    slice_addrs = np.asarray(slice_addrs, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(slice_addrs.size * pages_per_slice)
    pages = (1 << 40) + order.astype(np.int64) * page_bytes
    return SliceCopy(slice_addrs, pages.reshape(-1, pages_per_slice), page_bytes)


def the_limits(
    borders=(), staging_bytes=16 * MiB, direct_bytes=32 * MiB, max_pages=1 << 15, has_batch=True
):
    borders = np.array(borders, dtype=np.int64)
    return Limits(borders, staging_bytes, direct_bytes, max_pages, has_batch)


def columns_of(extents):
    """Return the copies of a piece as arrays, whether they are many or one."""
    if not isinstance(extents, OneCopy):
        return extents
    return Extents(*(np.array([word], dtype=np.int64) for word in extents))


def moved(plan):
    """Yield (host address, device byte) pairs of all bytes, whatever way they move."""
    pairs = []
    for piece in plan.pieces():
        pages = piece.page_addrs
        if piece.way is Way.DIRECT:
            for host, page in zip(piece.host_addrs, pages, strict=True):
                pairs += [(int(host) + i, int(page) + i) for i in range(plan.page_bytes)]
            continue
        e = columns_of(piece.extents)
        for host, pitch, width, rows, offset in zip(
            e.host_addrs, e.pitches, e.widths, e.rows, e.offsets, strict=True
        ):
            for at in range(int(rows) * int(width)):
                row, column = divmod(at, int(width))
                device = int(offset) + at
                if piece.way is Way.STAGED:
                    page, inside = divmod(device, plan.page_bytes)
                    device = int(pages[page]) + inside
                pairs.append((int(host) + row * int(pitch) + column, device))
    return pairs


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_plan_moves_every_byte_once(data):
    page_bytes = data.draw(st.integers(1, 9))
    pages_per_slice = data.draw(st.integers(1, 5))
    slice_bytes = page_bytes * pages_per_slice
    pitch = slice_bytes + data.draw(st.sampled_from([0, 0, 1, 13]))
    slots = data.draw(st.lists(st.integers(0, 30), max_size=12, unique=True))
    if data.draw(st.booleans()):
        slots = list(range(len(slots)))
    addrs = BASE + np.array(slots, dtype=np.int64) * pitch
    borders = sorted(data.draw(st.sets(st.integers(BASE, BASE + 31 * pitch), max_size=4)))
    limits = the_limits(
        borders,
        data.draw(st.integers(1, 4 * slice_bytes)),
        data.draw(st.integers(1, 6 * slice_bytes)),
        data.draw(st.integers(1, 8)),
        data.draw(st.booleans()),
    )
    small = st.integers(0, 3 * slice_bytes)
    thresholds = Thresholds(
        *(data.draw(small) for _ in range(7)),
        beside=data.draw(st.sampled_from([0, 0.25, 0.5])),
        force=data.draw(st.sampled_from([None, None, *Way])),
    )
    copy = a_copy(addrs, pages_per_slice, page_bytes)
    plan = make_plan(copy, limits, thresholds)
    expected = [
        (int(addr) + page * page_bytes + i, int(copy.page_addrs[row, page]) + i)
        for row, addr in enumerate(addrs)
        for page in range(pages_per_slice)
        for i in range(page_bytes)
    ]
    assert sorted(moved(plan)) == sorted(expected)
    for piece in plan.pieces():
        assert 0 < piece.num_pages <= limits.max_pages
        if piece.way is Way.STAGED:
            assert piece.num_pages * page_bytes <= limits.staging_bytes
        if piece.extents is not None:
            e = columns_of(piece.extents)
            ends = e.host_addrs + (e.rows - 1) * e.pitches + e.widths
            for border in borders:
                assert not ((e.host_addrs < border) & (border < ends)).any()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize(
    "slots", [[0, 1, 3, 2, 4], [0, 2, 3, 6], [0, 2, 6, 4, 8], [4, 3, 2], [5, 6, 2]]
)
@pytest.mark.parametrize("pitch", [16, 24])
def test_slices_that_look_like_a_run_at_their_ends_move_as_they_lie(way, slots, pitch):
    copy = a_copy(BASE + np.array(slots) * pitch, 2, 8)
    plan = make_plan(copy, the_limits(), Thresholds(0, 0, 0, 0, force=way))
    expected = [
        (int(addr) + page * 8 + i, int(copy.page_addrs[row, page]) + i)
        for row, addr in enumerate(copy.slice_addrs)
        for page in range(2)
        for i in range(8)
    ]
    assert sorted(moved(plan)) == sorted(expected)
    assert (plan.low, plan.high) == (min(expected)[0], max(expected)[0] + 1)


def test_slices_so_far_apart_that_addresses_wrap_are_no_run():
    step = 3 << 61  # each lies the same distance behind the one before it, modulo 2**64
    slices = np.array([BASE, BASE + step, BASE + 2 * step - (1 << 64)], dtype=np.int64)
    plan = make_plan(a_copy(slices, 1, 8), the_limits(), RESTORE)
    assert (plan.low, plan.high) == (int(slices.min()), int(slices.max()) + 8)


def the_way(copy, thresholds, **limits):
    plan = make_plan(copy, the_limits(**limits), thresholds)
    way = next(plan.pieces()).way
    assert {piece.way for piece in plan.pieces()} == {way}
    return way, plan


def run(slot, num):
    return GiB + np.arange(num) * slot


def scattered(slot, num):
    return GiB + np.sort(np.random.default_rng(3).permutation(num * 8)[:num]) * slot


@pytest.mark.parametrize(
    ("thresholds", "slices", "slice_bytes", "page_bytes", "way"),
    [
        (RESTORE, run(128 * KiB, 512), 128 * KiB, 8 * KiB, Way.STAGED),
        (SAVE, run(128 * KiB, 512), 128 * KiB, 8 * KiB, Way.STAGED),
        (RESTORE, run(144 * KiB, 512), 72 * KiB, 8 * KiB, Way.STAGED),
        (RESTORE, run(256 * KiB, 512), 32 * KiB, 8 * KiB, Way.DIRECT),
        (SAVE, run(256 * KiB, 512), 32 * KiB, 8 * KiB, Way.DIRECT),
        (RESTORE, run(128 * KiB, 4096), 16 * KiB, 8 * KiB, Way.DIRECT),
        (RESTORE, scattered(128 * KiB, 512), 128 * KiB, 8 * KiB, Way.STAGED),
        (RESTORE, scattered(128 * KiB, 512), 128 * KiB, 64 * KiB, Way.BATCH),
        (RESTORE, scattered(32 * KiB, 512), 32 * KiB, 8 * KiB, Way.DIRECT),
        (RESTORE, run(128 * KiB, 512), 128 * KiB, 64 * KiB, Way.BATCH),
        (SAVE, run(128 * KiB, 512), 128 * KiB, 64 * KiB, Way.BATCH),
        (SAVE, scattered(64 * KiB, 512), 64 * KiB, 32 * KiB, Way.DIRECT),
        (SAVE, scattered(MiB, 33), MiB, 32 * KiB, Way.STAGED),
        (SAVE, scattered(32 * KiB, 512), 32 * KiB, 32 * KiB, Way.DIRECT),
        (SAVE, scattered(2 * MiB, 32), MiB, MiB, Way.BATCH),
        (RESTORE, run(8 * KiB, 128), 8 * KiB, 8 * KiB, Way.BATCH),
        (RESTORE, run(8 * KiB, 129), 8 * KiB, 8 * KiB, Way.DIRECT),
        (SAVE, scattered(16 * KiB, 128), 16 * KiB, 8 * KiB, Way.BATCH),
        (SAVE, scattered(16 * KiB, 129), 16 * KiB, 8 * KiB, Way.DIRECT),
    ],
)
def test_planner_chooses_a_way_by_sizes(thresholds, slices, slice_bytes, page_bytes, way):
    copy = a_copy(slices, slice_bytes // page_bytes, page_bytes)
    assert the_way(copy, thresholds)[0] is way


def test_run_staged_is_one_copy_a_piece():
    _, plan = the_way(a_copy(run(8 * KiB, 8192), 1, 8 * KiB), RESTORE)
    assert [columns_of(piece.extents).widths.tolist() for piece in plan.pieces()] == [
        [16 * MiB]
    ] * 4


def test_strided_run_is_2d_and_cut_at_border():
    slices = run(256 * KiB, 512) + 4096
    early = replace(RESTORE, strided=32 * KiB)
    border = int(slices[100]) + 8192
    _, plan = the_way(a_copy(slices, 4, 8 * KiB), early, borders=[border])
    (piece,) = plan.pieces()
    assert piece.extents.host_addrs.tolist() == [slices[0], slices[100], border, slices[101]]
    begins = [0, 100 * 32 * KiB, 100 * 32 * KiB + 8192, 101 * 32 * KiB]
    assert piece.extents.offsets.tolist() == begins
    assert piece.extents.rows.tolist() == [100, 1, 1, 411]
    assert piece.extents.widths.tolist() == [32 * KiB, 8192, 24 * KiB, 32 * KiB]


def test_few_large_slices_apart_are_a_copy_each():
    _, plan = the_way(a_copy(run(MiB, 3), 100, 7 * KiB), RESTORE)
    (piece,) = plan.pieces()
    assert columns_of(piece.extents).rows.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("slices", "is_helped"), [(run(256 * KiB, 4096), True), (scattered(32 * KiB, 4096), False)]
)
def test_long_strided_saves_by_the_kernel_have_copies_beside_them(slices, is_helped):
    pieces = list(make_plan(a_copy(slices, 4, 8 * KiB), the_limits(), SAVE).pieces())
    assert pieces[0].way is Way.DIRECT
    assert {piece.way for piece in pieces[1:]} == {Way.DIRECT, *([Way.STAGED] * is_helped)}
    helped = sum(piece.num_pages for piece in pieces if piece.way is Way.STAGED)
    total = sum(piece.num_pages for piece in pieces)
    assert 0.15 < helped / total < 0.35 if is_helped else helped == 0


def test_staged_beside_direct_fits_its_buffer():
    copy = a_copy(run(128 * KiB, 8192), 2, 8 * KiB)
    mixed = replace(RESTORE, beside_strided=KiB, beside=0.5)
    pieces = list(make_plan(copy, the_limits(), mixed).pieces())
    sizes = [(piece.way, piece.num_pages * 8 * KiB // MiB) for piece in pieces]
    assert sizes == [
        (Way.DIRECT, 8), (Way.STAGED, 16), (Way.DIRECT, 32), (Way.STAGED, 16),
        (Way.DIRECT, 32), (Way.STAGED, 16), (Way.DIRECT, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("num_slices", [1, 512])
def test_without_batch_scattered_is_direct(num_slices):
    copy = a_copy(scattered(128 * KiB, num_slices), 1, 128 * KiB)
    assert the_way(copy, RESTORE, has_batch=False)[0] is Way.DIRECT


def test_page_over_staging_has_no_copies_beside_its_kernel():
    copy = a_copy(run(8 * MiB, 8), 1, 2 * MiB)
    mixed = Thresholds(NEVER, MiB, NEVER, NEVER, beside_strided=KiB)
    for staging_bytes, ways in ((2 * MiB, {Way.DIRECT, Way.STAGED}), (MiB, {Way.DIRECT})):
        plan = make_plan(copy, the_limits((), staging_bytes, 2 * MiB), mixed)
        assert {piece.way for piece in plan.pieces()} == ways


def test_few_pages_go_by_the_copy_engine_in_one_piece():
    few = Thresholds(0, 0, NEVER, NEVER, few_pages=512)
    copies = (a_copy(scattered(8 * KiB, num), 1, 8 * KiB) for num in (512, 513))
    plans = [make_plan(copy, the_limits(), few) for copy in copies]
    ways = [[piece.way for piece in plan.pieces()] for plan in plans]
    assert ways == [[Way.BATCH], [Way.DIRECT]]


def test_page_over_staging_is_never_staged():
    copy = a_copy(run(4 * MiB, 4), 1, 4 * MiB)
    forced = Thresholds(0, 0, NEVER, NEVER, force=Way.STAGED)
    assert the_way(copy, forced, staging_bytes=MiB)[0] is Way.DIRECT


@pytest.mark.parametrize(
    "copy",
    [
        SliceCopy(np.zeros(2, np.int64), np.zeros((3, 1), np.int64), 8),
        SliceCopy(np.zeros(2, np.int64), np.zeros((2, 1), np.int64), 0),
        SliceCopy(np.zeros(2, np.int64), np.zeros(2, np.int64), 8),
        SliceCopy(np.zeros(2, np.uint64), np.zeros((2, 1), np.int64), 8),
    ],
)
def test_plan_wrong_tables_raise(copy):
    with pytest.raises(TransferError):
        make_plan(copy, the_limits(), RESTORE)


def test_plan_of_nothing_has_no_pieces():
    assert not list(make_plan(a_copy([], 3, 8), the_limits(), RESTORE).pieces())

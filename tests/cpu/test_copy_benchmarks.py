"""The rows of benchmarks.scatter and benchmarks.gather, from made-up speeds."""

import numpy as np
import pytest

from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.plan import RESTORE, SAVE, Limits, Way, make_plan
from adp_kv.units import GiB, MiB
from benchmarks import _copies, gather, scatter
from benchmarks._results import Results


class MadeUp:
    """Plans every case as the mover would, and answers with a speed by way and size."""

    def __init__(self, thresholds):
        self.thresholds = thresholds
        self.ways = {}

    def link(self):
        return 50.0

    def measure(self, case, way):
        if way == _copies.PLANNER:
            self.plan(case)
        speed = {"planner": 47.5, "batch": 20.0}.get(way, 10.0)
        return _copies.Speed(speed, speed / 50)

    def plan(self, case):
        slices, pages = _copies.table(case, 2 * GiB, 6 * GiB, 256 * MiB)
        assert np.unique(pages).size == pages.size
        assert slices.max() + case.slice_bytes <= 2 * GiB
        limits = Limits(np.array([GiB]), 16 * MiB, 32 * MiB, 1 << 15, has_batch=True)
        plan = make_plan(SliceCopy(slices, pages, case.page_bytes), limits, self.thresholds)
        self.ways[case.name] = next(plan.pieces()).way


@pytest.mark.parametrize("quick", [False, True])
def test_scatter_rows_hold_shares_and_targets(quick):
    bench, results = MadeUp(RESTORE), Results("scatter")
    _copies.run(bench, results, _copies.all_cases(quick=quick), scatter.TARGETS)
    rows = {row.metric: row for row in results.rows}
    for kind, target in (("contiguous", 0.95), ("strided", 0.90), ("random", 0.92)):
        row = rows[f"scatter.{kind}.share.min"]
        assert (row.value, row.target, row.baseline) == (0.95, target, 0.4)
    assert rows["scatter.strided.16KiB-of-128KiB.direct"].value == 10.0
    assert bench.ways["contiguous.8KiB"] is Way.STAGED
    assert bench.ways["strided.16KiB-of-128KiB"] is Way.DIRECT
    assert bench.ways["random.72KiB"] is Way.BATCH


def test_gather_rows_hold_one_target():
    bench, results = MadeUp(SAVE), Results("gather")
    _copies.run(bench, results, _copies.all_cases(quick=True), gather.TARGETS)
    targets = {row.metric: row.target for row in results.rows if row.target}
    assert targets == {"gather.share.min": 0.94}


def test_shared_ring_is_stamped_and_nameless():
    ring = _copies.shared_ring(1 * MiB)
    assert ring.view(np.int64)[512 * 5] == 5

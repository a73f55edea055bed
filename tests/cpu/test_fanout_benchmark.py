"""The rows of benchmarks.fanout from made-up times, and its ranks as processes."""

import os

import pytest

from adp_kv.units import GiB, MiB
from benchmarks import fanout
from benchmarks._ranks import Ranks
from benchmarks._results import Results


class MadeUp:
    """A link of 50 GB/s; rank 0 alone is as fast as all, fan-out 1.9 times."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.asked = []

    def link(self):
        return 50.0

    def all_gather(self):
        return 400.0

    def seconds(self, ways, page_kib, layer_bytes, num_layers):
        self.asked += [(way, page_kib, layer_bytes, num_layers) for way in ways]
        slice_bytes = page_kib * 1024 * (16 if page_kib == 18 else 4)
        total = layer_bytes // slice_bytes * slice_bytes * num_layers or layer_bytes
        speeds = {"readall": 50.0, "rank0": 45.0, "fanout": 95.0, "choice": 47.5}
        slow = [1.0, 3.0, 1.0]  # a disturbed turn is disturbed for all ways
        return [[turn * total / speeds[way] / 1e9 for turn in slow] for way in ways]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_rows_hold_shares_targets_and_baselines(num_ranks):
    results = Results("fanout")
    fanout.run(MadeUp(num_ranks), results)
    rows = {row.metric: row for row in results.rows}
    whole = rows[f"fanout.{num_ranks}gpu.1GiB.share.min"]
    layers = rows[f"fanout.{num_ranks}gpu.layers15MiB.share"]
    small = rows[f"fanout.{num_ranks}gpu.smallest.over_readall"]
    assert whole.value == pytest.approx(1.9)
    assert whole.baseline == pytest.approx(1.0)
    assert layers.value == pytest.approx(1.9)
    assert small.value == pytest.approx(50 / 47.5)
    targets = [whole.target, layers.target, small.target]
    assert targets == ([1.9, 1.8, 1.05] if num_ranks == 2 else [None] * 3)
    assert rows[f"fanout.{num_ranks}gpu.limit.share"].value == min(num_ranks, 8)


def test_all_sizes_are_asked_for():
    bench = MadeUp(2)
    fanout.run(bench, Results("fanout"))
    for way in ("readall", "rank0", "fanout"):
        for kib in (18, 41, 72):
            assert (way, kib, GiB, 1) in bench.asked
        assert (way, 72, 15 * MiB, 61) in bench.asked
    assert ("choice", 72, 72 * 1024, 1) in bench.asked


class Echo:
    """A rank that needs no device."""

    def __init__(self, rank, num_ranks, everyone, fail):
        self.everyone, self.rank, self.fail = everyone, rank, fail

    def meet(self, word):
        return self.everyone(f"{word} {self.rank}".encode())

    def work(self):
        if self.fail == self.rank:
            raise ValueError("no device here")
        return os.getpid()

    def close(self):
        pass


def test_ranks_are_processes_that_meet():
    ranks = Ranks(Echo, 3, None)
    try:
        assert ranks.call("meet", "hello") == [[b"hello 0", b"hello 1", b"hello 2"]] * 3
        assert len(set(ranks.call("work"))) == 3
    finally:
        ranks.close()


def test_error_of_a_rank_reaches_the_parent():
    ranks = Ranks(Echo, 2, 1)
    try:
        with pytest.raises(RuntimeError, match="no device here"):
            ranks.call("work")
    finally:
        ranks.close()

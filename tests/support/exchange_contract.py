"""What every exchange must do: one suite for NCCL and for the group in one process.

A group() has `num_ranks` and each(name, *args), which calls a Member's method on every rank.
"""

import time

import numpy as np
import pytest

from adp_kv.fanout.exchange import ExchangeError

ABORT_LIMIT_S = 20.0


class Member:
    """One rank of a group under test; a subclass knows the device."""

    def __init__(self, exchange):
        self.exchange = exchange
        self.queued = []

    def region(self, call, rank, region_bytes):
        return np.random.default_rng([call, rank]).integers(0, 256, region_bytes, dtype=np.uint8)

    def queue(self, sizes):
        """Queue an exchange of each size, one behind the other."""
        rank, num = self.exchange.rank, self.exchange.num_ranks
        for size in sizes:
            memory = self.allocate(size * num)
            self.write(memory, rank * size, self.region(len(self.queued), rank, size))
            self.exchange.all_gather(self.address(memory), size, self.stream())
            self.queued.append((memory, size))

    def check(self):
        """Return for each exchange whether every region is its rank's."""
        assert self.wait(ABORT_LIMIT_S), "the exchanges did not end"
        same = []
        for call, (memory, size) in enumerate(self.queued):
            regions = [self.region(call, rank, size) for rank in range(self.exchange.num_ranks)]
            same.append(bool(np.array_equal(self.read(memory), np.concatenate(regions))))
        return same

    def lone(self):
        """Let rank 0 alone make a call; return whether it ended before and after abort()."""
        if self.exchange.rank:
            return None
        memory = self.allocate(4096 * self.exchange.num_ranks)
        self.exchange.all_gather(self.address(memory), 4096, self.stream())
        before = self.wait(0.5)
        began = time.monotonic()
        self.exchange.abort()
        self.exchange.abort()
        return before, self.wait(ABORT_LIMIT_S), time.monotonic() - began

    def after_abort(self):
        """Return the error of a call after abort()."""
        self.exchange.abort()
        try:
            self.exchange.all_gather(self.address(self.allocate(4096)), 256, self.stream())
        except ExchangeError as error:
            return str(error)
        return None

    def close(self):
        self.exchange.abort()


class ExchangeContract:
    """Inherited by a test class with a fixture `group`."""

    @pytest.mark.parametrize(
        "sizes", [[256], [4096, 256, 1 << 20], [33 * 256] * 12], ids=["one", "sizes", "many"]
    )
    def test_regions_of_all_ranks_arrive_in_order(self, group, sizes):
        group.each("queue", sizes)
        assert group.each("check") == [[True] * len(sizes)] * group.num_ranks

    def test_rank_alone_ends_with_abort(self, group):
        group.each("queue", [256])  # the first exchange connects the ranks, and waits for them
        group.each("check")
        before, after, seconds = group.each("lone")[0]
        assert not before, "an exchange ended that no other rank took part in"
        assert after
        assert seconds < ABORT_LIMIT_S

    def test_call_after_abort_raises(self, group):
        assert all(error and "abort" in error for error in group.each("after_abort"))

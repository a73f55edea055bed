"""What ranks say of their part in an exchange."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from adp_kv.fanout.flags import Flags, flags_bytes, open_memory, shared_memory

AHEAD = 3


def group(num_ranks):
    words = np.zeros(flags_bytes(AHEAD, num_ranks) // 8, np.int64)
    return [Flags(words, rank, num_ranks) for rank in range(num_ranks)]


def test_exchange_is_good_once_all_bring_their_share():
    ranks = group(3)
    for rank in ranks[:2]:
        rank.say(0, (7, 8), brings=True)
    assert ranks[0].problem(0, (7, 8))[0] == 2
    ranks[2].say(0, (7, 8), brings=True)
    assert [rank.problem(0, (7, 8)) for rank in ranks] == [None] * 3


def test_rank_without_a_share_is_named():
    ranks = group(3)
    for number, rank in enumerate(ranks):
        rank.say(5, (7, 8), brings=number != 1)
    assert all(rank.problem(5, (7, 8)) == (1, "could not copy its share") for rank in ranks)


@pytest.mark.parametrize(("number", "label"), [(5 + 4 * AHEAD, (7, 8)), (5, (6, 8)), (5, (7, 9))])
def test_rank_in_another_exchange_is_named(number, label):
    ranks = group(2)
    ranks[0].say(5, (7, 8), brings=True)
    ranks[1].say(number, label, brings=True)
    rank, why = ranks[0].problem(5, (7, 8))
    assert rank == 1
    assert "not used" in why


def test_what_is_unread_outlives_the_furthest_that_a_rank_can_be_ahead():
    """The other has read all but its last max_ahead of what this one has seen queued."""
    ranks = group(2)
    for number in range(2 * AHEAD + 1):
        for rank in ranks:
            rank.say(number, (number, 0), brings=True)
    assert all(ranks[1].problem(n, (n, 0)) is None for n in range(2 * AHEAD + 1))


def test_memory_is_there_before_a_rank_writes_to_it():
    """A ring may have filled /dev/shm by then: to find no page would end the engine."""
    num_bytes = flags_bytes(48, 8)
    with shared_memory(num_bytes) as path:
        assert Path(path).stat().st_blocks * 512 >= num_bytes


def _write(path, num_bytes):
    open_memory(path, num_bytes)[3] = 42


def test_other_process_maps_the_same_memory():
    num_bytes = flags_bytes(AHEAD, 2)
    with shared_memory(num_bytes) as path:
        words = open_memory(path, num_bytes)
        child = multiprocessing.get_context("spawn").Process(target=_write, args=(path, num_bytes))
        child.start()
        child.join(20)
        assert child.exitcode == 0
    assert words[3] == 42
    with pytest.raises(FileNotFoundError):
        open_memory(path, num_bytes)

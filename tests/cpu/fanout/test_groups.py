"""Groups of ranks by who reaches whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_kv.errors import TransferError
from adp_kv.fanout.groups import describe, partition


def matrix(num, reaches):
    return [[a == b or reaches(a, b) for b in range(num)] for a in range(num)]


MATRICES = st.integers(1, 16).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(MATRICES)
def test_groups_hold_every_rank_once_and_reach_each_other(rows):
    groups = partition(rows)
    assert sorted(rank for group in groups for rank in group) == list(range(len(rows)))
    for group in groups:
        assert list(group) == sorted(group)
        assert all(rows[a][b] for a in group for b in group if a != b)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(MATRICES)
def test_ranks_left_alone_reach_no_whole_group(rows):
    groups = partition(rows)
    for (rank,) in [group for group in groups if len(group) == 1]:
        before = [group for group in groups if group[0] < rank]
        for group in before:
            earlier = [other for other in group if other < rank]
            assert not all(rows[rank][o] and rows[o][rank] for o in earlier)


@pytest.mark.parametrize("num", range(1, 17))
def test_full_reach_is_one_group(num):
    assert partition(matrix(num, lambda a, b: True)) == (tuple(range(num)),)


@pytest.mark.parametrize(
    ("reaches", "expected"),
    [
        (lambda a, b: a // 4 == b // 4, "0-3 | 4-7"),
        (lambda a, b: a // 2 == b // 2, "0-1 | 2-3 | 4-5 | 6-7"),
        (lambda a, b: a % 2 == b % 2, "0,2,4,6 | 1,3,5,7"),
        (lambda a, b: False, "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7"),
        (lambda a, b: 3 not in {a, b}, "0,1,2,4,5,6,7 | 3"),
        (lambda a, b: a < b, "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7"),
    ],
    ids=["two boards", "bridges", "two hosts", "no links", "one without", "one direction only"],
)
def test_eight_ranks_form_groups_by_links(reaches, expected):
    assert describe(partition(matrix(8, reaches))) == expected


def test_ragged_matrix_is_refused():
    with pytest.raises(TransferError, match="every rank"):
        partition([[True, True], [True]])

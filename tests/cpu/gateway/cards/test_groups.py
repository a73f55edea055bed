"""The order in which groups go, without a card: gateway.cards.groups."""

import numpy as np
import pytest

from gateway.cards.group_facts import NO_GROUP, Rules
from gateway.cards.group_queue import Ghosts, RowQueue
from gateway.cards.groups import GroupTable
from tests.support.clock import FakeClock

TOTAL = 1000


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make(clock):
    def made(**rules):
        defaults = {"num_slots": TOTAL, "grace_s": 0.0, "open_s": 60.0}
        return GroupTable(Rules(**(defaults | rules)), clock, clock)

    return made


def names(*numbers):
    return np.array(numbers, dtype=np.uint64)


def add(table, *groups, values=1, namespace=0, commit=True):
    """Write `values` of each group and its marker; return the rows."""
    for group in groups:
        rows = table.enter(names(*[group] * values), namespace)
        table.count_slots(rows, 1)
        if commit:
            mark(table, group)
    return table.rows_of(names(*groups))


def mark(table, group, key=None, database=0):
    key = np.array([key or (group, 1)], dtype=np.uint64)
    rows = table.enter(names(group), 0)
    return table.commit(rows, np.array([database], np.uint16), key)


def evict(table, slots, namespace=None):
    """Choose, and let the values go; return the groups in their order."""
    victims = table.choose(slots, namespace).victims
    groups = table._facts["group"][victims].tolist()
    table.count_slots(np.repeat(victims, table._slots[victims]), -1)
    assert table.forget(victims).size == 0
    return groups


def use(table, *groups):
    return table.use(table.rows_of(names(*groups))).tolist()


def test_oldest_unused_groups_go_first(make):
    table = make()
    add(table, *range(1, 21))
    assert evict(table, 3) == [1, 2, 3]
    assert evict(table, 2) == [4, 5]
    assert len(table) == 15


def test_groups_go_whole_until_slots_suffice(make):
    table = make()
    add(table, 1, 2, 3, values=4)
    assert evict(table, 5) == [1, 2]
    assert evict(table, 100) == [3]


def test_used_group_gets_another_round_in_main(make):
    table = make()
    add(table, *range(1, 21))
    assert use(table, 1, 3) == [True, True]
    assert evict(table, 2) == [2, 4]
    assert evict(table, 16) == list(range(5, 21))
    assert evict(table, 5) == [1, 3]


def test_main_goes_where_small_is_small(make):
    table = make()
    add(table, *range(1, 21))
    use(table, *range(1, 20))
    evict(table, 1)  # 19 are promoted, 20 goes
    add(table, 30)  # one of twenty: less than a tenth
    assert evict(table, 2) == [1, 2]
    use(table, 3)
    assert evict(table, 2) == [4, 5]
    add(table, 31, 32, 33)  # small is crowded again
    assert evict(table, 1) == [30]


def test_group_evicted_lately_returns_to_main(make):
    table = make()
    add(table, *range(1, 11))
    assert evict(table, 1) == [1]
    add(table, 1)
    assert evict(table, 9) == list(range(2, 11))
    assert evict(table, 1) == [1]


def test_grace_passes_a_group_over_and_keeps_its_place(make, clock):
    table = make(grace_s=10.0)
    add(table, 1, 2, 3, 4)
    use(table, 1)
    table.hold(table.rows_of(names(2)))
    assert evict(table, 2) == [3, 4]
    assert evict(table, 2) == []
    clock.advance(11)
    add(table, 5)
    assert evict(table, 2) == [2, 5]
    assert evict(table, 1) == [1]


def test_chosen_group_is_not_offered(make):
    table = make()
    rows = add(table, 1, 2)
    assert table.use(rows).tolist() == [True, True]
    victims = table.choose(1).victims
    assert table.use(rows).tolist() == [r not in victims for r in rows]


def test_group_written_while_it_goes_is_another(make):
    table = make()
    (row,) = add(table, 1)
    assert table.choose(1).victims.tolist() == [row]
    (again,) = add(table, 1)
    assert again != row
    table.count_slots(np.array([row]), -1)
    table.forget(np.array([row]))
    assert use(table, 1) == [True]


def test_group_without_marker_is_kept_for_a_time(make, clock):
    table = make(open_s=60.0)
    add(table, 1, 2, commit=False)
    assert evict(table, 5) == []
    clock.advance(59)
    add(table, 2, commit=False)  # another value
    clock.advance(2)
    assert table.abandoned().tolist() == table_rows(table, 1)
    assert use(table, 2) == [False]


def table_rows(table, group):
    return np.flatnonzero(table._facts["group"] == group).tolist()


def test_group_that_lost_a_value_is_not_offered(make):
    table = make()
    rows = add(table, 1, 2)
    table.uncommit(rows[:1])
    assert use(table, 1, 2) == [False, True]
    assert evict(table, 5) == [2]
    mark(table, 1)
    assert use(table, 1) == [True]


def test_expired_group_is_neither_offered_nor_kept(make, clock):
    table = make(ttl_s=100.0)
    add(table, 1)
    clock.advance(60)
    add(table, 2)
    assert use(table, 1, 2) == [True, True]
    clock.advance(41)
    assert use(table, 1, 2) == [False, True]
    assert table.expired().tolist() == table_rows(table, 1)


def test_expired_group_in_a_read_stays(make, clock):
    table = make(ttl_s=100.0, grace_s=10.0)
    (row,) = add(table, 1)
    clock.advance(95)
    table.hold(np.array([row]))
    clock.advance(6)
    assert table.expired().size == 0
    clock.advance(6)
    assert table.expired().tolist() == [row]


def test_quota_counts_a_namespace_alone(make):
    table = make(quota_slots=10)
    add(table, *range(1, 9), namespace=7)
    add(table, *range(11, 19), namespace=8)
    assert table.over_quota(0.75) == [7, 8]
    assert table.over_quota(0.85) == []
    assert evict(table, 3, namespace=8) == [11, 12, 13]
    assert table.used_slots(7) == 8
    assert table.used_slots(8) == 5
    assert evict(table, 2) == [1, 2]


def test_quota_grants_what_is_left_of_it(make):
    table = make(quota_slots=10)
    add(table, *range(1, 7), namespace=7)
    assert table.reserve(7, 3) == 3
    assert table.reserve(7, 3) == 1
    assert table.reserve(7, 3) == 0
    assert table.reserve(8, 99) == 10
    table.release(7, 3)
    assert table.reserve(7, 9) == 3


def test_two_markers_of_one_group_are_both_known(make):
    table = make()
    (row,) = add(table, 1)
    mark(table, 1, key=(9, 9), database=3)
    owners, facts = table.markers(np.array([row]))
    assert owners.tolist() == [row, row]
    found = {(int(f["database"]), *f["key"].tolist()) for f in facts}
    assert found == {(0, 1, 1), (3, 9, 9)}


def test_restored_table_has_the_same_order(make):
    table = make()
    add(table, *range(1, 41))
    use(table, *range(1, 30, 3))
    evict(table, 12)
    add(table, 50, 51)
    rows = np.flatnonzero(np.isin(table._stage, (2, 3)))
    commits = table._facts[rows]
    commits = commits[np.random.default_rng(1).permutation(len(commits))]
    again = make()
    found = again.restore(commits)
    again.count_slots(found, 1)
    assert again._facts["group"][found].tolist() == commits["group"].tolist()
    table._used[:] = False  # what a restart forgets
    for n in (5, 9, 100):
        assert evict(again, n) == evict(table, n)
    add(again, 60)
    assert evict(again, 1) == [60]


def test_no_group_has_no_row(make):
    table = make()
    assert table.enter(names(0, 5, 0), 0).tolist() == [NO_GROUP, 0, NO_GROUP]
    table.count_slots(np.array([NO_GROUP]), 1)
    assert len(table) == 1


def test_many_groups_come_and_go(make):
    """Against a plain count: no slot of the table is lost or counted twice."""
    table, rng, held = make(), np.random.default_rng(3), {}
    for round_ in range(300):
        for group in rng.integers(1, 400, 5).tolist():
            if group not in held:
                values = int(rng.integers(1, 6))
                add(table, group, values=values)
                held[group] = values
        use(table, *[g for g in rng.integers(1, 400, 5).tolist() if g in held])
        if round_ % 3 == 0:
            gone = evict(table, int(rng.integers(1, 20)))
            for group in gone:
                del held[group]
    assert len(table) == len(held)
    assert int(table._stage_slots[2:4].sum()) == sum(held.values())
    assert int(table._slots.sum()) == sum(held.values())
    assert sorted(evict(table, 10**6)) == sorted(held)
    assert table._free.size == len(table._facts)
    assert np.unique(table._free).size == len(table._facts)


def test_queue_puts_back_in_front_after_growing():
    queue = RowQueue()
    queue.push(np.arange(1000), np.arange(1000))
    taken = queue.take(900)
    queue.push(np.arange(5000), np.arange(5000))
    queue.put_back(taken[::2])
    assert queue.take(450)[:, 0].tolist() == list(range(0, 900, 2))
    assert queue.take(3)[:, 0].tolist() == [900, 901, 902]


def test_ghosts_are_forgotten_when_found():
    ghosts = Ghosts()
    ghosts.add(names(5, 6))
    assert ghosts.take(names(5, 7)).tolist() == [True, False]
    assert ghosts.take(names(5, 6)).tolist() == [False, True]
    ghosts.add(names(*range(2000, 4000)))
    assert ghosts.take(names(2000)).tolist() == [False]
    assert ghosts.take(names(3999)).tolist() == [True]


def test_queues_do_not_grow_with_groups_that_expired(make, clock):
    """A card with a lifetime and much room never chooses, and so never takes from a queue."""
    table = make(ttl_s=10.0)
    add(table, 1, 2, 3)
    for number in range(100, 4000, 20):
        rows = add(table, *range(number, number + 20))
        assert evict_expired(table, clock) >= rows.size
        add(table, 1, 2, 3)  # stored anew: another place each time
    assert sum(len(queue) for queue in table._queues.values()) <= 2 * (1024 + 2 * 23)
    assert sorted(evict(table, 3)) == [1, 2, 3]


def evict_expired(table, clock):
    """Let everything expire and go; return how much did."""
    clock.advance(11)
    rows = table.expired()
    table.count_slots(np.repeat(rows, table._slots[rows]), -1)
    assert table.forget(rows).size == 0
    return rows.size

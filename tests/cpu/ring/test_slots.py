"""The slot allocator against a set."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adp_kv.ring.slots import SlotAllocator

NUM_SLOTS = 24


class SlotMachine(RuleBasedStateMachine):
    """Allocates and frees in every order; a set is right."""

    def __init__(self):
        super().__init__()
        self.slots = SlotAllocator(NUM_SLOTS)
        self.free = set(range(NUM_SLOTS))
        self.held = []

    def longest_run(self):
        runs, length = [0], 0
        for slot in range(NUM_SLOTS):
            length = length + 1 if slot in self.free else 0
            runs.append(length)
        return max(runs)

    @rule(count=st.integers(-1, NUM_SLOTS + 2))
    def allocate(self, count):
        fits_whole = 0 < count <= self.longest_run()
        taken = self.slots.try_allocate(count)
        if not 0 < count <= len(self.free):
            assert taken is None
            return
        assert taken.dtype == np.uint32
        numbers = taken.tolist()
        assert len(set(numbers)) == count == len(numbers)
        assert set(numbers) <= self.free
        if fits_whole:
            assert numbers == list(range(numbers[0], numbers[0] + count))
        self.free -= set(numbers)
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        taken = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        order = data.draw(st.permutations(range(len(taken))))
        kept = data.draw(st.integers(0, len(taken) - 1))
        freed, rest = taken[list(order)][kept:], taken[list(order)][:kept]
        self.slots.free(freed)
        self.free |= set(freed.tolist())
        if len(rest):
            self.held.append(rest)

    @rule(data=st.data())
    def free_wrongly(self, data):
        held = {s for taken in self.held for s in taken.tolist()}
        wrong = data.draw(st.lists(st.integers(0, NUM_SLOTS + 3), min_size=1, max_size=6))
        if set(wrong) <= held and len(set(wrong)) == len(wrong):
            return
        before = list(self.slots._extents)
        with pytest.raises(ValueError, match="slot"):
            self.slots.free(np.array(wrong, dtype=np.uint32))
        assert self.slots._extents == before

    @invariant()
    def adds_up(self):
        self.slots.check_integrity()
        assert self.slots.num_free == len(self.free)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def array(*slots):
    return np.array(slots, dtype=np.uint32)


def test_smallest_run_that_fits_is_taken():
    slots = SlotAllocator(20)
    slots.try_allocate(20)
    slots.free(np.arange(0, 6, dtype=np.uint32))
    slots.free(np.arange(8, 11, dtype=np.uint32))
    slots.free(np.arange(13, 20, dtype=np.uint32))
    assert slots.try_allocate(3).tolist() == [8, 9, 10]
    assert slots.try_allocate(5).tolist() == [0, 1, 2, 3, 4]


def test_longest_runs_serve_what_fits_nowhere():
    slots = SlotAllocator(12)
    slots.try_allocate(12)
    slots.free(array(0, 1, 4, 6, 7, 8))
    assert slots.try_allocate(5).tolist() == [6, 7, 8, 0, 1]
    slots.check_integrity()


def test_free_twice_raises_and_changes_nothing():
    slots = SlotAllocator(8)
    taken = slots.try_allocate(4)
    slots.free(taken[:2])
    for wrong in (taken[:2], taken[1:3], array(2, 2), array(3, 8), array(7)):
        with pytest.raises(ValueError, match="slot"):
            slots.free(wrong)
        slots.check_integrity()
        assert slots.num_free == 6
    slots.free(taken[2:])
    assert slots.try_allocate(8).tolist() == list(range(8))


def test_nothing_to_free_or_give():
    slots = SlotAllocator(0)
    assert slots.try_allocate(1) is None
    slots.free(array())
    slots.check_integrity()


def test_broken_bookkeeping_is_found():
    slots = SlotAllocator(8)
    slots.num_free = 7
    with pytest.raises(AssertionError, match="counted free"):
        slots.check_integrity()
    slots._extents = [(4, 2), (5, 3)]
    with pytest.raises(AssertionError, match="bad extent"):
        slots.check_integrity()

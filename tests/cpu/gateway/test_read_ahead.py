"""Reading ahead: taken by the get that comes, bounded, dropped, never in anybody's way."""

import numpy as np
import pytest

from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import Ahead, Forget, Get, Granted, Release
from gateway import requests
from gateway.ahead import DEADLINE_S
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import memory_card
from tests.support.clock import FakeClock
from tests.support.process import wait_until
from tests.support.serving import Serving, get, random_chunks, replicated, store

SLOT = 4096
CHUNKS = random_chunks(6)


class Rig:
    """One rank and the scheduler side of an engine with some chunks stored."""

    def __init__(self, serving, chunks=CHUNKS, num_caches=2):
        self.serving = serving
        self.rank, self.scheduler = serving.join(replicated(num_caches, 1), scheduler=True)
        store([self.rank], chunks)

    def ahead(self, chunks, number=1):
        self.scheduler.send(Ahead(number, pack_keys(chunks), 0))

    def wait(self, name, value):
        wait_until(lambda: self.count(name) == value, 5, f"{name} = {value}: {self.stats()}")

    def count(self, name):
        return self.stats().get(name, 0)

    def stats(self):
        return self.scheduler.stats()

    def free(self):
        return self.serving.server._engine._gets.num_free_slots


@pytest.fixture
def make():
    open_ones = []

    def make(card=None, chunks=CHUNKS, num_caches=2, **settings):
        usual = {"shared_memory_size": 256 * SLOT, "read_ahead_bytes": 64 * SLOT}
        serving = Serving(card, **(usual | settings))
        open_ones.append(serving)
        return Rig(serving, chunks, num_caches)

    yield make
    for serving in open_ones:
        serving.stop()


def test_get_takes_what_was_read_and_reads_nothing_twice(make):
    rig = make()
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 12)
    before = rig.count("card_bytes_read")
    for cache in (0, 1):
        get([rig.rank], 10 + cache, CHUNKS, [cache])  # compares every byte
    assert rig.count("card_bytes_read") == before
    assert rig.count("objects_taken_ahead") == 12
    rig.serving.assert_idle()


def test_get_of_the_rest_after_a_local_hit_takes_its_part(make):
    rig = make()
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 12)
    get([rig.rank], 10, CHUNKS[2:5], [0])
    assert rig.count("objects_taken_ahead") == 3
    rig.scheduler.send(Forget(1))
    rig.serving.assert_idle()


def test_get_of_two_requests_reads_what_is_not_there(make):
    chunks = random_chunks(9, seed=3)
    rig = make(chunks=chunks)
    rig.ahead(chunks[3:6])
    rig.wait("objects_read_ahead", 6)
    outcome = get([rig.rank], 10, chunks, [0])[0]
    assert outcome.batches == [3, 3, 3]
    assert rig.count("objects_taken_ahead") == 3
    rig.scheduler.send(Forget(1))
    rig.serving.assert_idle()


@pytest.mark.parametrize(
    ("order", "taken"),
    [
        ([5, 4, 3, 2, 1, 0], 1),
        ([1, 2, 4, 5], 2),
        ([3, 3, 4], 1),
        ([0, 1, 5], 2),
        ([4, 5, 0, 1], 2),
    ],
)
def test_get_in_another_order_gets_its_own_bytes(make, order, taken):
    rig = make(num_caches=1)
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 6)
    get([rig.rank], 20, CHUNKS[order], [0])
    assert rig.count("objects_taken_ahead") == taken
    rig.scheduler.send(Forget(1))
    rig.serving.assert_idle()


def test_get_that_comes_while_it_is_read_waits_for_that_read(make):
    card = FaultyCard(memory_card())
    rig = make(card, num_caches=1)
    card.faults = [Fault(ops=frozenset({Op.READ}), delay_s=0.3)]
    rig.ahead(CHUNKS)
    rig.wait("ahead_wishes", 1)
    before = rig.count("card_bytes_read")
    get([rig.rank], 10, CHUNKS, [0])
    assert rig.count("card_bytes_read") - before <= len(CHUNKS) * SLOT
    assert rig.count("objects_taken_ahead") == 6
    rig.serving.assert_idle()


def test_layers_come_in_the_order_of_gets_and_within_the_bound(make):
    rig = make(read_ahead_bytes=9 * SLOT, batch_bytes=3 * SLOT)
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 9)
    shelves = rig.serving.server._engine._gets.ahead._shelves
    assert [(s.cache, len(s.slots)) for s in shelves] == [(0, 3), (0, 3), (1, 3)]
    get([rig.rank], 10, CHUNKS, [0])
    get([rig.rank], 11, CHUNKS, [1])
    assert rig.count("objects_taken_ahead") == 9
    rig.serving.assert_idle()


def test_shelves_start_small_and_the_get_goes_on_with_large_batches(make, monkeypatch):
    monkeypatch.setattr(requests, "FIRST_BATCH_BYTES", 2 * SLOT)
    chunks = random_chunks(30, seed=6)
    rig = make(chunks=chunks, read_ahead_bytes=14 * SLOT, batch_bytes=8 * SLOT)
    for number in (1, 2):  # small again after idle time
        rig.ahead(chunks, number)
        rig.wait("objects_read_ahead", 14 * number)
        batches = get([rig.rank], 10 + number, chunks, [0])[0].batches
        assert batches == [2, 4, 8, 8, 8]
        rig.serving.assert_idle()


def test_shelves_give_way_to_a_get_without_slots(make):
    chunks = random_chunks(20, seed=4)
    rig = make(chunks=chunks, shared_memory_size=2 * 16 * SLOT)  # 16 read slots, 8 ahead
    rig.ahead(chunks[:6])
    rig.wait("objects_read_ahead", 8)  # one layer of 6 and a part of the next would be 12
    assert rig.free() == 8
    rig.rank.send(Get(10, [0], pack_keys(chunks[4:20])))
    seen = 0
    while seen < 16:
        message = rig.rank.expect(Granted)
        seen += len(message.slots) // 4
        rig.rank.send(Release(10, message.first, ok=True))
    assert rig.count("objects_unused_ahead") > 0
    rig.scheduler.send(Forget(1))
    rig.serving.assert_idle()


def test_forgotten_wish_gives_its_slots_back(make):
    rig = make()
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 12)
    assert rig.free() == 128 - 12
    rig.scheduler.send(Forget(1))
    rig.wait("objects_unused_ahead", 12)
    rig.serving.assert_idle()


def test_wish_forgotten_while_it_is_read_gives_its_slots_back(make):
    card = FaultyCard(memory_card())
    rig = make(card)
    card.faults = [Fault(ops=frozenset({Op.READ}), delay_s=0.2)]
    rig.ahead(CHUNKS)
    rig.wait("ahead_wishes", 1)
    rig.scheduler.send(Forget(1))
    rig.wait("objects_unused_ahead", 6)
    rig.serving.assert_idle()


def test_wish_nobody_comes_for_is_dropped_after_its_deadline(make):
    clock = FakeClock()
    rig = make(clock=clock, liveness_s=1e6, lease_s=1e6)
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 12)
    clock.advance(DEADLINE_S + 1)
    rig.wait("ahead_expired", 1)
    rig.serving.assert_idle()


def test_get_ends_the_wish_so_that_later_layers_are_read_once(make):
    rig = make(read_ahead_bytes=3 * SLOT, batch_bytes=3 * SLOT)
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 3)
    for cache in (0, 1):
        get([rig.rank], 10 + cache, CHUNKS, [cache])
    rig.serving.assert_idle()
    assert rig.count("objects_read_ahead") == 3


def test_missing_object_fails_the_get_that_takes_it(make):
    card = FaultyCard(memory_card())
    rig = make(card)
    card.faults = [Fault(Status.ABSENT, ops=frozenset({Op.READ}))]
    rig.ahead(CHUNKS)
    rig.wait("objects_read_ahead", 12)
    assert rig.count("commits_withdrawn") == 0
    outcome = get([rig.rank], 10, CHUNKS, [0])[0]
    assert set(outcome.status.values()) == {Status.ABSENT}
    card.faults = []
    assert rig.scheduler.lookup(CHUNKS) == [False] * 6
    rig.scheduler.send(Forget(1))
    rig.serving.assert_idle()


def test_nothing_is_read_ahead_while_a_get_waits_for_slots(make):
    chunks = random_chunks(12, seed=5)
    rig = make(chunks=chunks, shared_memory_size=2 * 8 * SLOT, batch_bytes=4 * SLOT)
    rig.rank.send(Get(10, [0], pack_keys(chunks[:6])))  # 6 of 8 slots, held
    held = [rig.rank.expect(Granted) for _ in range(2)]
    rig.rank.send(Get(11, [0], pack_keys(chunks[:4])))  # needs 4 at once
    rig.wait("gets", 2)
    rig.ahead(chunks[6:8], number=2)  # would fit into the 2 that are free
    rig.wait("ahead_wishes", 1)
    assert rig.count("objects_read_ahead") == 0
    for message in held:
        rig.rank.send(Release(10, message.first, ok=True))
    rig.rank.send(Release(11, rig.rank.expect(Granted).first, ok=True))
    rig.wait("objects_read_ahead", 4)
    rig.scheduler.send(Forget(2))
    rig.serving.assert_idle()


def test_get_that_waits_for_slots_comes_before_the_next_shelf(make, monkeypatch):
    chunks = random_chunks(12, seed=5)
    card = FaultyCard(memory_card())
    rig = make(card, chunks=chunks, shared_memory_size=2 * 8 * SLOT, batch_bytes=4 * SLOT)
    card.faults = [Fault(ops=frozenset({Op.READ}), delay_s=0.3)]
    reads, submit = [], card.submit

    def note(batch):
        if batch.op is Op.READ:
            reads.append(len(batch.keys))
        submit(batch)

    monkeypatch.setattr(card, "submit", note)
    rig.ahead(chunks[6:8], number=2)
    rig.wait("ahead_wishes", 1)
    for seq in (10, 11):  # the second one finds 2 of the 4 slots it needs
        rig.rank.send(Get(seq, [0], pack_keys(chunks[:4])))
    for seq in (10, 11):
        granted = rig.rank.expect(Granted)
        assert granted.seq == seq
        rig.rank.send(Release(seq, granted.first, ok=True))
    rig.wait("objects_read_ahead", 4)
    assert reads == [2, 4, 4, 2]
    rig.scheduler.send(Forget(2))
    rig.serving.assert_idle()


def test_ended_session_reads_nothing_more_ahead(make):
    card = FaultyCard(memory_card())
    rig = make(card, num_caches=3, batch_bytes=2 * SLOT)
    card.faults = [Fault(ops=frozenset({Op.READ}), delay_s=0.2)]
    rig.ahead(CHUNKS)
    rig.wait("ahead_wishes", 1)
    rig.rank.close("done")
    ended = rig.serving.server._engine
    wait_until(lambda: rig.serving.server._engine is not ended, 5, "the session is over")
    assert rig.serving.rank(0).stats()["objects_read_ahead"] == 2


def test_zero_bytes_read_nothing_ahead(make):
    rig = make(read_ahead_bytes=0)
    rig.ahead(CHUNKS)
    get([rig.rank], 10, CHUNKS, [0])
    assert rig.count("objects_read_ahead") == 0


def test_only_the_scheduler_side_may_wish(make):
    rig = make()
    rig.rank.send(Ahead(1, pack_keys(CHUNKS), 0))
    rig.scheduler.send(Ahead(2, b"", 0))
    rig.scheduler.send(Ahead(3, b"cut", 0))
    rig.wait("bad_messages", 3)
    assert rig.count("ahead_wishes") == 0


def test_random_wishes_and_gets_keep_every_byte_and_slot(make):
    rng = np.random.default_rng(6)
    chunks = random_chunks(16, seed=7)
    rig = make(chunks=chunks, shared_memory_size=2 * 24 * SLOT, batch_bytes=4 * SLOT)
    for turn in range(40):
        first, last = sorted(rng.choice(17, 2, replace=False).tolist())
        rig.ahead(chunks[first:last], number=turn)
        if turn % 3:
            low, high = sorted(rng.choice(17, 2, replace=False).tolist())
            get([rig.rank], 100 + turn, chunks[low:high], [int(rng.integers(2))])
        if turn % 2:
            rig.scheduler.send(Forget(turn - 1))
    for turn in range(40):
        rig.scheduler.send(Forget(turn))
    rig.serving.assert_idle()

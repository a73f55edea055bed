"""What was read ahead and is not answered in time: its slots stay the card's."""

import pytest

from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import Ahead, Forget, Get, Granted, Release
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import memory_card
from tests.support.clock import FakeClock
from tests.support.process import wait_until
from tests.support.serving import Serving, get, random_chunks, replicated, store

READS = frozenset({Op.READ})


@pytest.mark.parametrize("how", ["forgotten", "taken", "taken-late"])
def test_late_shelf_keeps_its_slots_until_the_card_answers(how):
    card, clock = FaultyCard(memory_card(max_value_bytes=64 << 10)), FakeClock()
    patient = {"liveness_s": 1e9, "lease_s": 1e9, "job_deadline_s": 290.0}
    chunks = random_chunks(4)
    with Serving(card=card, clock=clock, **patient) as serving:
        rank, scheduler = serving.join(replicated(1, 1), scheduler=True)
        store([rank], chunks)
        gets = serving.server._engine._gets
        card.faults = [Fault(silent=True, ops=READS)]
        scheduler.send(Ahead(1, pack_keys(chunks), 0))
        wait_until(lambda: len(card._silent) == 1, 5, "the card has it")
        if how == "taken":
            rank.send(Get(5, [0], pack_keys(chunks)))
            wait_until(lambda: gets.num_requests == 1, 5, "the get has the shelf")
        if how == "forgotten":
            scheduler.send(Forget(1))
            wait_until(lambda: not gets.ahead._shelves, 5, "it is forgotten")
        card.faults = []
        clock.advance(21 if how != "taken-late" else 20.5)
        if how.startswith("taken"):
            if how == "taken-late":
                wait_until(lambda: serving.server._store.num_late == 1, 5, "it is late")
                rank.send(Get(5, [0], pack_keys(chunks)))
            granted = rank.expect(Granted)
            rank.send(Release(5, granted.first, ok=True))
        wait_until(lambda: gets.num_requests == 0, 5, "nobody waits")
        if how != "taken-late":  # there the shelf may have expired, and the get read for itself
            assert set(granted.status if how == "taken" else [6]) == {Status.UNREACHABLE}
        wait_until(lambda: gets.withheld == 4, 5, "the slots are withheld")
        assert gets.num_free_slots == gets._slots.num_slots - 4
        card.answer_all()
        serving.assert_idle()
        assert gets.withheld == 0
        assert set(get([rank], 9, chunks, [0])[0].status.values()) == {0}
        serving.assert_idle()


def test_get_has_the_slots_of_a_shelf_as_soon_as_it_is_read():
    """Not at the next tick, which this clock never comes to."""
    card, clock = FaultyCard(memory_card(max_value_bytes=64 << 10)), FakeClock()
    ahead, wanted = random_chunks(4), random_chunks(6, seed=3)
    with Serving(card=card, clock=clock, shared_memory_size=16 * 4096) as serving:
        rank, scheduler = serving.join(replicated(1, 1), scheduler=True)
        store([rank], ahead)
        store([rank], wanted, job=2)
        assert serving.server._engine._gets.num_slots == 8
        card.faults = [Fault(silent=True, ops=READS)]
        scheduler.send(Ahead(1, pack_keys(ahead), 0))
        wait_until(lambda: len(card._silent) == 1, 5, "the card has it")
        card.faults = []
        rank.send(Get(5, [0], pack_keys(wanted)))
        first = rank.expect(Granted)
        assert len(first.slots) == 3 * 4
        assert rank.silent(0.3)
        card.answer_all()
        second = rank.expect(Granted)
        assert set(first.status + second.status) == {0}
        rank.send(Release(5, first.first, ok=True))
        rank.send(Release(5, second.first, ok=True))
        scheduler.send(Forget(1))
        serving.assert_idle()


def test_reading_ahead_counts_the_slots_that_are_withheld():
    """Else a card that hangs is given all slots, a shelf after the other."""
    card, clock = FaultyCard(memory_card(max_value_bytes=64 << 10)), FakeClock()
    patient = {"liveness_s": 1e9, "lease_s": 1e9, "job_deadline_s": 290.0}
    with Serving(card=card, clock=clock, shared_memory_size=16 * 4096, **patient) as serving:
        rank, scheduler = serving.join(replicated(1, 1), scheduler=True)
        gets = serving.server._engine._gets
        card.faults = [Fault(silent=True, ops=READS)]
        for number in range(4):
            scheduler.send(Ahead(number, pack_keys(random_chunks(4, seed=number)), 0))
            wait_until(lambda n=number: rank.stats().get("ahead_wishes") == n + 1, 5, "wished")
            clock.advance(21)
            wait_until(lambda n=number: rank.stats().get("ahead_expired") == n + 1, 5, "expired")
        assert gets.withheld == 4
        assert gets.num_free_slots == 4
        rank.send(Get(5, [0], pack_keys(random_chunks(6))))
        first = rank.expect(Granted)
        assert rank.silent(0.3)
        card.faults = []
        card.answer_all()
        second = rank.expect(Granted)  # at once, too
        rank.send(Release(5, first.first, ok=True))
        rank.send(Release(5, second.first, ok=True))
        serving.assert_idle()

"""A card that answers late, never or with errors: gets end, slots stay safe, the rest serves."""

import itertools

import numpy as np
import pytest

from adp_kv.wire.keys import commit_keys, object_keys, pack_keys
from adp_kv.wire.messages import NO_SLOT, Failed, Get, Granted, Release
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.objects import ObjectStore
from gateway.quarantine import Quarantine
from tests.support.cards import memory_card
from tests.support.clock import FakeClock
from tests.support.process import wait_until
from tests.support.serving import (
    Serving,
    get,
    object_bytes,
    put,
    random_chunks,
    replicated,
    sharded,
    store,
)

UNREACHABLE = Status.UNREACHABLE
READS = frozenset({Op.READ})
WRITES = frozenset({Op.WRITE})
PATIENT = {"liveness_s": 1e9, "lease_s": 1e9, "job_deadline_s": 290.0, "card_deadline_s": 20.0}
NUM_DATABASES = 4


@pytest.fixture
def card():
    inner = memory_card(
        capacity_bytes=32 << 20, max_value_bytes=64 << 10, num_databases=NUM_DATABASES
    )
    return FaultyCard(inner)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def serving(card, clock):
    with Serving(card=card, clock=clock, **PATIENT) as serving:
        yield serving
        card.faults = []
        card.answer_all()


def held_back(serving, count=1):
    """Wait until the card keeps `count` batches back."""
    wait_until(lambda: len(serving.card._silent) == count, 5, "the card has it")


def test_get_that_is_not_answered_misses(serving, card, clock):
    chunks = random_chunks(3)
    ranks = serving.join(sharded(2, 2))
    store(ranks, chunks)
    card.faults = [Fault(silent=True, ops=READS)]
    for rank in ranks:
        rank.send(Get(5, [0, 1], pack_keys(chunks)))
    held_back(serving)
    clock.advance(19)
    assert ranks[0].silent(0.3)
    clock.advance(2)
    for rank in ranks:
        granted = rank.expect(Granted)
        assert list(granted.status) == [UNREACHABLE] * 6
        rank.send(Release(5, 0, ok=True))
    gets = serving.server._engine._gets
    wait_until(lambda: gets.num_withheld == 6, 5, "the slots are withheld")
    assert gets.num_requests == 0
    assert gets.num_free_slots == gets._slots.num_slots - 6
    assert all(ranks[0].lookup(chunks))  # what can't be reached is still there
    counters = ranks[0].stats()
    assert counters["card_batches_late"] >= 1
    assert counters["objects_missed"] == 6
    assert "commits_withdrawn" not in counters
    card.faults = []
    card.answer_all()
    serving.assert_idle()
    assert set(get(ranks, 6, chunks, [0, 1])[0].status.values()) == {0}


def test_late_read_never_touches_another_get(serving, card, clock):
    """The late answer fills the slots that it was asked for, long after they were given up."""
    old, new = random_chunks(4), random_chunks(4, seed=9)
    (rank,) = serving.join(replicated(1, 1))
    store([rank], old)
    store([rank], new, job=2)
    card.faults = [Fault(silent=True, ops=READS)]
    rank.send(Get(5, [0], pack_keys(old)))
    held_back(serving)
    clock.advance(21)
    late = rank.expect(Granted)
    rank.send(Release(5, 0, ok=True))
    card.faults = []
    for seq in range(6, 14):  # often enough to come around to every slot
        rank.send(Get(seq, [0], pack_keys(new)))
        granted = rank.expect(Granted)
        assert set(granted.status) == {0}
        assert not set(np.frombuffer(granted.slots, "<u4")) & set(np.frombuffer(late.slots, "<u4"))
        if seq == 9:
            card.answer_all()
            wait_until(lambda: serving.server._store.num_late == 0, 5, "the late read has ended")
        for slot, chunk in zip(np.frombuffer(granted.slots, "<u4"), new, strict=True):
            decl = rank.caches[0]
            found = rank.slice_of(int(slot), decl, write=False)
            assert np.array_equal(found, object_bytes(chunk, decl))
        rank.send(Release(seq, 0, ok=True))
        if seq == 9:
            break
    serving.assert_idle()


def test_late_write_stores_what_it_was_asked_to(serving, card, clock):
    first, second = random_chunks(4), random_chunks(4, seed=9)
    (rank,) = serving.join(replicated(1, 1))
    card.faults = [Fault(silent=True, ops=WRITES)]
    put([rank], 1, first, [0])
    held_back(serving)
    clock.advance(21)
    wait_until(lambda: rank.stats().get("objects_not_written") == 4, 5, "it was given up")
    card.faults = []
    for job in range(2, 10):  # fill every other slot with other bytes
        put([rank], job, second, [0], version=job, seq=(job << 24))
    assert rank.lookup(first) == [False] * 4
    card.answer_all()
    wait_until(lambda: serving.server._store.num_late == 0, 5, "the late write has ended")
    assert set(get([rank], 50, first, [0])[0].status.values()) == {0}
    serving.assert_idle()


def test_slow_card_with_a_queue_is_not_late(card, clock):
    """Batches that wait behind others have their time from when those are done."""
    store_, answers, held = ObjectStore(card, 4096, deadline_s=20.0, clock=clock), [], []
    try:
        card._inner.submit = held.append
        for number in range(3):
            store_.committed(random_chunks(1, seed=number), answers.append)

        def answer():
            card._inner_done(held.pop(0).token, np.zeros(1, np.uint8))
            store_.poll()

        for expected in (1, 2):
            clock.advance(15)
            answer()
            store_.tick()
            assert len(answers) == expected
        clock.advance(19)
        store_.tick()
        assert len(answers) == 2
        clock.advance(2)
        store_.tick()
        assert [int(a[0]) for a in answers] == [0, 0, UNREACHABLE]
        assert store_.num_late == store_.num_inflight == 1
        answer()
        assert store_.num_late == store_.num_inflight == 0
    finally:
        store_.close()


def test_get_without_slots_fails_when_they_are_withheld(card, clock):
    with Serving(card=card, clock=clock, shared_memory_size=8 * 4096, **PATIENT) as serving:
        (rank,) = serving.join(replicated(1, 1))
        card.faults = [Fault(silent=True, ops=READS)]
        chunks = random_chunks(4)
        rank.send(Get(5, [0], pack_keys(chunks)))
        held_back(serving, 2)  # batches of half the slots
        clock.advance(21)
        assert len(rank.expect(Granted).slots) == 2 * 4
        rank.expect(Granted)
        rank.send(Release(5, 0, ok=True))
        rank.send(Release(5, 2, ok=True))
        rank.send(Get(6, [0], pack_keys(chunks)))
        assert rank.silent(0.3)
        clock.advance(21)
        assert "does not answer" in rank.expect(Failed).reason
        card.faults = []
        card.answer_all()
        advance_until(clock, lambda: serving.server._store.num_databases_out == 0)
        serving.assert_idle()
        assert set(get([rank], 7, chunks, [0])[0].status.values()) == {Status.ABSENT}


def test_lookup_that_is_not_answered_finds_nothing(serving, card, clock):
    chunks = random_chunks(2)
    (rank,) = serving.join(replicated(1, 1))
    store([rank], chunks)
    card.faults = [Fault(silent=True, ops={Op.EXIST})]
    for wait in itertools.repeat(1, 40):
        if not card._silent:
            from adp_kv.wire.messages import Lookup

            rank.send(Lookup(1, pack_keys(chunks)))
            held_back(serving)
        clock.advance(wait)
        if not rank.channel.wait(0.02):
            continue
        break
    message = rank.receive()
    assert message.stored == b"\0\0"


def test_next_engine_is_served_while_the_card_hangs(serving, card, clock):
    (rank,) = serving.join(replicated(1, 1))
    store([rank], random_chunks(2))
    card.faults = [Fault(silent=True, ops=READS)]
    rank.send(Get(5, [0], pack_keys(random_chunks(2))))
    held_back(serving)
    clock.advance(21)
    rank.expect(Granted)
    rank.channel.close("the engine ends")
    card.faults = []
    fresh = serving.join(replicated(1, 1), engine="next")
    assert len(serving.server._abandoned) == 1
    assert set(get(fresh, 5, random_chunks(2), [0])[0].status.values()) == {0}
    card.answer_all()  # into a ring that is still mapped
    advance_until(clock, lambda: not serving.server._abandoned)
    assert set(get(fresh, 6, random_chunks(2), [0])[0].status.values()) == {0}
    serving.assert_idle()


def database_of(chunk):
    """Return the database of the one fragment of cache 0 of a chunk."""
    return int(object_keys(chunk[None], [0])[0, 0] % np.uint64(NUM_DATABASES))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(Status.IO_ERROR, databases={1}), id="errors"),
        pytest.param(Fault(silent=True, databases={1}), id="silence"),
        pytest.param(Fault(damage="flip", databases={1}, ops=READS), id="damage-is-no-reason"),
    ],
)
def test_bad_database_misses_and_the_rest_serves(serving, card, clock, fault):
    chunks = random_chunks(24)
    (rank,) = serving.join(replicated(1, 1))
    store([rank], chunks)
    bad = np.array([database_of(chunk) == 1 for chunk in chunks])
    assert 2 <= bad.sum() <= 16
    card.faults = [fault]

    def one_get(seq, some):
        rank.send(Get(seq, [0], pack_keys(some)))
        for _ in range(200):
            if rank.channel.wait(0.02):
                break
            clock.advance(0.5)
        granted = rank.expect(Granted)
        rank.send(Release(seq, granted.first, ok=True))
        return list(granted.status)

    keep = chunks[bad][-1:]  # never asked for while its database is bad
    for seq in range(100, 104):
        one_get(seq, chunks[bad][:1] if fault.damage else chunks[bad][:-1][:1])
    if fault.damage:
        clock.advance(1)
        assert rank.stats()["card_databases_out"] == 0
        return
    advance_until(clock, lambda: serving.server._store.num_databases_out == 1)
    assert one_get(110, keep) == [UNREACHABLE]  # at once, without asking the card
    assert set(one_get(111, chunks[~bad])) == {0}
    unmarked = commit_keys(chunks)[:, 0] % np.uint64(NUM_DATABASES) == 1
    assert rank.lookup(chunks) == (~bad & ~unmarked).tolist()
    card.faults = []
    card.answer_all()
    clock.advance(31)
    advance_until(clock, lambda: serving.server._store.num_databases_out == 0)
    assert rank.lookup(keep) == [True]
    assert one_get(120, keep) == [0]
    serving.assert_idle()


def advance_until(clock, done):
    def step():
        clock.advance(0.5)
        return done()

    wait_until(step, 10, "the gateway has noticed")


def test_one_bad_place_does_not_take_a_database_out(serving, card, clock):
    chunks = random_chunks(12)
    (rank,) = serving.join(replicated(1, 1))
    store([rank], chunks)
    bad = object_keys(chunks[:1], [0])[0]
    card.faults = [Fault(Status.IO_ERROR, ops=READS, when=lambda keys: (keys == bad).all(axis=1))]
    for seq in range(5, 12):
        get([rank], seq, chunks, [0])
        clock.advance(1)
    wait_until(lambda: rank.stats()["card_values"] >= 1, 5, "probes have ended")
    assert rank.stats()["card_databases_out"] == 0


def test_chunk_that_can_not_be_whole_is_not_saved(serving, card, clock):
    """Its values would take the room of chunks that are whole, for uncommitted_s."""
    chunks = random_chunks(24)
    (rank,) = serving.join(replicated(1, 1))
    card.faults = [Fault(Status.IO_ERROR, databases={1})]
    for number in range(3):
        put([rank], number + 1, chunks, [0], seq=(number + 1) << 24)
        serving.assert_idle()
    advance_until(clock, lambda: serving.server._store.num_databases_out == 1)
    values = card.stats()["values"]
    fresh = random_chunks(24, seed=5)
    marked = commit_keys(fresh)[:, 0] % np.uint64(NUM_DATABASES)
    bad = np.array([database_of(chunk) == 1 for chunk in fresh]) | (marked == 1)
    assert 0 < bad.sum() < 24
    slots = put([rank], 9, fresh, [0], seq=9 << 24)[0].slots
    assert [slots[i] == NO_SLOT for i in range(24)] == bad.tolist()
    serving.assert_idle()
    assert card.stats()["values"] == values + 2 * int((~bad).sum())
    assert rank.lookup(fresh) == (~bad).tolist()
    assert rank.stats()["chunks_out_of_reach"] == bad.sum()


def test_quarantine_probes_once_at_a_time():
    quarantine = Quarantine(3, 30.0)
    databases = np.array([0, 1, 2], dtype=np.uint16)
    bad = np.array([0, Status.IO_ERROR, 0], dtype=np.uint8)
    for _ in range(2):
        quarantine.note(databases, bad, 0.0)
    quarantine.note(databases, np.zeros(3, np.uint8), 0.0)  # an answer in between
    for _ in range(2):
        quarantine.note(databases, bad, 0.0)
    assert quarantine.due(0.0) == []
    quarantine.note(databases, bad, 0.0)
    assert quarantine.due(0.0) == [1]
    assert quarantine.due(0.0) == []
    quarantine.probed(1, 0.0, works=False)
    assert quarantine.are_out(databases).tolist() == [False, True, False]
    quarantine.note_late(databases, 1.0)
    assert quarantine.due(1.0) == [0, 2]
    assert quarantine.due(29.0) == []
    assert quarantine.due(30.0) == [1]
    quarantine.probed(1, 30.0, works=True)
    assert quarantine.num_out == 0

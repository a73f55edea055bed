"""Jobs: when a chunk counts as stored, and when it never does."""

import time

import numpy as np
import pytest

from adp_kv.wire.keys import object_keys, pack_keys, whole_keys
from adp_kv.wire.messages import NO_SLOT, Failed, Get, Granted, Put, Release
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import memory_card
from tests.support.clock import FakeClock
from tests.support.process import wait_until
from tests.support.serving import Serving, get, put, random_chunks, replicated, store


def test_half_a_job_is_never_committed():
    chunks = random_chunks(2)
    clock = FakeClock()
    with Serving(clock=clock, job_deadline_s=120, lease_s=1e6, liveness_s=1e6) as serving:
        (rank,) = serving.join(replicated(3, 1))
        put([rank], 1, chunks, [0, 2])
        assert rank.lookup(chunks) == [False, False]
        clock.advance(121)
        wait_until(lambda: rank.stats().get("jobs_expired") == 1, 5, "the job has expired")
        put([rank], 1, chunks, [1])  # too late: a job of its own
        assert rank.lookup(chunks) == [False, False]
        clock.advance(121)
        wait_until(lambda: rank.stats().get("jobs_expired") == 2, 5, "and expired too")
        assert rank.lookup(chunks) == [False, False]
        store([rank], chunks, job=2)
        serving.assert_idle()


def test_puts_of_a_job_may_come_one_by_one():
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(3, 2))
        for cache in (2, 0, 1):
            assert not any(ranks[0].lookup(chunks))
            put(ranks, 1, chunks, [cache])
        wait_until(lambda: all(ranks[0].lookup(chunks)), 5, "committed")
        serving.assert_idle()


def test_stored_chunks_need_no_slot():
    chunks = random_chunks(3)
    with Serving() as serving:
        (rank,) = serving.join(replicated(2, 1))
        store([rank], chunks[:2], job=1)
        slots = put([rank], 2, chunks, [0, 1])[0].slots
        assert [slots[i] == NO_SLOT for i in range(6)] == [True, True, False] * 2
        wait_until(lambda: all(rank.lookup(chunks)), 5, "committed")
        counters = rank.stats()
        assert counters["objects_written"] == 6
        assert counters["chunks_already_stored"] == 2
        assert counters["chunks_committed"] == 3
        serving.assert_idle()


def test_all_stored_job_ends_at_once():
    chunks = random_chunks(3)
    with Serving() as serving:
        ranks = serving.join(replicated(2, 2))
        store(ranks, chunks, job=1)
        assert set(put(ranks, 2, chunks, [0, 1])[0].slots.values()) == {NO_SLOT}
        serving.assert_idle()


def test_refused_fill_is_not_committed():
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        put(ranks, 1, chunks, [0], ok=lambda rank: rank.rank != 1)
        serving.assert_idle()
        counters = ranks[0].stats()
        assert counters["objects_not_filled"] == 2
        assert "objects_written" not in counters
        assert ranks[0].lookup(chunks) == [False, False]
        store(ranks, chunks, job=2)


def test_puts_of_a_job_must_agree_on_chunks():
    with Serving() as serving:
        (rank,) = serving.join(replicated(2, 1))
        rank.send(Put(5, 1, [0], pack_keys(random_chunks(1))))
        rank.expect(Granted)
        rank.send(Put(6, 1, [1], pack_keys(random_chunks(1, seed=2))))
        assert "different chunks" in rank.expect(Failed).reason
        rank.send(Put(7, 1, [0], pack_keys(random_chunks(1))))
        assert "twice" in rank.expect(Failed).reason
        rank.send(Release(5, 0, ok=True))


def test_job_that_expires_in_the_middle_ends():
    chunks = random_chunks(8)
    clock = FakeClock()
    with Serving(clock=clock, shared_memory_size=4 * 4096, job_deadline_s=10) as serving:
        (rank,) = serving.join(replicated(1, 1))  # two slots, batches of one
        rank.send(Put(5, 1, [0], pack_keys(chunks)))
        first, second = rank.expect(Granted), rank.expect(Granted)
        clock.advance(11)
        wait_until(lambda: serving.server._engine._puts.num_jobs == 0, 5, "the job has expired")
        assert "job ended" in rank.expect(Failed).reason
        rank.send(Release(5, first.first, ok=True))
        rank.send(Release(5, second.first, ok=True))
        serving.assert_idle()
        assert not any(rank.lookup(chunks))


def test_exist_answer_after_all_ranks_asked():
    chunks = random_chunks(2)
    card = FaultyCard(memory_card(), [Fault(ops={Op.EXIST}, delay_s=0.3)])
    with Serving(card) as serving:
        ranks = serving.join(replicated(1, 2))
        for rank in ranks:
            rank.send(Put(5, 1, [0], pack_keys(chunks)))
        assert ranks[0].silent(0.1)
        for rank in ranks:
            rank.expect(Granted)
            rank.send(Release(5, 0, ok=True))
        card.faults = []
        wait_until(lambda: all(ranks[0].lookup(chunks)), 5, "committed")
        serving.assert_idle()


def test_exist_answer_after_a_rank_stayed_away():
    clock = FakeClock()
    card = FaultyCard(memory_card(), [Fault(ops={Op.EXIST}, delay_s=0.6)])
    with Serving(card, clock, rank_deadline_s=5, job_deadline_s=9) as serving:
        ranks = serving.join(replicated(1, 2))
        ranks[0].send(Put(5, 1, [0], pack_keys(random_chunks(2))))
        wait_until(lambda: serving.server._engine._puts.num_requests == 1, 5, "arrived")
        clock.advance(10)
        assert ranks[0].expect(Failed).seq == 5
        serving.assert_idle()


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.NO_SPACE, Status.TOO_LARGE])
def test_failed_write_is_not_committed(status):
    chunks = random_chunks(4)
    key = int(chunks[1, 1])

    def second_chunk_cache_zero(keys):
        from adp_kv.wire.keys import fragment_keys, object_keys

        target = fragment_keys(object_keys(chunks[1:2], [0]), np.zeros(1, int), np.zeros(1, int))
        return (keys == target[0]).all(axis=1)

    assert key
    card = FaultyCard(memory_card(), [Fault(status, {Op.WRITE}, when=second_chunk_cache_zero)])
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0, 1])
        serving.assert_idle()
        wait_until(lambda: any(rank.lookup(chunks)), 5, "committed")
        assert rank.lookup(chunks) == [True, False, True, True]
        counters = rank.stats()
        assert counters["objects_not_written"] == 1
        assert counters["objects_written"] == 7
        assert counters["chunks_committed"] == 3


def test_rest_of_a_chunk_that_was_not_taken_is_not_written():
    """A full card takes some objects of a chunk and not others: the chunk is lost already."""
    chunks = random_chunks(4)
    lost = whole_keys(object_keys(chunks[1:2], [0, 1, 2]))

    def of_the_second(keys):
        return np.any([(keys == key).all(axis=1) for key in lost], axis=0)

    card = FaultyCard(memory_card(), [Fault(Status.NO_SPACE, {Op.WRITE}, when=of_the_second)])
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(3, 1))
        put([rank], 1, chunks, [0])
        puts = serving.server._engine._puts
        wait_until(lambda: puts.num_requests == 0, 5, "cache 0 is written")
        card.faults = []
        slots = put([rank], 1, chunks, [1, 2], seq=99)[0].slots
        assert [slots[i] == NO_SLOT for i in range(8)] == [False, True, False, False] * 2
        serving.assert_idle()
        assert rank.lookup(chunks) == [True, False, True, True]


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.ABSENT, Status.IO_ERROR])
@pytest.mark.parametrize("delay_s", [0.0, 0.15])
def test_failed_read_withdraws_commit(status, delay_s):
    chunks = random_chunks(5)
    card = FaultyCard(memory_card(), seed=3)
    with Serving(card) as serving:
        ranks = serving.join(replicated(2, 2))
        store(ranks, chunks)
        card.faults = [Fault(status, {Op.READ}, probability=0.4, delay_s=delay_s)]
        outcomes = get(ranks, 5, chunks, [0, 1])
        assert outcomes[0].status == outcomes[1].status
        bad = {i % 5 for i, code in outcomes[0].status.items() if code}
        assert {c for c in outcomes[0].status.values() if c} == {status}
        card.faults = []
        serving.assert_idle()
        assert ranks[0].lookup(chunks) == [i not in bad for i in range(5)]
        counters = ranks[0].stats()
        missed = sum(1 for code in outcomes[0].status.values() if code)
        assert counters["objects_missed"] == missed
        assert counters["commits_withdrawn"] == len(bad)
        assert counters["objects_read"] == 10 - missed


def test_missed_chunk_named_twice_is_withdrawn():
    chunks = random_chunks(2)
    card = FaultyCard(memory_card())
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(1, 1))
        store([rank], chunks)
        card.faults = [Fault(Status.ABSENT, {Op.READ})]
        assert set(get([rank], 5, chunks[[0, 1, 0]], [0])[0].status.values()) == {Status.ABSENT}
        card.faults = []
        assert rank.lookup(chunks) == [False, False]
        assert rank.stats()["commits_withdrawn"] == 2


def test_late_answers_of_many_gets_find_their_request():
    chunks = random_chunks(24)
    card = FaultyCard(memory_card(copy_threads=2))
    with Serving(card, batch_bytes=4096) as serving:
        ranks = serving.join(replicated(1, 2))
        store(ranks, chunks)
        card.faults = [
            Fault(Status.CORRUPT, {Op.READ}, probability=0.2, delay_s=0.05),
            Fault(None, {Op.READ}, probability=0.5, delay_s=0.02),
        ]
        outcome = get(ranks, 5, chunks, [0])[0]
        card.faults = []
        assert len(outcome.status) == 24
        found = ranks[0].lookup(chunks)
        assert found == [outcome.status[i] == 0 for i in range(24)]
        serving.assert_idle()


def test_card_that_is_gone_comes_back():
    chunks = random_chunks(2)
    card = FaultyCard(memory_card())
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(1, 1))
        store([rank], chunks)
        card.gone = True
        assert rank.lookup(chunks) == [False, False]
        assert set(get([rank], 5, chunks, [0])[0].status.values()) == {Status.IO_ERROR}
        put([rank], 2, random_chunks(2, seed=5), [0])
        serving.assert_idle()
        card.gone = False
        assert rank.lookup(chunks) == [True, True]  # its DELETE did not reach the card either
        assert set(get([rank], 6, chunks, [0])[0].status.values()) == {0}


def test_read_that_ends_after_its_get_failed_frees_slots():
    clock = FakeClock()
    card = FaultyCard(memory_card())
    with Serving(card, clock, rank_deadline_s=5) as serving:
        ranks = serving.join(replicated(1, 2))
        store(ranks, random_chunks(2))
        card.faults = [Fault(None, {Op.READ}, delay_s=0.5)]
        ranks[0].send(Get(5, [0], pack_keys(random_chunks(2))))
        wait_until(lambda: serving.server._store.num_inflight == 1, 5, "it reads")
        clock.advance(6)
        assert ranks[0].expect(Failed).seq == 5
        assert serving.server._engine._gets.num_free_slots < 32  # the card still writes there
        serving.assert_idle()


def test_stopping_gateway_unmaps_the_ring_after_the_card():
    card = FaultyCard(memory_card(), [Fault(None, {Op.WRITE}, delay_s=30)])
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(1, 1))
        put([rank], 1, random_chunks(2), [0])
        wait_until(lambda: serving.server._store.num_inflight == 1, 5, "it writes")
        mapping = serving.server._engine._ring.mapping
        seen = []
        close = card.close
        card.close = lambda: (close(), seen.append(len(mapping.data)))  # raises once unmapped
    assert seen == [mapping.num_bytes]


def test_slow_write_is_waited_for_before_the_ring_goes():
    chunks = random_chunks(2)
    card = FaultyCard(memory_card(), [Fault(None, {Op.WRITE}, delay_s=0.6)])
    with Serving(card) as serving:
        ranks = serving.join(replicated(1, 1))
        put(ranks, 1, chunks, [0])
        wait_until(lambda: serving.server._store.num_inflight == 1, 5, "it writes")
        mapping = serving.server._engine._ring.mapping
        ranks[0].close("bye")
        wait_until(lambda: serving.server._engine.ended is not None, 5, "the session has ended")
        time.sleep(0.25)  # two ticks
        assert serving.server._store.num_inflight == 1
        assert mapping.data is not None  # still mapped: raises RingError when it is closed
        (fresh,) = serving.join(replicated(1, 1), engine="next")
        with pytest.raises(Exception, match="closed"):
            _ = mapping.data
        wait_until(lambda: all(fresh.lookup(chunks)), 5, "what was filled is stored")

"""What a save that failed has written is deleted, so that it takes no room; and nothing else is."""

import dataclasses

import numpy as np
import pytest

from adp_kv.wire.keys import commit_keys, object_keys, pack_keys, whole_keys
from adp_kv.wire.messages import Granted, Put, Release
from gateway import puts as puts_module
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import memory_card, nvme_card, nvme_host, slab_card
from tests.support.clock import FakeClock
from tests.support.process import wait_until
from tests.support.serving import Serving, get, put, random_chunks, replicated, store

SMALL = {"capacity_bytes": 48 * 4096, "num_databases": 2}


@pytest.fixture(params=["memory", "slab"])
def card(request, tmp_path):
    """A card of 48 values of 4 KiB that can fail."""
    if request.param == "memory":
        return FaultyCard(memory_card(max_value_bytes=4096, **SMALL))
    return FaultyCard(slab_card(tmp_path / "card", slot_bytes=4096, **SMALL))


def fails(chunks, caches, status=Status.NO_SPACE):
    """Return a fault of the writes of the chunks' objects of some caches."""
    keys = whole_keys(object_keys(chunks, caches))
    return Fault(
        status,
        {Op.WRITE},
        when=lambda asked: np.any([(asked == key).all(axis=1) for key in keys], axis=0),
    )


def refuse_records(chunks, status=Status.NO_SPACE, **how):
    words = commit_keys(chunks)[:, 0]
    return Fault(status, {Op.WRITE}, when=lambda keys: np.isin(keys[:, 0], words), **how)


def test_full_card_that_could_commit_nothing_takes_the_next_chunk(card):
    """48 slots, all held by parts of 20 chunks of four objects; no time passes."""
    clock = FakeClock()
    with Serving(card, clock) as serving:
        (rank,) = serving.join(replicated(4, 1))
        puts = serving.server._engine._puts
        for cache in range(4):
            put([rank], 1, random_chunks(20), [cache], seq=100 + cache)
            if cache < 3:
                wait_until(lambda: puts.num_requests == 0, 5, "the cache is written")
                assert card.stats()["free_slots"] <= 48 - 20
        serving.assert_idle()
        counters = rank.stats()
        assert counters["objects_not_written:no_space"] > 0
        whole = int(np.sum(rank.lookup(random_chunks(20))))
        assert whole == counters.get("chunks_committed", 0) < 12
        assert counters["chunks_discarded"] == 20 - whole
        assert card.stats()["free_slots"] == 48 - 4 * whole
        store([rank], random_chunks(1, seed=8), job=2)
        serving.assert_idle()


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.IO_ERROR])
def test_save_that_fails_half_way_leaves_nothing_but_what_is_whole(card, status, monkeypatch):
    monkeypatch.setattr(puts_module, "_DELETE_OBJECTS", 3)  # a batch for each chunk
    chunks = random_chunks(4)
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(3, 1))
        store([rank], chunks[:1])
        card.faults = [fails(chunks[:3], [1], status)]
        put([rank], 2, chunks[[0, 1, 2, 1, 3]], [0, 1, 2])  # 0 was stored, 1 is named twice
        serving.assert_idle()
        card.faults = []
        assert rank.lookup(chunks) == [True, False, False, True]
        assert set(get([rank], 5, chunks[[0, 3]], [0, 1, 2])[0].status.values()) == {0}
        assert card.stats()["values"] == 2 * (3 + 1)
        assert rank.stats()["chunks_discarded"] == 2


def test_fragments_of_an_object_that_was_not_whole_are_deleted(card):
    """None of its objects counts as written, and three of its four values were."""
    chunks = random_chunks(1)
    with Serving(card, shared_memory_size=64 * 4096) as serving:
        (rank,) = serving.join(replicated(1, 1, slice_bytes=4 * 4096))
        hit = iter([True])
        card.faults = [
            Fault(
                Status.NO_SPACE,
                {Op.WRITE},
                when=lambda keys: (np.arange(len(keys)) == 0) & next(hit, False),
            )
        ]
        put([rank], 1, chunks, [0])
        serving.assert_idle()
        counters = rank.stats()
        assert counters["objects_not_written"] == counters["chunks_discarded"] == 1
        assert card.stats()["values"] == 0
        store([rank], chunks, job=2)


def test_chunk_whose_record_is_refused_is_deleted(card):
    chunks = random_chunks(3)
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        card.faults = [refuse_records(chunks[:2])]
        put([rank], 1, chunks, [0, 1])
        serving.assert_idle()
        card.faults = []
        assert rank.lookup(chunks) == [False, False, True]
        assert card.stats()["values"] == 3
        assert rank.stats()["chunks_discarded"] == 2
        store([rank], chunks, job=2)


def test_objects_of_a_record_that_was_not_answered_stay():
    """The card may take it yet: a hit that could not be loaded."""
    chunks, clock = random_chunks(1), FakeClock()
    card = FaultyCard(memory_card(), [refuse_records(chunks, None, silent=True)])
    with Serving(card, clock, card_deadline_s=20, lease_s=1e6, liveness_s=1e6) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0, 1])
        wait_until(lambda: card.stats()["values"] == 2 and card._silent, 5, "all but the record")
        clock.advance(21)
        wait_until(lambda: serving.server._store.num_late == 1, 5, "it is late")
        card.faults = []
        card.answer_all()
        serving.assert_idle()
        wait_until(lambda: all(rank.lookup(chunks)), 5, "the record came late")
        assert set(get([rank], 5, chunks, [0, 1])[0].status.values()) == {0}


def test_chunk_that_another_job_saves_is_left_to_it(card):
    chunks = random_chunks(1)
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0], seq=11)
        put([rank], 2, chunks, [0], seq=21)
        put([rank], 1, chunks, [1], seq=12, ok=lambda _: False)
        puts = serving.server._engine._puts
        wait_until(lambda: puts.num_jobs == 1 and puts.num_requests == 0, 5, "job 1 has ended")
        put([rank], 2, chunks, [1], seq=22)
        serving.assert_idle()
        assert rank.lookup(chunks) == [True]
        assert set(get([rank], 5, chunks, [0, 1])[0].status.values()) == {0}
        assert "chunks_discarded" not in rank.stats()


def test_last_of_two_jobs_that_fail_deletes_what_the_other_wrote(card):
    chunks = random_chunks(1)
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0], seq=11)
        twice = chunks[[0, 0]]
        put([rank], 2, twice, [0], seq=21, ok=lambda _: False)  # job 2 writes nothing
        put([rank], 1, chunks, [1], seq=12, ok=lambda _: False)
        puts = serving.server._engine._puts
        wait_until(lambda: puts.num_jobs == 1 and puts.num_requests == 0, 5, "job 1 has ended")
        assert card.stats()["values"] == 1
        put([rank], 2, twice, [1], seq=22, ok=lambda _: False)
        serving.assert_idle()
        assert card.stats()["values"] == 0
        assert rank.stats()["chunks_discarded"] == 1


def test_chunk_that_another_job_has_committed_meanwhile_stays(card):
    chunks = random_chunks(1)
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0], seq=11)
        store([rank], chunks, job=2)
        put([rank], 1, chunks, [1], seq=12, ok=lambda _: False)
        serving.assert_idle()
        assert rank.lookup(chunks) == [True]
        assert set(get([rank], 5, chunks, [0, 1])[0].status.values()) == {0}


@pytest.mark.parametrize("late_answer", [False, True])
def test_chunk_whose_commit_is_under_way_stays(late_answer):
    """The other job's record is not on the card yet: EXIST would say so."""
    chunks = random_chunks(1)
    card = FaultyCard(memory_card())
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0], seq=11)
        card.faults = [refuse_records(chunks, None, silent=True)]
        put([rank], 2, chunks, [0, 1], seq=21)
        wait_until(lambda: card._silent, 5, "the record is on its way")
        card.faults = [Fault(None, {Op.EXIST}, hold=99)] if late_answer else []
        put([rank], 1, chunks, [1], seq=12, ok=lambda _: False)
        puts = serving.server._engine._puts
        wait_until(lambda: puts.num_jobs == 0, 5, "job 1 has ended")
        card.faults = []
        held, card._held = card._held, []  # what EXIST said of before, to be told after
        card.answer_all()
        wait_until(lambda: rank.stats().get("chunks_committed") == 1, 5, "committed")
        card._held = held
        card.answer_all()
        serving.assert_idle()
        assert rank.lookup(chunks) == [True]
        assert set(get([rank], 5, chunks, [0, 1])[0].status.values()) == {0}


def test_job_that_begins_before_the_delete_has_the_chunk(card):
    """Between the question whether there is a record and its answer."""
    chunks = random_chunks(1)
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        puts = serving.server._engine._puts
        put([rank], 1, chunks, [0], seq=11)
        wait_until(lambda: puts.num_requests == 0, 5, "cache 0 is written")
        card.faults = [Fault(None, {Op.EXIST}, silent=True)]
        put([rank], 1, chunks, [1], seq=12, ok=lambda _: False)
        wait_until(lambda: card._silent, 5, "the question is at the card")
        card.faults = []
        put([rank], 2, chunks, [0], seq=21)
        wait_until(lambda: puts.num_requests == 0, 5, "cache 0 is written again")
        card.answer_all()
        wait_until(lambda: serving.server._store.num_inflight == 0, 5, "the answer")
        put([rank], 2, chunks, [1], seq=22)
        serving.assert_idle()
        assert rank.lookup(chunks) == [True]
        assert set(get([rank], 5, chunks, [0, 1])[0].status.values()) == {0}


def test_put_that_begins_after_the_delete_wins(card):
    deletes, submit = [], card.submit

    def watch(batch):
        submit(batch)
        deletes.extend([1] * (batch.op is Op.DELETE))

    card.submit = watch
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        for number in range(1, 11):
            fresh = random_chunks(1, seed=number)
            put([rank], 2 * number, fresh, [0], version=1)
            put([rank], 2 * number, fresh, [1], version=1, ok=lambda _: False)
            wait_until(lambda n=number: len(deletes) == n, 5, "it is submitted")
            store([rank], fresh, job=2 * number + 1)
            assert set(get([rank], 5, fresh, [0, 1])[0].status.values()) == {0}
        serving.assert_idle()
        assert rank.stats()["chunks_discarded"] == 10
        assert card.stats()["values"] == 10 * 3


def test_job_that_expires_deletes_what_it_wrote(card):
    chunks, clock = random_chunks(2), FakeClock()
    with Serving(card, clock, job_deadline_s=120, lease_s=1e6, liveness_s=1e6) as serving:
        (rank,) = serving.join(replicated(3, 1))
        put([rank], 1, chunks, [0], seq=11)
        rank.send(Put(12, 1, [1], pack_keys(chunks)))
        first = rank.expect(Granted).first
        wait_until(lambda: card.stats()["values"] == 2, 5, "cache 0 is written")
        clock.advance(121)
        wait_until(lambda: card.stats()["values"] == 0, 5, "the job has expired")
        rank.send(Release(12, first, ok=True))  # too late: it is not written
        serving.assert_idle()
        assert card.stats()["values"] == 0
        counters = rank.stats()
        assert counters["chunks_discarded"] == counters["put_objects_given_up"] == 2
        store([rank], chunks, job=2)


def test_object_that_comes_after_its_job_expired_is_overwritten_later(card):
    chunks, clock = random_chunks(2), FakeClock()
    patient = {"card_deadline_s": 1e4, "lease_s": 1e6, "liveness_s": 1e6}
    with Serving(card, clock, job_deadline_s=120, **patient) as serving:
        (rank,) = serving.join(replicated(3, 1))
        put([rank], 1, chunks, [0], seq=11)
        wait_until(lambda: card.stats()["values"] == 2, 5, "cache 0 is written")
        card.faults = [Fault(None, {Op.WRITE}, silent=True)]
        put([rank], 1, chunks, [1], seq=12)
        wait_until(lambda: card._silent, 5, "cache 1 is at the card")
        clock.advance(121)
        wait_until(lambda: card.stats()["values"] == 0, 5, "the job has expired")
        card.faults = []
        card.answer_all()
        serving.assert_idle()
        assert card.stats()["values"] == 2
        assert not any(rank.lookup(chunks))
        store([rank], chunks, job=2, version=3)
        assert set(get([rank], 5, chunks, [0, 1, 2], version=3)[0].status.values()) == {0}


def test_card_that_does_not_answer_the_delete_costs_nothing_else(card):
    chunks, clock = random_chunks(2), FakeClock()
    with Serving(card, clock, card_deadline_s=20, lease_s=1e6, liveness_s=1e6) as serving:
        (rank,) = serving.join(replicated(2, 1))
        card.faults = [fails(chunks[:1], [1]), Fault(None, {Op.DELETE}, silent=True)]
        put([rank], 1, chunks, [0, 1])
        wait_until(lambda: card._silent, 5, "the delete is at the card")
        assert rank.lookup(chunks) == [False, True]
        store([rank], random_chunks(2, seed=4), job=2)
        clock.advance(21)
        wait_until(lambda: serving.server._store.num_late == 1, 5, "it is late")
        assert "chunks_discarded" not in {k for k, v in rank.stats().items() if v}
        card.faults = []
        card.answer_all()
        serving.assert_idle()
        assert all(rank.lookup(np.concatenate([chunks[1:], random_chunks(2, seed=4)])))
        store([rank], chunks, job=3)


def test_card_that_does_not_say_whether_there_is_a_record_keeps_the_chunk():
    """An error is no answer: another save may have committed it."""
    chunks = random_chunks(1)
    card = FaultyCard(memory_card())
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, chunks, [0])
        puts = serving.server._engine._puts
        wait_until(lambda: puts.num_requests == 0, 5, "cache 0 is written")
        card.faults = [Fault(Status.IO_ERROR, {Op.EXIST})]
        put([rank], 1, chunks, [1], ok=lambda _: False)
        serving.assert_idle()
        assert card.stats()["values"] == 1


def test_shared_card_is_asked_to_delete_nothing():
    """What one gateway could not save, another one may just be saving."""
    card, batches = memory_card(), []
    card._limits = dataclasses.replace(card.limits, exclusive=False)
    submit = card.submit

    def watch(batch):
        batches.append(batch.op)
        submit(batch)

    card.submit = watch
    with Serving(card) as serving:
        (rank,) = serving.join(replicated(2, 1))
        put([rank], 1, random_chunks(1), [0])
        put([rank], 1, random_chunks(1), [1], ok=lambda _: False)
        serving.assert_idle()
        assert card.stats()["values"] == 1
    assert set(batches) == {Op.EXIST, Op.WRITE}


def test_cards_of_one_process_alone_are_exclusive(tmp_path):
    assert memory_card().limits.exclusive
    assert slab_card(tmp_path / "card").limits.exclusive
    assert not nvme_card(nvme_host()).limits.exclusive

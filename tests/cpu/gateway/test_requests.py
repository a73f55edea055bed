"""Gets and puts of one engine, message by message."""

import re

import numpy as np
import pytest

from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import NO_SLOT, Failed, Get, Granted, Put, Release
from gateway import requests
from tests.support.clock import FakeClock
from tests.support.process import wait_until
from tests.support.serving import (
    Serving,
    get,
    put,
    random_chunks,
    replicated,
    sharded,
    staged,
    store,
)

CACHES = {"sharded": sharded, "replicated": replicated, "staged": staged}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stored_objects_come_back_exactly(kind, world_size):
    chunks = random_chunks(3, seed=world_size)
    with Serving(shared_memory_size=1 << 20) as serving:
        ranks = serving.join(CACHES[kind](4, world_size))
        assert ranks[0].lookup(chunks) == [False] * 3
        store(ranks, chunks)
        for rank in ranks if kind == "staged" else [None]:
            group = [rank] if rank else ranks
            indices = sorted(group[0].caches)
            outcomes = get(group, 7 + indices[0], chunks, indices)
            assert all(o.failed is None for o in outcomes.values())
            assert all(set(o.status.values()) == {0} for o in outcomes.values())
        serving.assert_idle()
        counters = ranks[0].stats()
        assert counters["objects_written"] == counters["objects_read"] == 12
        assert counters["chunks_committed"] == 3
        assert counters["card_corrupt"] == counters["card_io_errors"] == 0


def test_more_objects_than_slots_run_in_batches():
    chunks = random_chunks(40)
    with Serving(shared_memory_size=16 * 4096) as serving:  # 8 slots a direction
        ranks = serving.join(sharded(2, 2, slice_bytes=2048))
        put(ranks, 1, chunks, [0, 1])
        wait_until(lambda: all(ranks[0].lookup(chunks)), 5, "committed")
        outcomes = get(ranks, 5, chunks, [1, 0])
        for outcome in outcomes.values():
            assert set(outcome.status.values()) == {0}
            assert len(outcome.slots) == 80
            assert max(outcome.batches) <= 4
        assert outcomes[0].slots == outcomes[1].slots
        serving.assert_idle()


def test_one_batch_has_neighbouring_slots():
    chunks = random_chunks(16)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 1))
        store(ranks, chunks)
        slots = list(get(ranks, 5, chunks, [0])[0].slots.values())
        assert np.diff(slots).tolist() == [1] * 15


def test_batches_follow_batch_bytes():
    chunks = random_chunks(8)
    with Serving(batch_bytes=2 * 4096) as serving:
        ranks = serving.join(replicated(1, 1))
        assert put(ranks, 1, chunks, [0])[0].batches == [2, 2, 2, 2]


def test_batches_have_equal_parts():
    chunks = random_chunks(7)
    with Serving(batch_bytes=3 * 4096) as serving:
        ranks = serving.join(replicated(1, 1))
        assert put(ranks, 1, chunks, [0])[0].batches == [3, 2, 2]


def test_short_batch_makes_the_next_no_smaller(monkeypatch):
    monkeypatch.setattr(requests, "FIRST_BATCH_BYTES", 100)
    ramp = requests.Ramp(1000)
    sizes = []
    for num_bytes in (100, 200, 5, 400):
        ramp.begun(num_bytes)
        sizes.append(ramp.batch_bytes)
    assert sizes == [200, 400, 400, 800]
    ramp.begun(800)
    assert ramp.batch_bytes == 1000
    ramp.reset()
    assert ramp.batch_bytes == 100


def test_reads_start_small_and_grow_until_idle(monkeypatch):
    monkeypatch.setattr(requests, "FIRST_BATCH_BYTES", 2 * 4096)
    chunks = random_chunks(30)
    with Serving(shared_memory_size=256 * 4096, batch_bytes=8 * 4096) as serving:
        ranks = serving.join(replicated(2, 1))
        store(ranks, chunks)
        for seq in (10, 20):  # small again after idle time
            assert get(ranks, seq, chunks, [0])[0].batches == [2, 4, 8, 8, 8]
            serving.assert_idle()


def test_next_layer_goes_on_with_large_batches(monkeypatch):
    monkeypatch.setattr(requests, "FIRST_BATCH_BYTES", 2 * 4096)
    chunks = random_chunks(8)
    with Serving(shared_memory_size=256 * 4096, batch_bytes=8 * 4096) as serving:
        ranks = serving.join(replicated(2, 1))
        store(ranks, chunks)
        for cache in (0, 1):
            ranks[0].send(Get(cache, [cache], pack_keys(chunks)))
        granted = [ranks[0].expect(Granted) for _ in range(4)]
        sizes = {(m.seq, m.first): len(m.slots) // 4 for m in granted}
        assert sizes == {(0, 0): 2, (0, 2): 3, (0, 5): 3, (1, 0): 8}
        for message in granted:
            ranks[0].send(Release(message.seq, message.first, ok=True))
        serving.assert_idle()


def test_read_starts_before_last_rank_asks():
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        store(ranks, chunks)
        before = ranks[1].stats().get("objects_read", 0)
        ranks[0].send(Get(5, [0], pack_keys(chunks)))
        wait_until(lambda: ranks[1].stats().get("objects_read", 0) == before + 2, 5, "read")
        assert ranks[0].silent()  # granted to nobody before everybody asked
        ranks[1].send(Get(5, [0], pack_keys(chunks)))
        for rank in ranks:
            rank.expect(Granted)
            rank.send(Release(5, 0, ok=True))
        serving.assert_idle()


@pytest.mark.parametrize("kind", [Get, Put])
def test_disagreeing_ranks_fail_with_both_named(kind):
    one, other = random_chunks(2, seed=1), random_chunks(2, seed=2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        job = [3] if kind is Put else []
        ranks[0].send(kind(5, *job, [0], pack_keys(one)))
        ranks[1].send(kind(5, *job, [0], pack_keys(other)))
        for rank in ranks:
            reason = rank.expect(Failed).reason
            assert re.search(r"ranks (0 and 1|1 and 0) disagree", reason)
        if kind is Put:
            serving.server._engine._puts._jobs.clear()  # it would wait for job_deadline_s
        serving.assert_idle()


@pytest.mark.parametrize("kind", [Get, Put])
def test_rank_that_stays_away_fails_all(kind):
    clock = FakeClock()
    with Serving(clock=clock, rank_deadline_s=20, job_deadline_s=30, liveness_s=1e6) as serving:
        ranks = serving.join(replicated(1, 3))
        message = kind(5, *([3] if kind is Put else []), [0], pack_keys(random_chunks(2)))
        for rank in ranks[:2]:
            rank.send(message)
        wait_until(lambda: len(table_of(serving, kind)._requests) == 1, 5, "it has arrived")
        clock.advance(19)
        assert ranks[0].silent(0.3)
        clock.advance(2)
        for rank in ranks[:2]:
            assert "rank 2 did not send" in rank.expect(Failed).reason
        ranks[2].send(message)  # too late: told at once, not after another deadline
        assert "rank 2 did not send" in ranks[2].expect(Failed).reason
        clock.advance(31)
        serving.assert_idle()


def table_of(serving, kind):
    engine = serving.server._engine
    return engine._gets if kind is Get else engine._puts


def test_late_rank_of_a_disagreement_is_told():
    one, other = random_chunks(2, seed=1), random_chunks(2, seed=2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 4))
        ranks[0].send(Get(5, [0], pack_keys(one)))
        ranks[1].send(Get(5, [0], pack_keys(other)))
        for rank in ranks[:2]:
            rank.expect(Failed)
        ranks[2].send(Get(5, [0], pack_keys(one)))
        ranks[3].send(Get(5, [0], pack_keys(other)))
        for rank in ranks[2:]:
            assert "disagree" in rank.expect(Failed, timeout_s=2).reason
        serving.assert_idle()


def test_failed_number_serves_again_later():
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        store(ranks, chunks)
        ranks[0].send(Get(5, [0], pack_keys(chunks)))
        ranks[1].send(Get(5, [0], pack_keys(chunks[:1])))
        for rank in ranks:
            rank.expect(Failed)
        serving.assert_idle()  # what the first rank's read still holds
        assert set(get(ranks, 5, chunks, [0])[0].status.values()) == {0}
        serving.assert_idle()


def test_doubled_request_is_one_request():
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        ranks[0].send(Put(5, 1, [0], pack_keys(chunks)))
        outcome = put(ranks, 1, chunks, [0], seq=5)
        assert len(outcome[0].slots) == 2
        serving.assert_idle()


@pytest.mark.parametrize(
    "message",
    [
        Get(5, [], b"x" * 16),
        Get(5, [0], b""),
        Get(5, [0], b"x" * 15),
        Get(5, [9], b"x" * 16),
        Get(5, [0, 0], b"x" * 16),
        Get(5, [-1], b"x" * 16),
        Put(5, 1, [], b"x" * 16),
        Put(5, 1, [0], b""),
        Put(5, 1, [0], b"x" * 17),
        Put(5, 1, [1 << 40], b"x" * 16),
    ],
)
def test_wrong_request_fails_and_changes_nothing(message):
    with Serving() as serving:
        (rank,) = serving.join(replicated(2, 1))
        rank.send(message)
        assert rank.expect(Failed).seq == 5
        serving.assert_idle()
        assert rank.stats()["bad_messages"] == 1


def test_request_of_another_stage_is_refused():
    with Serving() as serving:
        ranks = serving.join(staged(4, 2))
        ranks[0].send(Get(5, [1], b"x" * 16))
        assert "holds no slice" in ranks[0].expect(Failed).reason
        ranks[0].send(Get(5, [0, 1], b"x" * 16))
        assert "mixes" in ranks[0].expect(Failed).reason
        serving.assert_idle()


def test_request_beyond_any_prompt_is_refused():
    with Serving(shared_memory_size=1 << 20) as serving:
        (rank,) = serving.join(replicated(2000, 1, slice_bytes=8))
        chunks = random_chunks(10000)
        rank.send(Get(5, list(range(2000)), pack_keys(chunks)))
        assert "objects" in rank.expect(Failed).reason
        serving.assert_idle()


def test_scheduler_side_moves_nothing():
    with Serving() as serving:
        rank, scheduler = serving.join(replicated(1, 1), scheduler=True)
        scheduler.send(Get(5, [0], b"x" * 16))
        scheduler.expect(Failed)
        assert scheduler.lookup(random_chunks(3)) == [False] * 3
        store([rank], random_chunks(3))
        assert scheduler.lookup(random_chunks(4)) == [True, True, True, False]


def granted(ranks, chunks, kind=Get):
    for rank in ranks:
        rank.send(kind(5, *([9] if kind is Put else []), [0], pack_keys(chunks)))
    return [rank.expect(Granted) for rank in ranks]


@pytest.mark.parametrize("kind", [Get, Put])
def test_release_twice_counts_once(kind):
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        store(ranks, random_chunks(1, seed=9))
        granted(ranks, chunks, kind)
        ranks[0].send(Release(5, 0, ok=True))
        ranks[0].send(Release(5, 0, ok=True))
        assert ranks[0].lookup(chunks) == [False, False]  # everything before it was handled
        assert table_of(serving, kind).num_requests == 1  # rank 1 still copies
        ranks[1].send(Release(5, 0, ok=True))
        ranks[1].send(Release(5, 0, ok=True))
        ranks[1].send(Release(5, 0, ok=True))
        serving.assert_idle()
        assert len(get(ranks, 6, random_chunks(1, seed=9), [0])[1].status) == 1


def test_release_by_a_rank_of_another_group_is_refused():
    with Serving() as serving:
        ranks = serving.join(staged(2, 2))
        granted(ranks[:1], random_chunks(1))
        ranks[1].send(Release(5, 0, ok=True))
        ranks[0].send(Release(5, 77, ok=True))
        ranks[1].lookup(random_chunks(1))
        assert table_of(serving, Get).num_requests == 1
        ranks[0].send(Release(5, 0, ok=True))
        serving.assert_idle()
        assert ranks[1].stats()["bad_messages"] == 2


@pytest.mark.parametrize("kind", [Get, Put])
def test_expired_lease_ends_session_and_replaces_ring(kind):
    clock = FakeClock()
    with Serving(clock=clock, lease_s=60, liveness_s=1e6) as serving:
        ranks = serving.join(replicated(1, 2))
        generation = ranks[0].mapping.header.generation
        granted(ranks, random_chunks(1), kind)
        ranks[0].send(Release(5, 0, ok=True))
        ranks[0].lookup(random_chunks(1))
        clock.advance(59)
        assert ranks[0].silent(0.3)
        clock.advance(2)
        for rank in ranks:
            assert "rank 1 kept ring slots" in rank.expect_goodbye()
        ranks[1].slice_of(0, ranks[1].caches[0], write=True)[:] = 7  # its mapping is its own
        fresh = serving.join(replicated(1, 2), engine="next")
        assert fresh[0].mapping.header.generation != generation
        assert not fresh[0].mapping.data[4096:].any()
        store(fresh, random_chunks(2))


def test_same_chunk_twice_in_one_get__gateway_lives():
    chunks = random_chunks(2)[[0, 1, 0]]
    with Serving() as serving:
        ranks = serving.join(replicated(1, 1))
        assert set(get(ranks, 5, chunks, [0])[0].status.values()) == {1}  # all absent
        store(ranks, chunks[:2])
        assert set(get(ranks, 6, chunks, [0])[0].status.values()) == {0}
        serving.assert_idle()


def test_same_chunk_twice_in_one_put_is_stored_once():
    chunks = random_chunks(2)[[0, 1, 0]]
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2))
        slots = put(ranks, 1, chunks, [0])[0].slots
        assert [slots[i] == NO_SLOT for i in range(3)] == [False, False, True]
        wait_until(lambda: all(ranks[0].lookup(chunks)), 5, "committed")
        assert set(get(ranks, 6, chunks, [0])[0].status.values()) == {0}
        serving.assert_idle()

"""Saves and restores of several ranks through a real gateway."""

import numpy as np
import pytest

from adp_kv.layout.geometry import head_slices
from adp_kv.sdk.rank_client import SAVE_LAYER
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import memory_card
from tests.support.clients import Pool, Team, blocks_of, finish, pools
from tests.support.process import wait_until
from tests.support.serving import Serving, random_chunks

SLOTS = {"shared_memory_size": 64 * 16384}


def kept(team, blocks):
    return [{index: pool.pages(index, blocks) for index in pool.memory} for pool in team.pools]


def same(team, blocks, before):
    return all(
        np.array_equal(pool.pages(index, blocks), pages[index])
        for pool, pages in zip(team.pools, before, strict=True)
        for index in pool.memory
    )


@pytest.mark.parametrize("kind", ["sharded", "replicated", "staged"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_slots", [6, 64])
def test_restored_pages_are_those_saved(kind, world_size, num_slots):
    chunks, blocks = random_chunks(5), blocks_of(0, 8, 2, 30, 40)
    with (
        Serving(shared_memory_size=2 * num_slots * 16384) as serving,
        Team(serving.address, pools(world_size, kind)).start() as team,
    ):
        assert team.stored(chunks) == [False] * 5
        before = kept(team, blocks)
        team.save(1, chunks, blocks)
        for pool in team.pools:
            pool.clear()
        elsewhere = blocks_of(10, 20, 50, 4, 60)
        jobs = team.restore(2, chunks, elsewhere)
        assert not any(job.failed_chunks.any() for job in jobs)
        assert same(team, elsewhere, before)
        for pool in team.pools:
            others = sorted(set(range(64)) - set(elsewhere.reshape(-1).tolist()))
            assert all((memory[others] == 0xA5).all() for memory in pool.memory.values())
            assert all((memory[:, -64:] == 0xA5).all() for memory in pool.memory.values())
        serving.assert_idle()
        assert not any(rank._transfers or rank._flights for rank in team.ranks)


def test_saves_layer_by_layer_commit_with_the_last():
    chunks, blocks = random_chunks(2), blocks_of(0, 2)
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        jobs = team.jobs(1, chunks, blocks)
        for index in range(3):
            assert team.stored(chunks) == [False, False]
            for rank, job in zip(team.ranks, jobs, strict=True):
                rank.submit_save(job, SAVE_LAYER, [job.caches[index]], rank.mover.mark())
            wait_until(
                lambda i=index: all(j._progress[i].num_unsettled == 0 for j in jobs), 5, "started"
            )
        finish(jobs)
        wait_until(lambda: all(team.stored(chunks)), 5, "committed")


def test_unwanted_pages_go_to_scratch():
    chunks, blocks = random_chunks(2), blocks_of(0, 2)
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        team.save(1, chunks, blocks)
        team.pools[0].clear()
        wanted = np.array([[-1, 7], [8, -1]])
        team.restore(2, chunks, wanted)
        memory = team.pools[0].memory[0]
        changed = np.flatnonzero((memory[:, :1000] != 0xA5).any(axis=1))
        assert changed.tolist() == [7, 8]


def test_stored_chunks_are_not_copied_again():
    chunks, blocks = random_chunks(4), blocks_of(0, 2, 4, 6)
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2, "replicated")).start() as team:
        team.save(1, chunks, blocks)
        copied = [len(mover.copies) for mover in team.movers]
        team.save(2, chunks, blocks)
        assert [len(mover.copies) for mover in team.movers] == copied
        serving.assert_idle()


def test_replicas_share_the_work_of_a_save():
    chunks, blocks = random_chunks(8), blocks_of(*range(0, 16, 2))
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2, "replicated")).start() as team:
        team.save(1, chunks, blocks)
        moved = [rank.counts["bytes_saved"] for rank in team.ranks]
        assert moved[0] == moved[1]
        assert sum(moved) == 8 * 2 * (1000 + 1000 + 2048)


@pytest.mark.parametrize(("tp_size", "heads"), [(2, None), (4, None), (4, 1), (4, 2)])
def test_ranks_that_share_tokens_get_back_what_each_held(tp_size, heads):
    """Decode context parallelism by two: ranks next to each other have other pages of a block."""
    places = [head_slices(rank, tp_size, heads, 2) for rank in range(tp_size)]
    every = [Pool(list(enumerate((1000, 2048))), place) for place in places]
    for pool, (slice_idx, *_) in zip(every, places, strict=True):
        pool.fill(slice_idx)
    chunks, blocks, elsewhere = random_chunks(3), blocks_of(0, 8, 2), blocks_of(10, 20, 50)
    with Serving(**SLOTS) as serving, Team(serving.address, every).start() as team:
        before = kept(team, blocks)
        team.save(1, chunks, blocks)
        saved = [rank.counts["bytes_saved"] for rank in team.ranks]
        assert sum(saved) == 3 * places[0][1] * 2 * (1000 + 2048), "a slice is stored once"
        for pool in team.pools:
            pool.clear()
        jobs = team.restore(2, chunks, elsewhere)
        assert not any(job.failed_chunks.any() for job in jobs)
        assert same(team, elsewhere, before)
        serving.assert_idle()


@pytest.mark.parametrize("status", [Status.ABSENT, Status.CORRUPT, Status.IO_ERROR])
def test_damaged_object_fails_its_chunk_alone(status):
    chunks, blocks = random_chunks(4), blocks_of(0, 2, 4, 6)
    card = FaultyCard(memory_card())
    with Serving(card, **SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        before = kept(team, blocks)
        team.save(1, chunks, blocks)
        hit = []

        def first_only(keys):
            hit.append(1)
            return np.arange(len(keys)) == 2 if len(hit) == 1 else np.zeros(len(keys), bool)

        card.faults = [Fault(status, {Op.READ}, when=first_only)]
        for pool in team.pools:
            pool.clear()
        jobs = team.restore(2, chunks, blocks)
        for job in jobs:
            assert job.failed_chunks.tolist() == [False, False, True, False]
            assert job.failed_blocks == {4, 5}
            assert "missing or damaged" in job.reason
        for pool, pages in zip(team.pools, before, strict=True):
            for index in pool.memory:
                good = [0, 1, 2, 3, 6, 7]
                rows = [0, 1, 2, 3, 6, 7]
                assert np.array_equal(pool.pages(index, good), pages[index][rows])
        assert team.stored(chunks) == [True, True, False, True]
        assert not any(client.off for client in team.clients)
        serving.assert_idle()


def test_many_jobs_at_once_all_end():
    with (
        Serving(shared_memory_size=16 * 16384) as serving,
        Team(serving.address, pools(2, "replicated")).start() as team,
    ):
        for mover in team.movers:
            mover.delay_s = 0.002
        every = []
        for number in range(8):
            chunks = random_chunks(3, seed=number)
            jobs = team.jobs(number, chunks, blocks_of(number * 6, number * 6 + 2, number * 6 + 4))
            team.submit_saves(jobs)
            every.append((chunks, jobs))
        finish([job for _, jobs in every for job in jobs])
        for chunks, _ in every:
            wait_until(lambda c=chunks: all(team.stored(c)), 5, "stored")
        serving.assert_idle()

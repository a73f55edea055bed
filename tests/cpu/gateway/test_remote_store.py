"""Gateways that share a store elsewhere: one engine restores what another has saved.

Each gateway is a process of its own, as on a machine of its own; the Mooncake store is two
more, reached over TCP alone.
"""

import itertools
import signal

import numpy as np
import pytest

from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.gateways import Gateway
from tests.support.mooncake import MooncakeStore
from tests.support.process import wait_until
from tests.support.serving import random_chunks

pytestmark = pytest.mark.timeout(180)

CHUNKS, BLOCKS = random_chunks(5), blocks_of(0, 8, 2, 30, 40)
ELSEWHERE = blocks_of(10, 20, 50, 4, 60)
OPTIONS = {"io_timeout_s": 1.0, "connect_timeout_s": 1.0, "reconnect_s": 0.05}


def gateway_of(store, **options):
    return Gateway.serve(
        "mooncake",
        {"masters": store.address} | OPTIONS | options,
        shared_memory_size="2MiB",
        placement="remote",
        quarantine_s=0.5,
        start_timeout_s=60,  # a bare machine reads the engine's 70 MB from its disk
    )


@pytest.fixture
def store():
    with MooncakeStore(client_ttl=5) as made:
        yield made


@pytest.fixture
def sides(store):
    """Two gateways, and the ranks of an engine on each."""
    with (
        gateway_of(store) as one,
        gateway_of(store) as two,
        Team(one.address, pools(2), engine="one").start() as first,
        Team(two.address, pools(2), engine="two").start() as second,
    ):
        yield (one, first), (two, second)


def pages(team, blocks):
    return [[pool.pages(index, blocks) for index in pool.memory] for pool in team.pools]


def same(some, others):
    return all(
        np.array_equal(page, other)
        for rank, other_rank in zip(some, others, strict=True)
        for page, other in zip(rank, other_rank, strict=True)
    )


def clear(team):
    for pool in team.pools:
        pool.clear()


def assert_restored(team, number, chunks, saved):
    clear(team)
    jobs = team.restore(number, chunks, ELSEWHERE[: len(chunks)])
    assert not any(job.failed_chunks.any() for job in jobs)
    assert same(pages(team, ELSEWHERE[: len(chunks)]), saved)


def assert_whole_where_it_did_not_fail(team, jobs, saved):
    """No chunk that a job calls restored holds other bytes."""
    failed = np.logical_or.reduce([job.failed_chunks for job in jobs])
    blocks_per_chunk = ELSEWHERE.shape[1]
    kept = np.repeat(~failed, blocks_per_chunk)
    for rank, before in zip(pages(team, ELSEWHERE), saved, strict=True):
        for page, other in zip(rank, before, strict=True):
            assert np.array_equal(page[kept], other[kept])
    return not failed.any()


def wait_until_it_serves(first, second, saved):
    """Save on one side and restore on the other until all comes.

    For as long as the master takes a dead holder for alive it counts what lay there as stored.
    """
    numbers = itertools.count(100)

    def once():
        jobs = first.jobs(next(numbers), CHUNKS, BLOCKS)
        first.submit_saves(jobs)
        finish(jobs)
        if not (all(first.stored(CHUNKS)) and all(second.stored(CHUNKS))):
            return False
        clear(second)
        jobs = second.restore(next(numbers), CHUNKS, ELSEWHERE)
        return assert_whole_where_it_did_not_fail(second, jobs, saved)

    wait_until(once, 40, "what one saves the other restores")


def test_one_gateway_restores_what_another_saved(sides):
    (one, first), (_, second) = sides
    assert second.stored(CHUNKS) == [False] * 5
    saved = pages(first, BLOCKS)
    first.save(1, CHUNKS, BLOCKS)
    assert second.stored(CHUNKS) == [True] * 5
    assert second.stored(random_chunks(5, 1)) == [False] * 5
    assert_restored(second, 1, CHUNKS, saved)
    first.close()
    one.kill9()
    assert_restored(second, 2, CHUNKS, saved)


def test_both_save_the_same_chunks_at_once(sides):
    (one, first), (_, second) = sides
    saved = pages(first, BLOCKS)
    assert same(saved, pages(second, BLOCKS))
    both = [team.jobs(1, CHUNKS, BLOCKS) for team in (first, second)]
    for team, jobs in zip((first, second), both, strict=True):
        team.submit_saves(jobs)
    for jobs in both:
        finish(jobs)
    # Where both wrote an object at once one of them may have been told NO_SPACE.
    wait_until_it_serves(first, second, saved)
    assert_restored(first, 50, CHUNKS, saved)
    first.close()
    one.stop()


def test_gateway_beside_a_silent_master_ends(sides, store):
    _, (two, second) = sides
    asked = two.counters().get("lookups", 0)
    store.signal(store.master, signal.SIGSTOP)
    second.lookup.ask(CHUNKS, 5.0)
    wait_until(lambda: two.counters().get("lookups", 0) > asked, 5, "the gateway has asked")
    two.stop(40)


def test_store_that_dies_costs_misses_and_serves_again(sides, store):
    (_, first), (_, second) = sides
    saved = pages(first, BLOCKS)
    first.save(1, CHUNKS, BLOCKS)
    store.kill_holder()
    clear(second)
    jobs = second.restore(1, CHUNKS, ELSEWHERE)
    assert all(job.failed_chunks.all() for job in jobs)
    store.start_holder()
    wait_until_it_serves(first, second, saved)


def test_master_that_dies_costs_misses_and_serves_again(sides, store):
    (_, first), (_, second) = sides
    saved = pages(first, BLOCKS)
    first.save(1, CHUNKS, BLOCKS)
    store.kill_master()
    assert second.stored(CHUNKS) == [False] * 5
    clear(second)
    jobs = second.restore(1, CHUNKS, ELSEWHERE)
    assert all(job.failed_chunks.all() for job in jobs)
    store.start_master()
    wait_until_it_serves(first, second, saved)

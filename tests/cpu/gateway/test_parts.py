"""Parts of an engine: their chunks are stored and committed by themselves, in one ring."""

import numpy as np
import pytest

from adp_kv.errors import GatewayError
from adp_kv.units import KiB, MiB
from adp_kv.wire.keys import pack_keys, part_keys
from adp_kv.wire.messages import Ahead, CacheDecl, Failed, Get, Put
from tests.support.cards import memory_card
from tests.support.process import wait_until
from tests.support.serving import Serving, get, put, random_chunks

CHUNKS = random_chunks(4)
FULL, STATE = part_keys(CHUNKS, 0), part_keys(CHUNKS, 1)


def hybrid(world_size=1, attention=4 * KiB, state=8 * KiB):
    """Two attention caches and three of states, a slice a rank."""
    return [
        [CacheDecl(i, f"attention.{i}", attention, rank, world_size, part=0) for i in (0, 1)]
        + [CacheDecl(8 + i, f"state.{i}", state, rank, world_size, part=1) for i in range(3)]
        for rank in range(world_size)
    ]


def committed(rank, keys):
    wait_until(lambda: all(rank.lookup(keys)), 5, "the chunks are committed")


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_part_commits_its_own_chunks(world_size):
    with Serving(shared_memory_size=1 << 20) as serving:
        ranks = serving.join(hybrid(world_size))
        put(ranks, 1, FULL, [0, 1])
        committed(ranks[0], FULL)
        assert not any(ranks[0].lookup(STATE))
        put(ranks, 1, STATE[2:], [8, 9])  # of the same step, and not whole yet
        assert not any(ranks[0].lookup(STATE))
        put(ranks, 1, STATE[2:], [10])
        committed(ranks[0], STATE[2:])
        assert ranks[0].lookup(STATE) == [False, False, True, True]
        for keys, caches in ((FULL, [0, 1]), (STATE[2:], [8, 9, 10])):
            for outcome in get(ranks, 99 + caches[0], keys, caches).values():
                assert set(outcome.status.values()) == {0}
        serving.assert_idle()
        assert ranks[0].stats()["chunks_committed"] == 6


def test_request_that_mixes_parts_is_refused():
    for message in (Get(7, [0, 8], pack_keys(FULL)), Put(7, 1, [0, 8], pack_keys(FULL))):
        with Serving() as serving:
            (rank,) = serving.join(hybrid())
            rank.send(message)
            assert "different parts" in rank.expect(Failed).reason


def test_ranks_that_disagree_on_a_cache_s_part_are_refused():
    caches = hybrid(2)
    caches[1][0] = CacheDecl(0, "attention.0", 4 * KiB, 1, 2, part=1)
    with Serving() as serving, pytest.raises((GatewayError, AssertionError), match="parts 0 and 1"):
        serving.join(caches)


@pytest.mark.parametrize("fragment_size", [128 * KiB, 261_120])
@pytest.mark.parametrize("state_bytes", [2 * MiB + 4096, 3 * MiB, 2_293_768])
def test_objects_of_two_to_three_mib_beside_small_ones(state_bytes, fragment_size):
    """A state of a hybrid model is 9 to 24 fragments; the ring is cut for it."""
    caches = hybrid(attention=32 * KiB, state=state_bytes)
    card = memory_card(capacity_bytes=128 * MiB, max_value_bytes=256 * KiB, num_databases=3)
    with Serving(card, shared_memory_size=32 * MiB, fragment_size=fragment_size) as serving:
        (rank,) = serving.join(caches)
        assert rank.mapping.header.io_size >= state_bytes
        put([rank], 1, FULL, [0, 1])
        put([rank], 1, STATE, [8, 9, 10])
        committed(rank, np.concatenate([FULL, STATE]))
        for keys, names in ((STATE, [8, 9, 10]), (FULL, [0, 1])):
            (outcome,) = get([rank], 50 + names[0], keys, names).values()
            assert set(outcome.status.values()) == {0}
        serving.assert_idle()
        per_state = -(-state_bytes // serving.server._store.fragment_size)
        assert 9 <= per_state <= 24
        small, commits = 8, 8
        assert rank.stats()["card_values"] == 12 * per_state + small + commits


def test_part_is_read_ahead_by_itself():
    with Serving(shared_memory_size=1 << 20) as serving:
        rank, scheduler = serving.join(hybrid(), scheduler=True)
        put([rank], 1, FULL, [0, 1])
        put([rank], 1, STATE, [8, 9, 10])
        committed(rank, np.concatenate([FULL, STATE]))
        scheduler.send(Ahead(1, pack_keys(STATE), part=1))
        wait_until(lambda: rank.stats().get("objects_read_ahead", 0) == 12, 5, "all were read")
        (outcome,) = get([rank], 58, STATE, [8]).values()
        assert set(outcome.status.values()) == {0}
        assert rank.stats()["objects_taken_ahead"] == len(STATE)
        scheduler.send(Ahead(2, pack_keys(FULL), part=7))
        wait_until(lambda: rank.stats().get("bad_messages") == 1, 5, "there is no such part")

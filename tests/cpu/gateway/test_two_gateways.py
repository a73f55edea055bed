"""Two engines on one server, each with a gateway of its own: real gateways, real SDK clients.

What they must not share (address, ring, slab) they can't; what they may share (a Valkey) they
may use at the same moment.
"""

import os
import signal

import numpy as np
import pytest

from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.gateways import Gateway
from tests.support.process import ChildError, wait_until
from tests.support.serving import random_chunks
from tests.support.valkey import ValkeyServer

RING = {"shared_memory_size": 64 * 16384}
CHUNKS, BLOCKS = random_chunks(4), blocks_of(0, 2, 4, 6)
POISON = 0xA5


@pytest.fixture(scope="module", autouse=True)
def valkey():
    """A server for the tests that share one; made before what counts a test's children."""
    with ValkeyServer() as server:
        yield server


def slab_gateway(path, address=None):
    """Return a gateway with a slab card in a directory."""
    options = {"path": path, "capacity_bytes": "16MiB", "lock_wait_s": 0.1}
    return Gateway.serve("slab", options, address, **RING)


def team_of(address, its_pools, **how):
    """Return clients that wait for a gateway whose turn does not come on a busy machine."""
    return Team(address, its_pools, timeout_s=15.0, **how)


def kept(team):
    """Return the bytes of the team's pages, by rank and cache."""
    return [{c.index: pool.pages(c.index, BLOCKS) for c in pool.caches} for pool in team.pools]


def restored(team, number):
    """Restore all chunks into pages that held something else; return their bytes."""
    for pool in team.pools:
        pool.clear()
    assert not any(job.failed_chunks.any() for job in team.restore(number, CHUNKS, BLOCKS))
    return kept(team)


def same(found, wanted):
    return all(
        np.array_equal(pages, rank[index])
        for rank, others in zip(wanted, found, strict=True)
        for index, pages in others.items()
    )


def other_pools(world_size):
    """Return pools whose bytes are no other's."""
    made = pools(world_size)
    for rank, pool in enumerate(made):
        pool.fill(100 + rank)
    return made


def test_two_engines_of_a_server_never_meet(tmp_path):
    """The same keys in both, other bytes; one gateway by TCP, one by ipc; one is killed."""
    with (
        slab_gateway(tmp_path / "a") as a,
        slab_gateway(tmp_path / "b", f"ipc://{tmp_path}/b.sock") as b,
        team_of(a.address, pools(2), engine="a").start() as one,
        team_of(b.address, other_pools(2), engine="b").start() as two,
    ):
        rings = {rank.welcome.ring_path for team in (one, two) for rank in team.ranks}
        assert len(rings) == 2, "each gateway has a ring of its own"
        want_one, want_two = kept(one), kept(two)
        one.save(1, CHUNKS[:2], BLOCKS[:2])
        assert two.stored(CHUNKS) == [False] * 4
        jobs = [team.jobs(2, CHUNKS, BLOCKS) for team in (one, two)]
        for team, mine in zip((one, two), jobs, strict=True):
            team.submit_saves(mine)
        for team, mine in zip((one, two), jobs, strict=True):
            finish(mine)
            wait_until(lambda t=team: all(t.stored(CHUNKS)), 5, "stored")
        assert same(restored(one, 3), want_one)
        assert same(restored(two, 3), want_two)
        a.kill9()
        wait_until(lambda: all(client.off for client in one.clients), 10, "one is off")
        assert same(restored(two, 4), want_two)
        assert not any(client.off for client in two.clients)
        b.stop()
    with (
        slab_gateway(tmp_path / "a") as a,
        team_of(a.address, pools(2), engine="a").start() as one,
    ):
        assert same(restored(one, 1), want_one), "its card is where it was"


def test_second_gateway_on_the_same_slab_does_not_start(tmp_path):
    """It says why and what to do; the first serves on, and its successor finds everything."""
    with slab_gateway(tmp_path / "card") as first:
        with team_of(first.address, pools(1)).start() as team:
            want = kept(team)
            with pytest.raises(ChildError) as refused:
                slab_gateway(tmp_path / "card")
            told = str(refused.value)
            assert "exit status 2" in told
            assert f"path {tmp_path}/card: another process has this card open" in told
            assert "a path of its own" in told
            assert "Traceback" not in told
            team.save(1, CHUNKS, BLOCKS)
            assert same(restored(team, 2), want)
        first.kill9()
    with (
        slab_gateway(tmp_path / "card") as successor,
        team_of(successor.address, pools(1)).start() as team,
    ):
        assert same(restored(team, 1), want)


def test_slab_of_a_frozen_gateway_is_not_taken(tmp_path):
    """It may go on and write: the lock holds until its process has ended."""
    with slab_gateway(tmp_path / "card") as first:
        os.kill(first.child.pid, signal.SIGSTOP)
        with pytest.raises(ChildError, match="another process has this card open"):
            slab_gateway(tmp_path / "card")
        os.kill(first.child.pid, signal.SIGCONT)
        first.stop()
    with slab_gateway(tmp_path / "card") as successor:
        successor.stop()


def test_second_engine_at_a_gateway_in_use_is_off_with_the_reason(tmp_path):
    """Two engines were given one address: the first is served, the other says what is wrong."""
    with (
        slab_gateway(tmp_path / "card") as gateway,
        team_of(gateway.address, pools(1), engine="one").start() as one,
    ):
        with team_of(gateway.address, pools(1), engine="two", connect_timeout_s=1.0) as two:
            two.start(settle=False)
            wait_until(lambda: two.ranks[0].off, 10, "the other is off")
            assert "serves engine one" in two.ranks[0].off_reason
        want = kept(one)
        one.save(1, CHUNKS, BLOCKS)
        assert same(restored(one, 2), want)


def resp_gateway(valkey, **options):
    return Gateway.serve("resp", {"endpoints": valkey.tcp} | options, **RING)


def test_two_gateways_store_the_same_chunks_at_once_and_both_restore(valkey):
    """Engines of one namespace and model: who comes second copies what the first has not yet."""
    valkey.client.flushall()
    with (
        resp_gateway(valkey) as a,
        resp_gateway(valkey) as b,
        team_of(a.address, pools(2), engine="a").start() as one,
        team_of(b.address, pools(2), engine="b").start() as two,
    ):
        want = kept(one)
        jobs = [team.jobs(1, CHUNKS, BLOCKS) for team in (one, two)]
        for team, mine in zip((one, two), jobs, strict=True):
            team.submit_saves(mine)
        for mine in jobs:
            finish(mine)
        for team in (one, two):
            wait_until(lambda t=team: all(t.stored(CHUNKS)), 5, "stored")
            assert same(restored(team, 2), want)
        # 4 chunks of 3 objects in 1 fragment each, and their commit records, once.
        assert valkey.client.dbsize() == 4 * 3 + 4


def test_chunk_lost_to_one_gateway_is_no_hit_of_the_other(valkey):
    """A get that finds an object missing takes the commit record away for both."""
    valkey.client.flushall()
    with (
        resp_gateway(valkey) as a,
        resp_gateway(valkey) as b,
        team_of(a.address, pools(1), engine="a").start() as one,
        team_of(b.address, pools(1), engine="b").start() as two,
    ):
        one.save(1, CHUNKS, BLOCKS)
        assert two.stored(CHUNKS) == [True] * 4
        longest = max(valkey.client.keys(), key=valkey.client.strlen)
        valkey.client.delete(longest)
        (job,) = two.restore(2, CHUNKS, BLOCKS)
        assert job.failed_chunks.sum() == 1
        expected = (~job.failed_chunks).tolist()
        assert two.stored(CHUNKS) == expected
        assert one.stored(CHUNKS) == expected


def test_key_prefix_keeps_two_deployments_of_a_server_apart(valkey):
    """Below the namespaces: the same keys, and neither finds the other's."""
    valkey.client.flushall()
    with (
        resp_gateway(valkey, key_prefix="a:") as a,
        resp_gateway(valkey, key_prefix="b:") as b,
        team_of(a.address, pools(1), engine="a").start() as one,
        team_of(b.address, other_pools(1), engine="b").start() as two,
    ):
        want = kept(one)
        one.save(1, CHUNKS, BLOCKS)
        assert two.stored(CHUNKS) == [False] * 4
        two.save(1, CHUNKS, BLOCKS)
        assert same(restored(one, 2), want)


def test_gateways_with_other_fragment_sizes_read_nothing_wrong(valkey):
    """A mistake: the size is in no key. Each finds the other's chunks and can't load them."""
    valkey.client.flushall()
    with (
        Gateway.serve("resp", {"endpoints": valkey.tcp}, fragment_size=1024, **RING) as a,
        Gateway.serve("resp", {"endpoints": valkey.tcp}, fragment_size=4096, **RING) as b,
        team_of(a.address, pools(1), engine="a").start() as one,
        team_of(b.address, pools(1), engine="b").start() as two,
    ):
        want = kept(one)
        one.save(1, CHUNKS, BLOCKS)
        for reader, writer in ((two, one), (one, two)):
            assert reader.stored(CHUNKS) == [True] * 4
            for pool in reader.pools:
                pool.clear()
            (job,) = reader.restore(2, CHUNKS, BLOCKS)
            assert job.failed_chunks.all()
            found = kept(reader)
            for right, pages in zip(want[0].values(), found[0].values(), strict=True):
                rows = zip(pages, right, strict=True)
                assert all(np.array_equal(page, r) or (page == POISON).all() for page, r in rows)
            assert writer.stored(CHUNKS) == [False] * 4
            for index, right in want[0].items():
                reader.pools[0].memory[index][BLOCKS.reshape(-1), : right.shape[1]] = right
            reader.save(3, CHUNKS, BLOCKS)
            assert same(restored(reader, 4), want)

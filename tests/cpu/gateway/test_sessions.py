"""Engines that come and go: Hello, refusals, liveness, successors."""

import os
import signal
import time

import msgspec
import pytest

from adp_kv.errors import RingError
from adp_kv.ring import region
from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import (
    Attached,
    CacheDecl,
    Get,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refused,
    Welcome,
)
from gateway.server import RETRY
from gateway.session import Session
from tests.support.clock import FakeClock
from tests.support.process import Child, wait_until
from tests.support.serving import (
    NAMESPACE,
    Serving,
    random_chunks,
    replicated,
    sharded,
    staged,
    store,
)

DECL = CacheDecl(0, "layer.0", 4096, 0, 1)


def test_ring_is_named_until_all_ranks_attached():
    with Serving() as serving:
        ranks = [serving.rank(i, c, world_size=2) for i, c in enumerate(replicated(1, 2))]
        path = region.ring_path(serving.settings.effective_ring_name)
        for rank in ranks:
            assert not path.exists()
            rank.send(rank.hello)
        welcomes = [rank.welcomed() for rank in ranks]
        assert welcomes[0] == welcomes[1]
        assert path.exists()
        assert path.stat().st_mode & 0o777 == 0o600
        for rank, welcome in zip(ranks, welcomes, strict=True):
            assert path.exists()
            rank.attach(welcome)
        wait_until(lambda: not path.exists(), 5, "the ring's name is gone")


def test_welcome_names_the_ring_s_numbers():
    with Serving(shared_memory_size=32 * 4096, fragment_size=1000) as serving:
        rank = serving.rank(0, [DECL, CacheDecl(8, "layer.1", 5000, 0, 1)])
        rank.send(rank.hello)
        welcome = rank.welcomed()
        assert (welcome.io_size, welcome.num_slots) == (5000, 8)
        assert welcome.fragment_size == 1000


@pytest.mark.parametrize("make", [replicated, sharded, staged])
def test_geometry_tells_layouts_apart(make):
    seen = set()
    for caches in (make(4, 2), make(4, 2, 8192), make(5, 2), make(4, 4)):
        with Serving(shared_memory_size=1 << 20) as serving:
            ranks = [serving.rank(i, c, world_size=len(caches)) for i, c in enumerate(caches)]
            for rank in reversed(ranks):
                rank.send(rank.hello)
            seen.add(ranks[0].welcomed().geometry)
    assert len(seen) == 4


def refused(rank):
    rank.send(rank.hello)
    return rank.expect(Refused).reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "protocol 99"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 1 << 40}, "world_size"),
        ({"rank": 1}, "rank 1"),
        ({"rank": -2}, "rank -2"),
        ({"namespace": b"short"}, "16 bytes"),
        ({"caches": [CacheDecl(0, "a", 0, 0, 1)]}, "'a'"),
        ({"caches": [CacheDecl(0, "a", 1 << 50, 0, 1)]}, "'a'"),
        ({"caches": [CacheDecl(-1, "a", 1, 0, 1)]}, "'a'"),
        ({"caches": [CacheDecl(1 << 16, "a", 1, 0, 1)]}, "'a'"),
        ({"caches": [CacheDecl(0, "a", 1, 0, 0)]}, "'a'"),
        ({"caches": [DECL, DECL]}, "twice"),
        ({"caches": []}, "no cache"),
        ({"caches": [CacheDecl(0, "a", 1, 0, 2)]}, "no rank holds slice 1"),
        ({"caches": [CacheDecl(0, "a", 1, 2, 2)]}, "slice 2"),
        ({"caches": [CacheDecl(0, "a", 1, -1, 2)]}, "slice -1"),
    ],
)
def test_wrong_hello_is_refused_and_next_served(change, reason):
    with Serving() as serving:
        rank = serving.rank(0, [DECL])
        rank.hello = msgspec.structs.replace(rank.hello, **change)
        assert reason in refused(rank)
        store(serving.join(replicated(1, 2), engine="next"), random_chunks(2))


@pytest.mark.parametrize(
    "change",
    [{"world_size": 3}, {"namespace": bytes(16)}],
)
def test_contradicting_rank_is_refused(change):
    with Serving() as serving:
        first, second = (serving.rank(i, [DECL], world_size=2) for i in range(2))
        first.send(first.hello)
        assert first.silent(0.1)
        wrong = serving.rank(1, [DECL], world_size=2)
        wrong.hello = msgspec.structs.replace(wrong.hello, **change)
        assert "says" in refused(wrong)
        second.send(second.hello)
        first.welcomed()
        second.welcomed()


@pytest.mark.parametrize(
    "other",
    [
        CacheDecl(0, "layer.0", 8192, 0, 1),
        CacheDecl(0, "another", 4096, 0, 1),
        CacheDecl(0, "layer.0", 4096, 0, 1, "another"),
        CacheDecl(0, "layer.0", 4096, 1, 2),
    ],
)
def test_ranks_with_different_caches_end_for_all(other):
    with Serving() as serving:
        ranks = [serving.rank(i, [c], world_size=2) for i, c in enumerate((DECL, other))]
        ranks[0].send(ranks[0].hello)
        assert ranks[0].silent(0.1)
        assert "cache" in refused(ranks[1])
        for rank in ranks:
            assert "cache" in rank.expect_goodbye()
        store(serving.join(replicated(1, 2), engine="next"), random_chunks(1))


def test_one_peer_is_one_rank():
    with Serving() as serving:
        rank = serving.rank(0, [DECL], world_size=2)
        rank.send(rank.hello)
        assert rank.silent(0.1)
        rank.hello = msgspec.structs.replace(rank.hello, rank=1)
        assert "rank 0" in refused(rank)


def test_repeated_hello_changes_nothing():
    with Serving() as serving:
        ranks = [serving.rank(i, [DECL], world_size=2) for i in range(2)]
        for _ in range(3):
            ranks[0].send(ranks[0].hello)
        assert ranks[0].silent(0.1)
        ranks[1].send(ranks[1].hello)
        ranks[1].welcomed()
        assert isinstance(ranks[0].receive(), Welcome)
        assert ranks[0].silent(0.1)


def test_waiting_rank_hears_from_the_gateway():
    with Serving() as serving:
        rank = serving.rank(0, [DECL], world_size=2)
        heard = rank.channel._last_heard
        rank.send(rank.hello)
        assert rank.silent(0.2)
        assert rank.channel._last_heard > heard


def test_rank_that_waits_long_is_not_dead():
    clock = FakeClock()
    with Serving(clock=clock, liveness_s=60) as serving:
        ranks = [serving.rank(i, [DECL], world_size=2) for i in range(2)]
        for _ in range(4):
            ranks[0].send(ranks[0].hello)
            assert ranks[0].silent(0.15)
            clock.advance(40)
        ranks[1].send(ranks[1].hello)
        ranks[0].send(ranks[0].hello)
        ranks[1].welcomed()
        ranks[0].welcomed()


def test_repeated_hello_is_a_sign_of_life():
    session = Session("engine", 2, NAMESPACE)
    hello = Hello(1, "test", "engine", 0, 2, NAMESPACE, [DECL], 1)
    session.join(b"peer", hello, now=10.0)
    session.join(b"peer", hello, now=25.0)
    assert session.members[0].last_seen == 25.0


def test_silent_rank_ends_session():
    clock = FakeClock()
    with Serving(clock=clock, liveness_s=60) as serving:
        ranks = serving.join(replicated(1, 2))
        assert ranks[1].lookup(random_chunks(1)) == [False]  # its last word
        clock.advance(50)
        ranks[0].send(Ping(1))
        assert ranks[0].silent(0.3)
        clock.advance(20)
        for rank in ranks:
            assert "rank 1" in rank.expect_goodbye()


def test_goodbye_of_a_rank_ends_session_for_all():
    with Serving() as serving:
        ranks = serving.join(replicated(1, 2), scheduler=True)
        ranks[1].send(Goodbye("shut down"))
        for rank in ranks:
            assert "rank 1 left: shut down" in rank.expect_goodbye()
        store(serving.join(replicated(1, 2), engine="next"), random_chunks(1))


def test_unknown_peer_is_told():
    with Serving() as serving:
        ranks = serving.join(replicated(1, 1))
        for message in (Ping(1), Get(1, [0], b"x" * 16), Attached(1)):
            stranger = serving.rank(0)
            stranger.send(message)
            assert "does not know you" in stranger.expect_goodbye()
        stranger = serving.rank(0)
        stranger.send(Pong(1))
        stranger.send(Goodbye("never mind"))
        assert stranger.silent(0.1)
        assert "serves" not in stranger.stats()
        store(ranks, random_chunks(1))


def test_rank_that_dies_within_a_get_ends_session():
    chunks = random_chunks(2)
    with Serving() as serving:
        ranks = serving.join(replicated(1, 3))
        store(ranks, chunks)
        for rank in ranks[1:]:
            rank.send(Get(5, [0], pack_keys(chunks)))
            rank.lookup(chunks)  # it has arrived
        ranks[2].close()
        time.sleep(0.3)  # until the gateway's socket has seen the connection go
        ranks[0].send(Get(5, [0], pack_keys(chunks)))
        for rank in ranks[:2]:
            assert "rank 2" in rank.expect_goodbye()
        store(serving.join(replicated(1, 2), engine="next"), random_chunks(1, seed=4))


def test_wrong_ring_attached_is_refused():
    with Serving() as serving:
        rank = serving.rank(0, [DECL])
        rank.send(rank.hello)
        welcome = rank.welcomed()
        rank.send(Attached(welcome.generation ^ 1))
        assert rank.stats()["bad_messages"] == 1
        path = region.ring_path(serving.settings.effective_ring_name)
        assert path.exists()
        rank.attach(welcome)
        wait_until(lambda: not path.exists(), 5, "withdrawn")


def test_second_engine_waits_while_first_lives():
    with Serving() as serving:
        (rank,) = serving.join(replicated(1, 1), engine="one")
        other = serving.rank(0, [DECL], engine="two")
        reason = refused(other)
        assert reason.startswith(RETRY)
        assert "serves engine one" in reason
        store([rank], random_chunks(1))
        rank.close("bye")
        other.send(other.hello)
        other.welcomed()


@pytest.mark.parametrize("engine", ["first", "second"])
def test_engine_killed_makes_room_for_next(engine):
    with Serving() as serving:
        script = (
            "import sys, time\n"
            "from tests.support.serving import Rank, replicated\n"
            f"rank = Rank({serving.address!r}, 0, replicated(1, 1)[0], engine='first')\n"
            "rank.send(rank.hello); rank.attach(rank.welcomed()); print('in', flush=True)\n"
            "time.sleep(60)\n"
        )
        child = Child([os.sys.executable, "-c", script], {}, "rank")
        try:
            child.wait_for_log("in", 10)
            first = serving.server._engine._ring.generation
            os.kill(child.pid, signal.SIGKILL)
            child.popen.wait()
            (rank,) = serving.join(replicated(1, 1), engine=engine)
            assert rank.mapping.header.generation != first
            store([rank], random_chunks(2))
        finally:
            child.cleanup()


def test_ring_too_small_ends_with_the_number():
    with Serving(shared_memory_size=4 * 4096) as serving:
        rank = serving.rank(0, [CacheDecl(0, "big", 3 * 4096, 0, 1)])
        assert str(6 * 4096) in refused(rank)
        store(serving.join(replicated(1, 1), engine="next"), random_chunks(1))


def test_no_room_for_a_ring_is_retried(monkeypatch):
    full = [False]
    check = region._check_room

    def maybe_full(directory, needed):
        if full[0]:
            raise RingError(f"{directory} is full, the ring needs {needed} bytes")
        check(directory, needed)

    monkeypatch.setattr(region, "_check_room", maybe_full)
    with Serving() as serving:
        (rank,) = serving.join(replicated(1, 1))
        full[0] = True
        rank.close("bye")
        wait_until(lambda: serving.server._engine is None, 5, "the engine is gone")
        other = serving.rank(0, [DECL], engine="next")
        reason = refused(other)
        assert reason.startswith(RETRY)
        assert str(64 * 4096 + 4096) in reason
        full[0] = False
        other.send(other.hello)
        other.attach(other.welcomed())
        store([other], random_chunks(1))


def test_name_in_use_ends_the_engine_cleanly():
    with Serving() as serving:
        name = serving.settings.effective_ring_name
        with region.RingFile(name, 8192) as living:
            living.divide(4096)
            living.publish()
            rank = serving.rank(0, [DECL])
            assert "another ring_name" in refused(rank)
            wait_until(lambda: serving.server._engine is None, 5, "the engine is gone")
            assert living.path.exists()
        store(serving.join(replicated(1, 1), engine="next"), random_chunks(1))


def test_register_and_unregister_pair_up():
    calls = []
    with Serving() as serving:
        serving.card.register = lambda *where: calls.append("register")
        serving.card.unregister = lambda: calls.append("unregister")
        with region.RingFile(serving.settings.effective_ring_name, 8192) as living:
            living.divide(4096)
            living.publish()
            refused(serving.rank(0, [DECL]))
            wait_until(lambda: serving.server._engine is None, 5, "the engine is gone")
        (rank,) = serving.join(replicated(1, 1), engine="next")
        rank.close("bye")
        wait_until(lambda: serving.server._engine is None, 5, "the engine is gone")
    assert calls == ["register", "unregister"]


def test_unexpected_error_ends_session_not_gateway():
    with Serving() as serving:
        (rank,) = serving.join(replicated(1, 1))
        serving.server._engine.lookup = None  # any programming error
        with pytest.raises(Exception, match="ended the session"):
            rank.lookup(random_chunks(1))
        store(serving.join(replicated(1, 1), engine="next"), random_chunks(1))


def test_peer_that_left_costs_one_line(caplog):
    """Whatever it had sent before: a gateway that stood still finds a ping a second."""
    caplog.set_level("INFO", "adp_kv.gateway")
    with Serving() as serving:
        server = serving.server
        for peer in (b"first", b"second", b"first"):
            told = serving.on_main(
                lambda peer=peer: [server._deliver(peer, Pong(0)) for _ in range(3)]
            )
            assert not any(told)
        lines = [text for text in caplog.messages if "is not reachable" in text]
    assert [line.split()[1] for line in lines] == [b"first".hex(), b"second".hex()]

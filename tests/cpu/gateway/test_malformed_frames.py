"""A gateway that is fed nonsense goes on serving."""

import random

import pytest

from adp_kv.wire.frames import encode
from adp_kv.wire.messages import (
    NO_SLOT,
    Ahead,
    Attached,
    Forget,
    Get,
    Goodbye,
    Hello,
    Inspect,
    Lookup,
    Ping,
    Put,
    Release,
    StatsRequest,
)
from tests.support.serving import Serving, get, random_chunks, replicated, store

VALID = [
    encode(message)
    for message in (
        Hello(1, "x", "another", 0, 2, bytes(16), [], 1),
        Attached(3),
        Lookup(1, bytes(32)),
        Ahead(1, bytes(32), 0),
        Forget(1),
        Get(5, [0, 1], bytes(32)),
        Put(6, 2, [0], bytes(32)),
        Release(5, 0, ok=True),
        Ping(NO_SLOT),
        StatsRequest(),
        Inspect(7, bytes(16)),
    )
]


def cut(rng, valid):
    return [valid[: rng.randrange(len(valid))]]


def damaged(rng, valid):
    at = rng.randrange(len(valid))
    return [valid[:at] + rng.randbytes(1) + valid[at + 1 :]]


def meaningless(rng, _valid):
    """A whole message whose numbers, caches and keys fit nothing."""
    numbers = [rng.choice([-(1 << 63), -1, 0, 1, 5, 6, (1 << 64) - 1]) for _ in range(2)]
    caches = [rng.choice([-1, 0, 1, 2, 1 << 62]) for _ in range(rng.randrange(4))]
    keys = rng.randbytes(rng.choice([0, 15, 16, 32, 48]))
    messages = [
        Get(numbers[0], caches, keys),
        Put(numbers[0], numbers[1], caches, keys),
        Release(numbers[0], numbers[1], ok=rng.random() < 0.5),
        Lookup(numbers[0], keys),
        Ahead(numbers[0], keys, numbers[1] % 3),
        Forget(numbers[0]),
        Attached(numbers[0]),
    ]
    return [encode(rng.choice(messages))]


KINDS = [
    lambda rng, valid: [rng.randbytes(rng.randrange(60))],
    lambda rng, valid: [valid + valid],
    lambda rng, valid: [valid, rng.choice(VALID)],
    lambda rng, valid: [b""] * rng.randrange(1, 4),
    cut,
    damaged,
    meaningless,
]


def nonsense(rng):
    """Return the frames of one message that means nothing, or not what it should."""
    return rng.choice(KINDS)(rng, rng.choice(VALID))


def flood(count, seed):
    """Return how many of so many messages the gateway found to be bad."""
    rng = random.Random(seed)
    with Serving(
        shared_memory_size=1 << 20, job_deadline_s=0.5, rank_deadline_s=0.3, log_level="ERROR"
    ) as serving:
        ranks = serving.join(replicated(2, 2), scheduler=True)
        chunks = random_chunks(3)
        store(ranks[:2], chunks)
        strangers = [serving.rank(0) for _ in range(2)]
        for stranger in strangers:
            stranger.send(Ping(1))
        peers = strangers + ranks
        for number in range(1, count + 1):
            peer = rng.choice(peers)
            peer.send_raw(*nonsense(rng))
            drain(peer)
            if number % 10_000 == 0:  # no peer's queue may fill while its reader lags
                for one in peers:
                    await_answer(one)
        for peer in peers:
            await_answer(peer)
        assert serving.alive
        assert serving.server._engine.ended is None
        assert serving.error is None
        assert serving.server.counters["bad_messages"] > count / 4
        assert "unexpected_errors" not in serving.server.counters
        found = serving.server.counters["bad_messages"]
        after_the_flood(serving, ranks, chunks)
        return found


def drain(peer):
    """Throw away what has come; a Goodbye too."""
    while peer.channel._socket.poll(0):
        peer.channel._socket.recv_multipart()


def await_answer(peer):
    """Wait until the gateway has handled everything this peer sent."""
    peer.send(StatsRequest())
    while b"stats_reply" not in peer.channel._socket.recv_multipart()[0]:
        pass


def after_the_flood(serving, ranks, chunks):
    """The engine that was fed nonsense ends; the next finds what it had stored."""
    ranks[0].send(Goodbye("enough"))
    fresh = serving.join(replicated(2, 2), engine="next")
    assert fresh[0].lookup(chunks) == [True] * 3
    assert set(get(fresh, 5, chunks, [0, 1])[0].status.values()) == {0}
    serving.assert_idle()


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_bad_messages_are_survived(seed, caplog):
    caplog.set_level("WARNING", logger="adp_kv")
    found = flood(3000, seed)
    lines = [text for text in caplog.messages if text.startswith("message from peer ")]
    assert len(lines) == found, "a line each"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_million_bad_messages_are_survived(caplog):
    caplog.set_level("ERROR", logger="adp_kv")  # or a million warnings are kept in memory
    flood(1_000_000, 99)


def test_deep_frame_costs_only_its_sender_a_line():
    with Serving() as serving:
        (rank,) = serving.join(replicated(1, 1))
        deep = encode(Ping(1)).replace(b"\x82", b"\x83", 1) + b"\xa1x" + b"\x91" * 50000 + b"\xc0"
        rank.send_raw(deep)
        assert rank.stats()["bad_messages"] == 1
        store([rank], random_chunks(1))

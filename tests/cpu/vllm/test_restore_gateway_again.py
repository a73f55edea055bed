"""The gateway is killed and started again while the engine lives.

Without `reconnect` the engine stays off until it is restarted too; with it, later requests
find what was stored. Either way tokens are those of an engine without a cache.
"""

import time

import pytest

from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.engine import Engine
from tests.support.process import ChildError, wait_until

pytestmark = pytest.mark.vllm

CHUNK = 128
PROMPT = prompt(81, 3 * CHUNK + 9)
OTHER = prompt(82, 2 * CHUNK + 5)
TOKENS = 8


@pytest.fixture(scope="module")
def want(engine):
    engine.start("llama")
    return [done.token_ids for done in engine.generate([PROMPT, OTHER], max_tokens=TOKENS)]


def say(engine, tokens):
    """Return (tokens, cached prompt tokens), without vLLM's own prefix cache."""
    wait_until(lambda: _reset(engine), 20, "no block is pinned any more")
    (done,) = engine.generate([tokens], max_tokens=TOKENS)
    return done.token_ids, done.num_cached_tokens


def _reset(engine):
    try:
        engine.reset_prefix_cache()
    except ChildError:
        engine.generate([prompt(90, 3)], max_tokens=1)  # a step, so that reports come in
        return False
    return True


def store_first(engine, deployment, want, **settings):
    engine.start("llama", deployment.connector(chunk_size=CHUNK, **settings))
    assert say(engine, PROMPT) == (want[0], 0)
    deployment.wait_committed(3)


def test_restarted_gateway_is_left_alone_without_reconnect(engine, want, tmp_path):
    with Deployment(tmp_path) as deployment:
        before = off_lines(engine.child.log())
        store_first(engine, deployment, want)
        assert not deployment.gateway.rings(), "nothing is there that somebody could remove"
        deployment.kill9()
        deployment.restart()
        for _ in range(3):
            assert say(engine, PROMPT) == (want[0], 0)
        wait_until(lambda: off_lines(engine.child.log()) > before, 20, "the rank is off")
        assert say(engine, PROMPT) == (want[0], 0)
        assert off_lines(engine.child.log()) == before + 1
        assert deployment.counters().get("lookups", 0) == 0


def test_restarted_gateway_is_taken_up_with_reconnect(engine, want, tmp_path):
    with Deployment(tmp_path) as deployment:
        before = off_lines(engine.child.log())
        store_first(engine, deployment, want, reconnect=True, connect_timeout_s=20)
        for life in (1, 2):
            deployment.kill9()
            began = time.monotonic()
            assert say(engine, PROMPT) == (want[0], 0)
            assert time.monotonic() - began < 20, "nobody waits for a gateway that is gone"
            wait_until(
                lambda: off_lines(engine.child.log()) == before + life,  # noqa: B023
                20,
                "the rank is off",
            )
            deployment.restart()
            wait_until(lambda: say(engine, PROMPT) == (want[0], 3 * CHUNK), 60, "hits are back")
            assert say(engine, OTHER)[0] == want[1]
            if life == 1:
                deployment.wait_committed(2)
        assert off_lines(engine.child.log()) == before + 2
        assert engine.child.log().count("cache is back on this rank") == 2
        assert say(engine, OTHER) == (want[1], 2 * CHUNK)


@pytest.mark.slow
def test_restarted_gateway_is_taken_up_by_both_ranks(want, tmp_path):
    """At TP 2, scheduler and workers in processes of their own; what both lives stored is found."""
    with Deployment(tmp_path) as deployment, Engine(separate_core=True) as engine:
        connector = deployment.connector(chunk_size=CHUNK, reconnect=True, connect_timeout_s=20)
        engine.start("llama", connector, tensor_parallel_size=2)
        assert say(engine, PROMPT) == (want[0], 0)
        deployment.wait_committed(3)
        for life in (1, 2):
            deployment.kill9()
            assert say(engine, PROMPT) == (want[0], 0)
            wait_until(
                lambda: off_lines(engine.child.log()) == 2 * life,  # noqa: B023
                30,
                "both ranks are off, once",
            )
            deployment.restart()
            wait_until(lambda: say(engine, PROMPT) == (want[0], 3 * CHUNK), 90, "hits are back")
            assert engine.child.log().count("cache is back on this rank") == 2 * life
            if life == 1:
                assert say(engine, OTHER) == (want[1], 0)
                deployment.wait_committed(2)
        wait_until(
            lambda: say(engine, OTHER) == (want[1], 2 * CHUNK), 90, "a hit of the life before"
        )
        assert off_lines(engine.child.log()) == 4

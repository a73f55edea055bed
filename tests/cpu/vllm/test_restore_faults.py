"""A real engine beside a gateway that stands still, and a gateway beside an engine that dies.

Phases of single requests are in tests/cpu/sdk/test_gateway_faults.py and test_rank_death.py;
here is what a user sees: tokens, log lines, and what the next engine finds.
"""

import os
import signal

import pytest

from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.engine import Engine
from tests.support.process import ChildError, wait_until

pytestmark = pytest.mark.vllm

CHUNK = 128
PROMPTS = [prompt(61, 3 * CHUNK + 9), prompt(62, 2 * CHUNK + 40)]
OTHER = prompt(63, CHUNK + 3)
HITS = [3 * CHUNK, 2 * CHUNK]


@pytest.fixture(scope="module")
def want(engine):
    """Return what an engine without a connector says, at length."""
    engine.start("llama")
    return [done.token_ids for done in engine.generate([*PROMPTS, OTHER], max_tokens=300)]


def test_frozen_gateway_while_serving(engine, want, tmp_path):
    """Generation goes on, one line, no request waits longer than the deadlines, nothing stays."""
    with Deployment(tmp_path) as deployment:
        before = off_lines(engine.child.log())
        settings = {"gateway_timeout_s": 8.0, "lookup_timeout_s": 2.0, "load_timeout_s": 8.0}
        engine.start("llama", deployment.connector(chunk_size=CHUNK, **settings))
        engine.generate(PROMPTS, max_tokens=1)
        deployment.wait_committed(5)
        engine.reset_prefix_cache()
        engine.begin_generate([OTHER], max_tokens=300)
        os.kill(deployment.gateway.child.pid, signal.SIGSTOP)
        assert [one.token_ids for one in engine.finish_generate()] == [want[2]]
        done = engine.generate(PROMPTS, max_tokens=20, timeout_s=60)
        assert [one.token_ids for one in done] == [tokens[:20] for tokens in want[:2]]
        wait_until(lambda: off_lines(engine.child.log()) == before + 1, 30, "the rank is off")
        engine.reset_prefix_cache()  # no block is still pinned
        again = engine.generate(PROMPTS, max_tokens=20)
        assert [one.token_ids for one in again] == [tokens[:20] for tokens in want[:2]]
        assert [one.num_cached_tokens for one in again] == [0, 0]
        os.kill(deployment.gateway.child.pid, signal.SIGCONT)
        wait_until(lambda: deployment.counters().get("sessions_ended", 0) == 1, 20, "it noticed")
        assert off_lines(engine.child.log()) == before + 1
        deployment.gateway.stop()  # leaves nothing in /dev/shm


@pytest.mark.slow
def test_killed_worker_and_engine_with_a_living_gateway(want, tmp_path):
    """A rank dies: vLLM ends its engine, the gateway ends the session and serves the next one."""
    with Deployment(tmp_path, liveness_s=10) as deployment:
        connector = deployment.connector(chunk_size=CHUNK)
        with Engine(separate_core=True) as engine:
            engine.start("llama", connector, tensor_parallel_size=2)
            engine.generate(PROMPTS, max_tokens=1)
            deployment.wait_committed(5)
            os.kill(engine.rpc("adp_pid")[1], signal.SIGKILL)
            with pytest.raises(ChildError) as ended:
                engine.generate([OTHER], max_tokens=300)
            assert "no reply" not in str(ended.value), "the engine says so, nobody waits for it"
            engine.kill9()
        wait_until(lambda: deployment.counters().get("sessions_ended", 0) == 1, 30, "it noticed")
        assert not deployment.gateway.rings()
        with Engine(separate_core=True) as engine:
            engine.start("llama", connector, tensor_parallel_size=2)
            done = engine.generate(PROMPTS, max_tokens=20)
            assert [one.token_ids for one in done] == [tokens[:20] for tokens in want[:2]]
            assert [one.num_cached_tokens for one in done] == HITS
            engine.shutdown()
        deployment.gateway.stop()

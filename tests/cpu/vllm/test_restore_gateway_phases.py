"""The gateway is killed, or stands still, in each phase of a real engine's lookups, gets and puts.

Each time: the same tokens, `External KV cache turned off on this rank` once a rank, no block
stays pinned, nothing in /dev/shm; and what the card has is found, nothing half written.

The engine goes on through all phases: with `reconnect` it takes up the next gateway. With one
rank the ring is so small that in each phase some of the objects also wait for slots.
"""

import os
import re
import signal

import pytest

from adp_kv.sdk.loop import ON_MESSAGE
from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.engine import Engine
from tests.support.phases import PHASES, Phases
from tests.support.process import wait_until

pytestmark = pytest.mark.vllm

CHUNK = 128
CHUNKS = 3
LAYERS = 4
TOKENS = 16
PROMPTS = {phase: prompt(810 + i, CHUNKS * CHUNK + 9) for i, phase in enumerate(PHASES)}
SHORT = prompt(99, 5)
FAULTS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
PATIENT = {"card_deadline_s": 300, "rank_deadline_s": 300}
SETTINGS = {
    "chunk_size": CHUNK,
    "reconnect": True,
    "connect_timeout_s": 60,
    "lookup_timeout_s": 40,
    "load_timeout_s": 100,
    "save_timeout_s": 100,
}


@pytest.fixture(scope="module")
def want(engine):
    """Return what an engine without a connector says."""
    engine.start("llama")
    done = engine.generate(list(PROMPTS.values()), max_tokens=TOKENS, logprobs=True)
    assert min(one.margin for one in done) > 1e-4, "rounding would decide: take another seed"
    return dict(zip(PROMPTS, (one.token_ids for one in done), strict=True))


def settings(fault, gateway_timeout_s=60):
    """Return the connector's; a gateway that was killed is noticed at once."""
    return SETTINGS | ({"gateway_timeout_s": gateway_timeout_s} if fault == "frozen" else {})


class Life:
    """An engine and the gateways it meets one after the other."""

    def __init__(self, engine, deployment, folder, ranks):
        self.engine, self.deployment, self.ranks = engine, deployment, ranks
        self.phases = Phases(engine, deployment, folder, ranks)
        self.off = off_lines(engine.child.log())

    def say(self, tokens):
        """Return (tokens, cached prompt tokens), without vLLM's own prefix cache."""
        done = self.engine.answer(tokens, TOKENS)
        return done.token_ids, done.num_cached_tokens

    def counted(self):
        """Return what both sides have counted, for a message."""
        ours = {k: v for k, v in self.engine.metrics().items() if "adp_kv" in k}
        return {k: v for k, v in (ours | self.deployment.counters()).items() if v}

    def lose(self, fault):
        """Kill the gateway, or let it stand still; return when every rank has noticed."""
        os.kill(self.deployment.gateway.child.pid, FAULTS[fault])
        self.off += self.ranks
        wait_until(lambda: off_lines(self.engine.child.log()) >= self.off, 60, "the ranks are off")
        self.phases.leave()

    def take_up(self, fault):
        """Bring a gateway back and return when the engine has taken it up."""
        log = self.engine.child.log
        ranks = log().count(ON_MESSAGE) + self.ranks
        lookups = log().count("lookups are back") + 1
        self.deployment.inject("")
        if fault == "frozen":
            os.kill(self.deployment.gateway.child.pid, signal.SIGCONT)
            # Kernels were seen to give a process that was stopped for long next to no time as
            # long as others want it: it must have had its turns before ranks compute.
            for _ in range(20):
                self.deployment.gateway.counters(60)
        else:
            assert not self.deployment.gateway.rings(), "the killed gateway left a ring"
            self.deployment.restart()

        def taken_up():
            self.engine.generate([SHORT], max_tokens=1)
            return log().count(ON_MESSAGE) == ranks and log().count("lookups are back") == lookups

        wait_until(taken_up, 90, "the engine has taken the gateway up")

    def go_through(self, phase, fault, want, *, may_fail=False):
        """Lose the gateway in a phase and take up the next.

        Args:
            phase: a name.
            fault: likewise.
            want: the tokens.
            may_fail: a request whose restore is cut off ends with an error.
        """
        tokens = PROMPTS[phase]
        is_put = phase.startswith("put")
        all_in_ring = ring_slots(self.deployment) >= CHUNKS * LAYERS
        if not is_put:
            before = self.deployment.counters().get("chunks_committed", 0)
            assert self.say(tokens) == (want, 0), "computed for the first time"
            self.deployment.wait_committed(before + CHUNKS)
            self.engine.reset_prefix_cache()
        self.phases.enter(phase, tokens, TOKENS)
        self.lose(fault)
        if phase != "idle":
            (done,) = self.engine.finish_generate(60)
            if may_fail and phase.startswith("get"):
                assert done.finish_reason == "error"
            else:
                assert done.token_ids == want
        assert self.say(tokens) == (want, 0), "the cache is off"
        assert off_lines(self.engine.child.log()) == self.off, "one line a rank"
        self.take_up(fault)
        # What a gateway had whole when it was stopped it commits when it goes on.
        whole = not is_put or (phase == "put writes" and fault == "frozen" and all_in_ring)
        before = self.deployment.counters().get("chunks_committed", 0)
        said = self.say(tokens)
        assert said == (want, CHUNKS * CHUNK if whole else 0), f"{phase}: {self.counted()}"
        if not whole:
            # Ranks in processes of their own may still be saving it; what the card gets late
            # would be taken for the next phase's.
            self.deployment.wait_committed(before + CHUNKS)
        assert off_lines(self.engine.child.log()) == self.off


def ring_slots(deployment):
    """Return how many ring slots a direction has."""
    return int(re.findall(r"max_parallel_ios = (\d+)", deployment.gateway.log())[-1])


ALONE = [phase for phase in PHASES if not phase.endswith("waits")]  # for a second rank


@pytest.mark.parametrize(
    ("fault", "phases"),
    [
        ("killed", ALONE),
        pytest.param("frozen", ["get reads"], marks=pytest.mark.slow),
        pytest.param("frozen", ALONE, marks=pytest.mark.slow),
    ],
    ids=["killed", "frozen", "frozen in all"],
)
def test_gateway_lost_in_each_phase(engine, want, tmp_path, fault, phases):
    with Deployment(tmp_path, faulty=True, shared_memory_size="2MiB", **PATIENT) as deployment:
        connector = deployment.connector("recompute", **settings(fault, 10))
        engine.start("llama", connector)
        assert ring_slots(deployment) < CHUNKS * LAYERS, "what is under way must not all fit"
        life = Life(engine, deployment, tmp_path, ranks=1)
        for phase in phases:
            life.go_through(phase, fault, want[phase])
        deployment.gateway.stop()


def test_gateway_killed_amid_a_layerwise_restore(engine, want, tmp_path):
    """The step waits for each layer; vLLM ends that request with an error and serves the next."""
    with Deployment(tmp_path, faulty=True, shared_memory_size="2MiB", **PATIENT) as deployment:
        connector = deployment.connector("fail", load_mode="layerwise", **settings("killed"))
        engine.start("llama", connector)
        life = Life(engine, deployment, tmp_path, ranks=1)
        life.go_through("get copies", "killed", want["get copies"], may_fail=True)
        deployment.gateway.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_gateway_lost_in_each_phase_of_two_ranks(want, tmp_path, fault):
    with Deployment(tmp_path, faulty=True, **PATIENT) as deployment:
        connector = deployment.connector("recompute", **settings(fault, 30))
        with Engine(separate_core=True) as engine:
            engine.start("llama", connector, tensor_parallel_size=2)
            engine.child.give_way()
            life = Life(engine, deployment, tmp_path, ranks=2)
            for phase in PHASES:
                life.go_through(phase, fault, want[phase])
            engine.shutdown()
        deployment.gateway.stop()

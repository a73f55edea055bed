"""The gateway is killed, or stands still, in each phase of a hybrid model's lookups, gets and puts.

A request whose restore is cut off is computed anew (windows, states), or the engine stops with
one message (windows, layer by layer: vLLM can't undo that). Nothing half restored is served.
"""

import os
import signal

import pytest

from adp_kv.sdk.stats import ask_stored
from adp_kv.wire.keys import unpack_keys
from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.phases import PHASES, Phases
from tests.support.process import ChildError, wait_until

pytestmark = pytest.mark.vllm

CHUNK = {"gemma3": 128, "granite_hybrid": 0}
COMMITS = {"gemma3": 4, "granite_hybrid": 3}  # of two chunks: each part's
TOKENS = 12
FAULTS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
CARD = {"capacity_bytes": "256MiB"}
PATIENT = {"card_deadline_s": 300, "rank_deadline_s": 300}
SETTINGS = {
    "gateway_timeout_s": 12,
    "lookup_timeout_s": 40,
    "load_timeout_s": 100,
    "save_timeout_s": 100,
}
USUAL = {
    ("gemma3", "get reads", "killed"),
    ("granite_hybrid", "put copies", "killed"),
}


def cells():
    """Every model, phase and fault; all but a few are slow."""
    for model in CHUNK:
        for phase in PHASES:
            for fault in FAULTS:
                marks = [] if (model, phase, fault) in USUAL else [pytest.mark.slow]
                if not phase.endswith("waits"):  # for a rank, and here is but one
                    yield pytest.param(model, phase, fault, marks=marks)


def start(engine, model, deployment, policy="recompute", **settings):
    """Start; return a prompt of two chunks and some."""
    connector = deployment.connector(policy, chunk_size=CHUNK[model], **SETTINGS, **settings)
    engine.start(model, connector)
    chunk = CHUNK[model] or int(engine.config("cache_config.block_size"))
    return prompt(71, 2 * chunk + 3)


@pytest.mark.parametrize(("model", "phase", "fault"), list(cells()))
def test_gateway_lost_in_each_phase_of_a_hybrid_model(engine, tmp_path, model, phase, fault):
    with Deployment(tmp_path, CARD, faulty=True, **PATIENT) as deployment:
        before = off_lines(engine.child.log())
        tokens = start(engine, model, deployment)
        engine.rpc("adp_note_saves")
        other = prompt(72, len(tokens))
        want = engine.answer(tokens, TOKENS).token_ids
        deployment.wait_committed(COMMITS[model])
        kept = saved(engine)
        asked = other if phase.startswith("put") else tokens
        phases = Phases(engine, deployment, tmp_path, ranks=1)
        engine.reset_prefix_cache()
        phases.enter(phase, asked, TOKENS)
        gateway = deployment.gateway
        os.kill(gateway.child.pid, FAULTS[fault])
        wait_until(lambda: off_lines(engine.child.log()) > before, 60, "the rank is off")
        phases.leave()
        first = engine.finish_generate(60)[0].token_ids if phase != "idle" else None
        if asked is tokens:
            assert first in (None, want)
        else:
            assert engine.answer(other, TOKENS).token_ids == first
        assert engine.answer(tokens, TOKENS).token_ids == want
        assert off_lines(engine.child.log()) == before + 1
        half = saved(engine)[len(kept) :]
        deployment.inject("")
        if fault == "frozen":
            os.kill(gateway.child.pid, signal.SIGCONT)
            wait_until(
                lambda: deployment.counters().get("sessions_ended", 0) == 1, 30, "it noticed"
            )
        else:
            assert not gateway.rings()
            deployment.restart()
        assert ask_stored(deployment.address, unpack_keys(b"".join(kept)), 10).all()
        if half and (phase, fault) != ("put writes", "frozen"):
            assert not ask_stored(deployment.address, unpack_keys(b"".join(half)), 10).any()
        deployment.gateway.stop()


def saved(engine):
    """Return the keys of the chunks that were given to the gateway so far."""
    return [bytes.fromhex(key) for _, _, keys in engine.rpc("adp_saved")[0] for key in keys]


@pytest.mark.parametrize("fault", [pytest.param("frozen", marks=pytest.mark.slow), "killed"])
def test_layerwise_restore_that_is_cut_off_stops_the_engine(engine, tmp_path, fault):
    with Deployment(tmp_path, CARD, faulty=True, **PATIENT) as deployment:
        before = off_lines(engine.child.log())
        tokens = start(engine, "gemma3", deployment, "fail", load_mode="layerwise")
        engine.answer(tokens, TOKENS)
        deployment.wait_committed(COMMITS["gemma3"])
        engine.reset_prefix_cache()
        phases = Phases(engine, deployment, tmp_path, ranks=1)
        phases.enter("get reads", tokens, TOKENS)
        os.kill(deployment.gateway.child.pid, FAULTS[fault])
        with pytest.raises(ChildError) as stopped:
            engine.finish_generate(60)
        assert str(stopped.value).count("nothing half-restored is served") == 1
        assert off_lines(engine.child.log()) == before + 1
        if fault == "frozen":
            deployment.inject("")
            os.kill(deployment.gateway.child.pid, signal.SIGCONT)
            deployment.gateway.stop()
        else:
            assert not deployment.gateway.rings()

"""Hybrid models when something goes wrong: recompute, or stop; never a half-restored request."""

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.process import ChildError, wait_until

pytestmark = pytest.mark.vllm

CLEAR_MARGIN = 1e-3  # prompts with a closer race are left out: there rounding decides
CHUNKS = {"gemma3": 128, "granite_hybrid": 0}
CARD = {"capacity_bytes": "256MiB"}
KINDS = {"gemma3": ("full", "window"), "granite_hybrid": ("full", "state")}


def one(engine, tokens, max_tokens=6):
    (done,) = engine.generate([tokens], max_tokens=max_tokens)
    return done


def start(engine, model, deployment, policy="recompute", **settings):
    """Start; return the chunk's tokens."""
    chunk = CHUNKS[model]
    engine.start(model, deployment.connector(policy, chunk_size=chunk, **settings))
    return chunk or int(engine.config("cache_config.block_size"))


def lose_an_object(deployment, saved, parts):
    """Let the last chunk's object of one cache of some parts be lost; it stays promised."""
    part, caches, chunks = [entry for entry in saved if entry[0] in parts][-1]
    deployment.lose_object(chunks[-1], caches[-1])
    return part


@pytest.mark.parametrize("model", KINDS)
def test_one_lost_object_of_one_group_is_recomputed(engine, model, tmp_path):
    """Its commit record is there, so the hit is promised, and some of it arrives."""
    with Deployment(tmp_path, CARD, faulty=True) as deployment:
        chunk = start(engine, model, deployment)
        prompts = {kind: prompt(20 + i, 2 * chunk + 3) for i, kind in enumerate(KINDS[model])}
        whole = prompt(30, 2 * chunk + 3)
        engine.rpc("adp_note_saves")
        want, saved = {}, {}
        for kind, tokens in prompts.items():
            before = len(engine.rpc("adp_saved")[0])
            want[kind] = one(engine, tokens)
            saved[kind] = engine.rpc("adp_saved")[0][before:]
        want_whole = one(engine, whole)
        parts = engine.rpc("adp_parts")[0]
        deployment.wait_committed(3 * len(prompts))
        deployment.kill9()
        for kind in prompts:
            lose_an_object(deployment, saved[kind], parts[kind])
        deployment.restart()

        start(engine, model, deployment)
        for i, (kind, tokens) in enumerate(prompts.items()):
            got, beside = engine.generate([tokens, whole], max_tokens=6)
            assert got.token_ids == want[kind].token_ids, kind
            assert beside.token_ids == want_whole.token_ids, "another request in the same step"
            assert beside.num_cached_tokens == 2 * chunk
            assert deployment.counters()["commits_withdrawn"] >= i + 1
            engine.reset_prefix_cache()
        deployment.inject("")
        deployment.wait_committed(len(prompts))  # what was lost is stored anew
        missed = deployment.counters()["objects_missed"]
        for kind, tokens in prompts.items():
            again = one(engine, tokens)
            assert again.token_ids == want[kind].token_ids
            assert again.num_cached_tokens == expected_hit(len(tokens), chunk)
        assert deployment.counters()["objects_missed"] == missed


def test_policy_fail_ends_the_request_that_lost_an_object_and_no_other(engine, tmp_path):
    with Deployment(tmp_path, CARD, faulty=True) as deployment:
        chunk = start(engine, "gemma3", deployment, "fail")
        lost, whole = prompt(41, 2 * chunk + 3), prompt(42, 2 * chunk + 3)
        engine.rpc("adp_note_saves")
        want_lost = one(engine, lost)
        saved = engine.rpc("adp_saved")[0]
        want_whole = one(engine, whole)
        windows = engine.rpc("adp_parts")[0]["window"]
        deployment.wait_committed(8)
        deployment.kill9()
        lose_an_object(deployment, saved, windows)
        deployment.restart()

        start(engine, "gemma3", deployment, "fail")
        failed, beside = engine.generate([lost, whole], max_tokens=6)
        assert failed.finish_reason == "error"
        assert beside.token_ids == want_whole.token_ids
        assert beside.num_cached_tokens == 2 * chunk
        engine.reset_prefix_cache()
        deployment.inject("")
        again = one(engine, lost)
        assert again.token_ids == want_lost.token_ids
        assert again.finish_reason == "length"


def test_layerwise_restores_are_right_and_a_failed_one_stops_the_engine(engine, tmp_path):
    """vLLM can't undo part of a step where a model has several groups."""
    with Deployment(tmp_path, CARD, faulty=True) as deployment:
        chunk = start(engine, "gemma3", deployment, "fail", load_mode="layerwise")
        lost, whole = prompt(43, 3 * chunk + 3), prompt(44, 3 * chunk + 3)
        want = one(engine, whole)
        deployment.wait_committed(6)
        engine.reset_prefix_cache()
        restored = one(engine, whole)
        assert restored.token_ids == want.token_ids
        assert restored.num_cached_tokens == 3 * chunk
        engine.rpc("adp_note_saves")
        one(engine, lost)
        saved = engine.rpc("adp_saved")[0]
        windows = engine.rpc("adp_parts")[0]["window"]
        deployment.kill9()
        lose_an_object(deployment, saved, windows)
        deployment.restart()

        start(engine, "gemma3", deployment, "fail", load_mode="layerwise")
        with pytest.raises(ChildError, match="nothing half-restored is served"):
            one(engine, lost)
        start(engine, "gemma3", deployment, "fail", load_mode="layerwise")
        assert one(engine, whole).token_ids == want.token_ids


def test_gateway_killed_while_a_state_is_on_its_way_is_recomputed(engine, tmp_path):
    with Deployment(tmp_path, CARD, faulty=True) as deployment:
        chunk = start(engine, "granite_hybrid", deployment)
        tokens = prompt(45, 2 * chunk + 3)
        want = one(engine, tokens)
        deployment.wait_committed(3)
        engine.reset_prefix_cache()
        deployment.inject("read 60")
        engine.begin_generate([tokens], max_tokens=6)
        wait_until(lambda: deployment.counters().get("gets", 0) > 0, 30, "the restore has begun")
        deployment.kill9()
        (done,) = engine.finish_generate()
        assert done.token_ids == want.token_ids
        assert "gateway" in engine.rpc("adp_off")[0]
        engine.reset_prefix_cache()  # no block is still pinned
        assert one(engine, tokens).token_ids == want.token_ids


TIGHT = {
    "gemma3": {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 128, "max_model_len": 512},
    "granite_hybrid": {
        "num_gpu_blocks_override": 14,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "dtype": "float32",  # bf16 differs after a preemption, connector or not
    },
}


def cold(engine, model, chunk_of):
    """Return prompts, what an engine without connector says, and which of it is clear."""
    args = {k: v for k, v in TIGHT[model].items() if k != "num_gpu_blocks_override"}
    engine.start(model, **args)
    chunk = CHUNKS[model] or int(engine.config("cache_config.block_size"))
    prompts = [prompt(300 + i, chunk_of(chunk, i)) for i in range(6)]
    want = engine.generate(prompts, max_tokens=60, logprobs=True)
    clear = [i for i, one in enumerate(want) if one.margin > CLEAR_MARGIN]
    assert len(clear) >= 3
    return prompts, [one.token_ids for one in want], clear


@pytest.mark.parametrize("model", TIGHT)
def test_preempted_for_want_of_blocks_beside_slow_saves(engine, model, tmp_path):
    """The card is slow and the ring small; vLLM waits for pinned blocks and preempts later."""
    prompts, want, clear = cold(engine, model, lambda chunk, i: chunk - 20 + 7 * i)
    with Deployment(tmp_path, CARD, faulty=True, shared_memory_size="3MiB") as deployment:
        connector = deployment.connector("recompute", chunk_size=CHUNKS[model])
        engine.start(model, connector, **TIGHT[model])
        engine.watch_preemptions()
        deployment.inject("write 0.2")
        for _ in range(2):  # computed and stored, then restored
            done = engine.generate(prompts, max_tokens=60)
            assert [done[i].token_ids for i in clear] == [want[i] for i in clear]
            engine.reset_prefix_cache()
        assert engine.metrics()["vllm:num_preemptions"] > 0, "not tight enough to preempt"
        assert not any(engine.preemptions()), "vLLM does not wait for pinned blocks any more"
        assert deployment.counters()["objects_read"] > 0
        assert deployment.counters().get("objects_missed", 0) == 0


@pytest.mark.parametrize("model", TIGHT)
def test_preempted_in_the_middle_of_a_save(engine, model, tmp_path):
    """Its blocks are copied after they were given away: they must still hold what was saved."""
    prompts, want, clear = cold(engine, model, lambda chunk, i: chunk + 1 + i)
    with Deployment(tmp_path, CARD, faulty=True) as deployment:
        connector = deployment.connector("recompute", chunk_size=CHUNKS[model])
        engine.start(model, connector, **TIGHT[model])
        held = tmp_path / "held"
        held.touch()
        engine.rpc("adp_hold", "save", str(held), [0])
        engine.watch_preemptions(let_go=held)
        done = engine.generate(prompts, max_tokens=60)
        assert [done[i].token_ids for i in clear] == [want[i] for i in clear]
        assert any(engine.preemptions()), "no save was under way"
        assert not held.exists()
        assert deployment.counters()["chunks_committed"] > 0
        engine.reset_prefix_cache()
        again = engine.generate(prompts, max_tokens=60)
        assert [again[i].token_ids for i in clear] == [want[i] for i in clear]
        assert deployment.counters()["objects_read"] > 0
        assert deployment.counters().get("objects_missed", 0) == 0

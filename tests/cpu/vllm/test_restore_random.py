"""Many random prompts under pressure: few blocks, chunked prefill, a restart in the middle.

Every token is that of an engine without the connector, in fp32.
"""

import random

import pytest

from tests.support.deployment import Deployment, prompt, random_prompts

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 200
CHUNK = 64
MAX_TOKENS = 6
CLEAR_MARGIN = 1e-3  # prompts with a closer race are left out: there rounding decides
TIGHT = {
    "num_gpu_blocks_override": 30,  # of 32 tokens: two to four requests fit
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "enable_chunked_prefill": True,
}


@pytest.fixture(scope="module")
def reference(engine):
    """Return prompts and the tokens that an engine without a connector says."""
    prompts = random_prompts(3, NUM_PROMPTS + 20)
    engine.start("llama")
    done = engine.generate(prompts, max_tokens=MAX_TOKENS, logprobs=True, timeout_s=200)
    clear = [i for i, one in enumerate(done) if one.margin > CLEAR_MARGIN][:NUM_PROMPTS]
    assert len(clear) == NUM_PROMPTS
    return [prompts[i] for i in clear], [done[i].token_ids for i in clear]


@pytest.mark.parametrize("mode", ["layerwise", "auto"])
def test_random_prompts_say_what_an_engine_without_connector_says(
    mode, reference, engine, tmp_path
):
    prompts, want = reference
    half = NUM_PROMPTS // 2
    with Deployment(tmp_path, {"slot_bytes": "64KiB"}) as deployment:
        connector = deployment.connector(chunk_size=CHUNK, load_mode=mode)
        engine.start("llama", connector, **TIGHT)
        first = engine.generate(prompts[:half], max_tokens=MAX_TOKENS, timeout_s=200)
        committed = deployment.counters()["chunks_committed"]
        deployment.kill9()
        deployment.restart()
        engine.start("llama", connector, **TIGHT)
        # Half of what is asked now was stored before the restart, half is new.
        order = [*range(0, half, 2), *range(half, NUM_PROMPTS)]
        random.Random(5).shuffle(order)
        asked = [prompts[i] for i in order]
        second = engine.generate(asked, max_tokens=MAX_TOKENS, timeout_s=200)
        counters = deployment.counters()
    assert [done.token_ids for done in first] == want[:half]
    assert [done.token_ids for done in second] == [want[i] for i in order]
    assert committed > 50
    assert counters["objects_read"] > 100
    assert counters.get("objects_missed", 0) == 0


@pytest.mark.parametrize("mode", ["layerwise", "auto"])
def test_preempted_requests_resume_with_the_same_tokens(mode, engine, tmp_path):
    """Decodes that outgrow the pool, so that requests are thrown out and come back."""
    prompts = [prompt(300 + i, 130 + 7 * i) for i in range(6)]
    engine.start("llama")
    want = engine.generate(prompts, max_tokens=80, logprobs=True)
    with Deployment(tmp_path, {"slot_bytes": "64KiB"}) as deployment:
        connector = deployment.connector(chunk_size=CHUNK, load_mode=mode)
        engine.start("llama", connector, **TIGHT | {"num_gpu_blocks_override": 19})
        for _ in range(2):  # computed and stored, then restored
            done = engine.generate(prompts, max_tokens=80)
            engine.reset_prefix_cache()
            clear = [i for i, one in enumerate(want) if one.margin > CLEAR_MARGIN]
            assert [done[i].token_ids for i in clear] == [want[i].token_ids for i in clear]
            assert len(clear) >= 3
        assert engine.metrics()["vllm:num_preemptions"] > 0, "not tight enough to preempt"
        assert deployment.counters()["objects_read"] > 0


def test_chunk_filled_by_the_last_tokens_is_saved_before_its_blocks_are_reused(engine, tmp_path):
    """Each request ends with a chunk just full, and the next one needs its blocks at once."""
    prompts = [prompt(400 + i, CHUNK - 4) for i in range(24)]
    engine.start("llama")
    ended = engine.generate(prompts, max_tokens=5)
    longer = [p + one.token_ids[:4] + [9] for p, one in zip(prompts, ended, strict=True)]
    want = engine.generate(longer, max_tokens=MAX_TOKENS, logprobs=True)
    with Deployment(tmp_path, {"slot_bytes": "64KiB"}) as deployment:
        connector = deployment.connector(chunk_size=CHUNK)
        engine.start("llama", connector, num_gpu_blocks_override=7, max_model_len=128)
        engine.generate(prompts, max_tokens=5)
        deployment.wait_committed(len(prompts))
        engine.start("llama", connector)
        done = engine.generate(longer, max_tokens=MAX_TOKENS)
    clear = [i for i, one in enumerate(want) if one.margin > CLEAR_MARGIN]
    assert [done[i].token_ids for i in clear] == [want[i].token_ids for i in clear]
    assert [one.num_cached_tokens for one in done] == [CHUNK] * len(prompts)

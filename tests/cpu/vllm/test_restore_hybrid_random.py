"""Hybrid models under pressure: random prompts, few blocks, small steps; and two ranks.

Every token is that of an engine without the connector, in fp32.
"""

import random

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt, random_prompts
from tests.support.engine import Engine

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 80
CHUNK = 64
MAX_TOKENS = 6
CLEAR_MARGIN = 1e-3  # prompts with a closer race are left out: there rounding decides
TIGHT = {"num_gpu_blocks_override": 70, "max_num_batched_tokens": 128, "max_model_len": 512}
SLOTS = {"slot_bytes": "64KiB"}


def test_random_prompts_say_what_an_engine_without_connector_says(engine, tmp_path):
    prompts = random_prompts(4, NUM_PROMPTS)
    engine.start("gemma3")
    cold = engine.generate(prompts, max_tokens=MAX_TOKENS, logprobs=True, timeout_s=200)
    clear = [i for i, one in enumerate(cold) if one.margin > CLEAR_MARGIN]
    assert len(clear) > NUM_PROMPTS * 0.8
    want = [one.token_ids for one in cold]
    half = NUM_PROMPTS // 2
    with Deployment(tmp_path, SLOTS) as deployment:
        connector = deployment.connector("recompute", chunk_size=CHUNK)
        engine.start("gemma3", connector, **TIGHT)
        first = engine.generate(prompts[:half], max_tokens=MAX_TOKENS, timeout_s=200)
        deployment.kill9()
        deployment.restart()
        engine.start("gemma3", connector, **TIGHT)
        order = [*range(0, half, 2), *range(half, NUM_PROMPTS)]
        random.Random(5).shuffle(order)
        asked = [prompts[i] for i in order]
        second = engine.generate(asked, max_tokens=MAX_TOKENS, timeout_s=200)
        counters = deployment.counters()
    said = dict(enumerate(first)) | {half + n: done for n, done in enumerate(second)}
    meant = dict(enumerate(range(half))) | {half + n: i for n, i in enumerate(order)}
    for number, i in meant.items():
        if i in clear:
            assert said[number].token_ids == want[i]
    assert counters["objects_read"] > 100
    assert counters.get("objects_missed", 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3", "granite_hybrid"])
def test_two_ranks_restore_their_slices(model, tmp_path):
    """Each rank has its heads, and its part of every state."""
    with Deployment(tmp_path, {"capacity_bytes": "256MiB"}) as deployment:
        chunk = 128 if model == "gemma3" else 0
        connector = deployment.connector("recompute", chunk_size=chunk)
        with Engine(separate_core=True) as engine:
            engine.start(model, connector, tensor_parallel_size=2)
            chunk = chunk or int(engine.config("cache_config.block_size"))
            tokens = prompt(51, 2 * chunk + 3)
            (cold,) = engine.generate([tokens], max_tokens=MAX_TOKENS)
            deployment.wait_committed(3)
            deployment.kill9(engine)
        deployment.restart()
        with Engine(separate_core=True) as engine:
            engine.start(model, connector, tensor_parallel_size=2)
            (restored,) = engine.generate([tokens], max_tokens=MAX_TOKENS)
            assert restored.num_cached_tokens == expected_hit(len(tokens), chunk)
            assert restored.token_ids == cold.token_ids
            shares = [count["bytes_restored"] for count in engine.rpc("adp_counts")]
            assert shares == [deployment.counters()["bytes_read"] // 2] * 2
            engine.reset_prefix_cache()
            engine.rpc("adp_zero_restores", True)
            (zeroed,) = engine.generate([tokens], max_tokens=MAX_TOKENS)
            assert zeroed.token_ids != cold.token_ids
            engine.kill9()
        deployment.gateway.stop()

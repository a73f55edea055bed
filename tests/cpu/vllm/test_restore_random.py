"""Many random prompts under pressure: few blocks, chunked prefill, a restart in the middle.

Every token is that of an engine without the connector, in fp32.
"""

import random

import pytest

from tests.support.deployment import Deployment
from tests.support.engine import Engine

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 200
CHUNK = 64
MAX_TOKENS = 6
TIGHT = {
    "num_gpu_blocks_override": 30,  # of 32 tokens: two to four requests fit
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "enable_chunked_prefill": True,
}


def random_prompts(seed, count):
    """Prompts of 20 to 420 tokens; most begin like an earlier one, cut anywhere."""
    numbers = random.Random(seed)
    prompts = []
    for _ in range(count):
        shared = []
        if prompts and numbers.random() < 0.75:
            parent = numbers.choice(prompts)
            shared = parent[: numbers.randrange(1, len(parent) + 1)]
        length = max(len(shared) + 1, numbers.randrange(20, 420))
        fresh = [numbers.randrange(3, 2000) for _ in range(min(length, 420) - len(shared))]
        prompts.append(shared + fresh)
    return prompts


@pytest.mark.parametrize("mode", ["auto", "async"])
def test_random_prompts_say_what_an_engine_without_connector_says(mode, reference, tmp_path):
    prompts, want = reference
    half = NUM_PROMPTS // 2
    with Deployment(tmp_path, {"slot_bytes": "64KiB"}) as deployment:
        connector = deployment.connector(chunk_size=CHUNK, load_mode=mode)
        with Engine() as engine:
            engine.start("llama", connector, **TIGHT)
            first = engine.generate(prompts[:half], max_tokens=MAX_TOKENS, timeout_s=200)
            committed = deployment.counters()["chunks_committed"]
            deployment.kill9(engine)
        deployment.restart()
        with Engine() as engine:
            engine.start("llama", connector, **TIGHT)
            # Half of what is asked now was stored before the restart, half is new.
            order = [*range(0, half, 2), *range(half, NUM_PROMPTS)]
            random.Random(5).shuffle(order)
            asked = [prompts[i] for i in order]
            second = engine.generate(asked, max_tokens=MAX_TOKENS, timeout_s=200)
            metrics, counters = engine.metrics(), deployment.counters()
            engine.shutdown()
        deployment.gateway.stop()
    assert [done.token_ids for done in first] == want[:half]
    assert [done.token_ids for done in second] == [want[i] for i in order]
    assert committed > 50
    assert counters["objects_read"] > 100
    assert counters.get("objects_missed", 0) == 0
    assert metrics["vllm:num_preemptions"] > 0, "not tight enough to preempt"


@pytest.fixture(scope="module")
def reference():
    prompts = random_prompts(3, NUM_PROMPTS)
    with Engine() as engine:
        engine.start("llama")
        done = engine.generate(prompts, max_tokens=MAX_TOKENS, timeout_s=200)
        engine.shutdown()
    return prompts, [one.token_ids for one in done]

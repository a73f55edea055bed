"""Engine and gateway killed while they save: a chunk half written is never offered."""

import random
import time

import pytest

from tests.support.deployment import Deployment, prompt
from tests.support.engine import Engine
from tests.support.process import wait_until

pytestmark = pytest.mark.vllm

CHUNK = 128
ROOMY_CARD = {"capacity_bytes": "512MiB", "slot_bytes": "128KiB"}
TIGHT_RING = {"shared_memory_size": "8MiB", "batch_bytes": "128KiB"}


def test_killed_between_objects_and_commit(engine, tmp_path):
    """Every object's bytes are on the card, or on their way; no commit record is."""
    kept, lost = prompt(41, 2 * CHUNK + 3), prompt(42, 6 * CHUNK + 3)
    with Deployment(tmp_path, faulty=True) as deployment, Engine() as killed:
        killed.start("llama", deployment.connector(chunk_size=CHUNK))
        (want_kept,) = killed.generate([kept])
        deployment.wait_committed(2)
        deployment.inject("write 60")
        killed.begin_generate([lost])
        wait_until(lambda: deployment.counters()["puts"] >= 2, 60, "the second save has begun")
        wait_until(
            lambda: deployment.counters()["card_bytes_written"] >= 8 * CHUNK * 4096,
            60,
            "all bytes are on the card",
        )
        deployment.kill9(killed)
        deployment.inject("")
        deployment.restart()
        engine.start("llama", deployment.connector(chunk_size=CHUNK))
        (kept_again,) = engine.generate([kept])
        (lost_again,) = engine.generate([lost])
        assert kept_again.token_ids == want_kept.token_ids
        assert kept_again.num_cached_tokens == 2 * CHUNK
        assert lost_again.num_cached_tokens == 0
        deployment.wait_committed(6)
        engine.reset_prefix_cache()
        (restored,) = engine.generate([lost])
        assert restored.num_cached_tokens == 6 * CHUNK
        assert restored.token_ids == lost_again.token_ids


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(tmp_path):
    """Six lives; each checks all prompts of those before it, then dies while saving new ones."""
    numbers = random.Random(17)
    prompts = [prompt(100 + i, numbers.randrange(CHUNK, 9 * CHUNK)) for i in range(48)]
    with Engine() as engine:
        engine.start("llama")
        want = [done.token_ids for done in engine.generate(prompts)]
        engine.shutdown()
    hits = []
    with Deployment(tmp_path, ROOMY_CARD, **TIGHT_RING) as deployment:
        for life in range(6):
            with Engine() as engine:
                engine.start("llama", deployment.connector(chunk_size=CHUNK))
                known = slice(0, 8 * life)
                done = engine.generate(prompts[known])
                assert [one.token_ids for one in done] == want[known]
                hits.append(sum(one.num_cached_tokens for one in done))
                assert deployment.counters().get("objects_missed", 0) == 0
                engine.begin_generate(prompts[8 * life : 8 * life + 8], max_tokens=200)
                before = deployment.counters().get("bytes_written", 0)
                wait_until(
                    lambda before=before: deployment.counters().get("bytes_written", 0) > before,
                    60,
                    "a save has begun",
                )
                time.sleep(numbers.random() * 0.5)  # the moment of death is what varies
                deployment.kill9(engine)
            deployment.restart()
        deployment.gateway.stop()
    assert sum(hits) > 0

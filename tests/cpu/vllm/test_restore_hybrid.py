"""Hybrid models: store, both restarted, restore; the same tokens and log-probabilities.

Each model has one story, told once by a fixture and judged by several tests:

    first life   every prompt computed in the small steps of chunked prefill, and stored
    restart      the gateway is killed, the engine ends
    second life  the same prompts, restored; then zeros in place of each kind of bytes
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = pytest.mark.vllm

MAX_TOKENS = 6
LOGPROB_TOLERANCE = 1e-4  # fp32, other matrix shapes; bf16 models compute the same shapes again


@dataclass(frozen=True)
class Case:
    """One model. steps: what the first life's engine is given beside the model's own."""

    chunk_size: int
    kinds: tuple[str, ...]
    steps: dict[str, object] = field(default_factory=dict)


WINDOWS = Case(128, ("full", "window"), {"max_num_batched_tokens": 80})
STATES = Case(0, ("full", "state"))
CASES = {
    "gemma3": WINDOWS,
    "gpt_oss": WINDOWS,
    "qwen3_next": Case(0, ("full", "state"), {"max_num_batched_tokens": 256}),
    "granite_hybrid": STATES,
    "nemotron_h": STATES,
    "falcon_h1": STATES,
    "zamba2": STATES,
    "lfm2": Case(0, ("full", "state"), {"max_num_batched_tokens": 128}),
}


def prompts_of(chunk: int) -> dict[str, list[int]]:
    """Return prompts around the boundaries of a model's chunks.

    A state fades quickly: it is seen where a prompt ends just behind a boundary.
    """
    shared = prompt(5, 2 * chunk - 30)
    return {
        "a token after a boundary": prompt(1, 2 * chunk + 1),
        "far after a boundary": prompt(2, 2 * chunk + chunk // 2),
        "exactly two chunks": prompt(3, 2 * chunk),
        "diverges in the window, one": shared + prompt(6, 40),
        "diverges in the window, two": shared + prompt(7, 40),
        "local hit before it": prompt(8, 2 * chunk + 5),
    }


@dataclass
class Story:
    """What came out of both lives."""

    case: Case
    chunk: int = 0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    cold: dict[str, Completion] = field(default_factory=dict)
    restored: dict[str, Completion] = field(default_factory=dict)
    zeroed: dict[str, Completion] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    bytes_restored: int = 0


def _one(engine: Engine, tokens: list[int]) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=MAX_TOKENS, logprobs=True)
    return done


def _tell(engine: Engine, model: str, deployment: Deployment, story: Story) -> None:
    connector = deployment.connector("recompute", chunk_size=story.case.chunk_size)
    engine.start(model, connector, **story.case.steps)
    story.chunk = story.case.chunk_size or int(engine.config("cache_config.block_size"))
    story.prompts = prompts_of(story.chunk)
    story.cold = {name: _one(engine, tokens) for name, tokens in story.prompts.items()}
    deployment.wait_committed(3 * len(story.prompts))
    deployment.kill9()
    deployment.restart()

    engine.start(model, connector)
    _one(engine, story.prompts["local hit before it"][: story.chunk + 1])
    story.restored = {name: _one(engine, tokens) for name, tokens in story.prompts.items()}
    story.counters = deployment.counters()
    story.bytes_restored = engine.rpc("adp_counts")[0]["bytes_restored"]
    for kind in story.case.kinds:
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", False)
        engine.rpc("adp_zero_restores", True, kind)
        story.zeroed[kind] = _one(engine, story.prompts["a token after a boundary"])


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def story(request, engine, tmp_path_factory):
    told = Story(CASES[request.param])
    card = {"capacity_bytes": "256MiB"}
    with Deployment(tmp_path_factory.mktemp("hybrid"), card) as deployment:
        _tell(engine, request.param, deployment, told)
        deployment.gateway.stop()
    return told


def _assert_same(got: Completion, want: Completion) -> None:
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=LOGPROB_TOLERANCE)


def _differs(got: Completion, want: Completion) -> bool:
    """Return whether _assert_same() would see a difference, by far."""
    pairs = zip(got.logprobs, want.logprobs, strict=True)
    return got.token_ids != want.token_ids or max(abs(a - b) for a, b in pairs) > 0.03


def test_restored_prompts_say_the_same(story):
    for name, tokens in story.prompts.items():
        _assert_same(story.restored[name], story.cold[name])
        assert story.restored[name].num_cached_tokens == expected_hit(len(tokens), story.chunk)


def test_first_life_hits_nothing_beyond_what_it_stored_itself(story):
    hits = {name: done.num_cached_tokens for name, done in story.cold.items()}
    shared = hits.pop("diverges in the window, two")
    assert set(hits.values()) == {0}
    assert shared in {0, story.chunk}


def test_zeros_in_place_of_each_kind_change_what_is_said(story):
    name = "a token after a boundary"
    for kind in story.case.kinds:
        assert story.zeroed[kind].num_cached_tokens == 2 * story.chunk
        assert _differs(story.zeroed[kind], story.cold[name]), f"{kind} is not seen"


def test_bytes_read_are_those_of_the_hits(story):
    assert story.counters.get("objects_missed", 0) == 0
    assert story.bytes_restored == story.counters["bytes_read"] > 0

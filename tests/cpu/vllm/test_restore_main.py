"""Store, kill -9 of engine and gateway, restore: the same tokens and log-probabilities.

Each case has one story, told once by a fixture and judged by several tests:

    first life   every prompt computed and stored, all but the first layer by layer; one
                 restored again in the other load mode
    kill -9      of both
    second life  the same prompts, restored; then zeros in place of the restored bytes
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = pytest.mark.vllm

CHUNK = 256
SHARED = prompt(7, 3 * CHUNK + 100)
PROMPTS = {
    "several chunks and a rest": prompt(1, 4 * CHUNK + 76),
    "exactly k chunks": prompt(2, 3 * CHUNK),
    "k chunks and a token": prompt(3, 3 * CHUNK + 1),
    "one token short of a chunk": prompt(4, CHUNK - 1),
    "local hit ends in mid-chunk": SHARED,
}
FIRST = "several chunks and a rest"
MAX_TOKENS = 12
LOGPROB_TOLERANCE = 1e-4  # fp32, other matrix shapes


@dataclass(frozen=True)
class Case:
    """One way to run an engine; `other_mode` is tried within the first life."""

    model: str
    separate_core: bool = False
    tp: int = 1
    mode: str = "auto"
    other_mode: str = "async"
    local_hits: bool = True
    fanout: bool = False  # asked for; without NVLink it is off, and every rank reads all


CASES = {
    "llama": Case("llama", separate_core=True),
    "mla": Case("mla", local_hits=False),
    "mla-tp2": Case("mla", separate_core=True, tp=2, local_hits=False, fanout=True),
    "llama-tp2": Case("llama", separate_core=True, tp=2, mode="async", other_mode="auto"),
}


@dataclass
class Story:
    """What came out."""

    case: Case
    cold: dict[str, Completion] = field(default_factory=dict)
    other_mode: Completion | None = None
    restored: dict[str, Completion] = field(default_factory=dict)
    zeroed: Completion | None = None
    saves_at_once: list[list[tuple]] = field(default_factory=list)
    saves_by_layer: list[list[tuple]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    rank_counts: list[dict[str, int]] = field(default_factory=list)
    log: str = ""


def _start(engine: Engine, case: Case, deployment: Deployment, mode: str) -> None:
    args = {"tensor_parallel_size": case.tp} if case.tp > 1 else {}
    settings = {"chunk_size": CHUNK, "load_mode": mode, "nvlink_fanout": case.fanout}
    engine.start(case.model, deployment.connector(**settings), **args)


def _one(engine: Engine, tokens: list[int]) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=MAX_TOKENS, logprobs=True)
    return done


def _first_life(case: Case, deployment: Deployment, story: Story) -> None:
    with Engine(separate_core=case.separate_core) as engine:
        _start(engine, case, deployment, case.other_mode)
        engine.rpc("adp_note_saves")
        story.cold[FIRST] = _one(engine, PROMPTS[FIRST])
        story.saves_at_once = engine.rpc("adp_saved")
        engine.rpc("adp_note_saves")
        engine.rpc("adp_save_layer_by_layer")
        for name in [name for name in PROMPTS if name != FIRST]:
            story.cold[name] = _one(engine, PROMPTS[name])
        story.saves_by_layer = engine.rpc("adp_saved")
        deployment.wait_committed(sum(len(tokens) // CHUNK for tokens in PROMPTS.values()))
        engine.reset_prefix_cache()
        story.other_mode = _one(engine, PROMPTS["several chunks and a rest"])
        deployment.kill9(engine)


def _second_life(case: Case, deployment: Deployment, story: Story) -> None:
    with Engine(separate_core=case.separate_core) as engine:
        _start(engine, case, deployment, case.mode)
        # Half of chunk 1 becomes a local hit; its other half must come from the card.
        _one(engine, SHARED[: CHUNK + CHUNK // 2 + 1])
        story.restored = {name: _one(engine, tokens) for name, tokens in PROMPTS.items()}
        story.counters = deployment.counters()
        story.rank_counts = engine.rpc("adp_counts")
        story.log = engine.child.log()
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True)
        story.zeroed = _one(engine, PROMPTS["several chunks and a rest"])
        if not case.separate_core:  # else vLLM's own end takes 5 to 10 s
            engine.shutdown()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def story(request, tmp_path_factory):
    case = CASES[request.param]
    told = Story(case)
    with Deployment(tmp_path_factory.mktemp("restore")) as deployment:
        _first_life(case, deployment, told)
        deployment.restart()
        _second_life(case, deployment, told)
        deployment.gateway.stop()
    return told


def _assert_same(got: Completion, want: Completion) -> None:
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=LOGPROB_TOLERANCE)


def test_first_life_hits_nothing(story):
    assert [done.num_cached_tokens for done in story.cold.values()] == [0] * len(PROMPTS)


@pytest.mark.parametrize("name", PROMPTS)
def test_restored_prompt_says_the_same(story, name):
    _assert_same(story.restored[name], story.cold[name])
    assert story.restored[name].num_cached_tokens == expected_hit(len(PROMPTS[name]), CHUNK)


def test_other_load_mode_says_the_same(story):
    name = "several chunks and a rest"
    _assert_same(story.other_mode, story.cold[name])
    assert story.other_mode.num_cached_tokens == expected_hit(len(PROMPTS[name]), CHUNK)


def test_zeros_in_place_of_restored_bytes_change_the_tokens(story):
    name = "several chunks and a rest"
    assert story.zeroed.num_cached_tokens == expected_hit(len(PROMPTS[name]), CHUNK)
    assert story.zeroed.token_ids != story.cold[name].token_ids, "the restored bytes are not seen"


def test_bytes_read_are_those_of_the_hits(story):
    """Nothing is read twice, nothing is missing, and every rank copies its own share."""
    assert story.counters.get("objects_missed", 0) == 0
    restored = [counts["bytes_restored"] for counts in story.rank_counts]
    assert len(restored) == story.case.tp
    times_read = story.case.tp if story.case.model == "mla" else 1  # replicated, or sharded
    assert sum(restored) == times_read * story.counters["bytes_read"]
    assert len(set(restored)) == 1


def test_small_steps_are_saved_at_once_and_large_ones_layer_by_layer(story):
    """Each rank's saves name their caches; every layer of every chunk is saved once."""
    for at_once, by_layer in zip(story.saves_at_once, story.saves_by_layer, strict=True):
        ((_, caches, chunks),) = at_once
        assert len(chunks) == len(PROMPTS[FIRST]) // CHUNK
        assert len(caches) > 1
        saved = [(cache, chunk) for _, (cache,), chunks in by_layer for chunk in chunks]
        assert len(set(saved)) == len(saved)
        lengths = [len(tokens) for name, tokens in PROMPTS.items() if name != FIRST]
        others = sum((length + MAX_TOKENS - 1) // CHUNK for length in lengths)
        assert len(saved) == others * len(caches)


def test_fanout_without_links_is_off_with_one_line(story):
    assert story.log.count("NVLink fan-out is off") == story.case.fanout

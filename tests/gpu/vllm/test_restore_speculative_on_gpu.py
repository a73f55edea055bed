"""Draft heads (EAGLE, MTP) on a GPU: their caches are stored and restored with the target's.

As test_restore_on_gpu: store, kill -9 of engine and gateway, restore; equal pages must lead to
equal tokens, so the first life answers each prompt from the GPU's own cache with the hit that a
restore has. Beside tokens and pages this looks at guesses: a head is right only if its own cache
is (tests/support/draft_heads.py), whatever the target says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import pytest

from tests.support import draft_heads
from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.draft_heads import Drafted, accepted_tokens, layer_of
from tests.support.engine import Completion, Engine

# A story compiles target and head twice.
pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(600)]

CHUNK = 256
SLOW_MS = 1.0
PROMPTS = {
    "chunks and a rest": prompt(11, 4 * CHUNK + 76),
    "k chunks and a token": prompt(13, 3 * CHUNK + 1),
}
LONG = "chunks and a rest"
DECODED = prompt(14, CHUNK + 40)
NUM_DECODED = 2 * CHUNK
NUM_SAVED = sum(len(tokens) // CHUNK for tokens in PROMPTS.values()) + (
    (len(DECODED) + NUM_DECODED - 1) // CHUNK
)
MAX_TOKENS = 64
# VLLM 0.25.1 itself ends with an illegal access when it captures EAGLE's graphs of whole passes.
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
EAGLE_GRAPHS: dict[str, Any] = PIECEWISE if version("vllm").startswith("0.25.") else {}
MAKERS = {"eagle": draft_heads.eagle, "mtp": draft_heads.mtp}
CASES = {
    "eagle-graphs": ("eagle", False, EAGLE_GRAPHS),
    "eagle-eager": ("eagle", True, {}),
    "mtp-graphs": ("mtp", False, {}),
    "mtp-eager": ("mtp", True, {}),
}

Digests = dict[str, dict[str, str]]


@dataclass
class Answer:
    """A completion, and how many tokens of it the head had guessed."""

    said: Completion
    accepted: int


@dataclass
class Story:
    """What came out of both lives; pages by chunk and cache."""

    drafted: Drafted
    eager: bool
    graphs: dict[str, Any]
    graph_mode: str = ""
    runner_v2: str = ""
    local: dict[str, Answer] = field(default_factory=dict)
    decoded: Answer | None = None
    other_mode: Answer | None = None
    restored: dict[str, Answer] = field(default_factory=dict)
    continued: Answer | None = None
    no_head: Answer | None = None
    zeroed: Answer | None = None
    saved_pages: Digests = field(default_factory=dict)
    restored_pages: Digests = field(default_factory=dict)
    missed: int = 0


def drafted_hit(length: int) -> int:
    """Return how much of a stored prompt is hit: a head's last entry depends on the token after,
    so the last chunk is computed anew."""
    return max(0, expected_hit(length, CHUNK) - CHUNK)


def _one(
    engine: Engine,
    tokens: list[int],
    max_tokens: int = MAX_TOKENS,
    pages: Digests | None = None,
) -> Answer:
    """Run a prompt; take the pages of chunks that are new, before vLLM can reuse their blocks."""
    before = accepted_tokens(engine)
    (said,) = engine.generate([tokens], max_tokens=max_tokens)
    if pages is not None:
        (noted,) = engine.rpc("adp_noted_caches")
        pages |= {chunk: digests for chunk, digests in noted.items() if chunk not in pages}
    return Answer(said, accepted_tokens(engine) - before)


def _with_local_hit(engine: Engine, tokens: list[int], block: int, pages: Digests) -> Answer:
    """Compute what a restore would bring, then answer the prompt from the GPU's own cache.

    A block more is computed: of its own hits vLLM takes back the last block.
    """
    _one(engine, tokens[: drafted_hit(len(tokens)) + block], 1, pages)
    return _one(engine, tokens, pages=pages)


def _first_life(deployment: Deployment, story: Story) -> None:
    with Engine() as engine:
        engine.start(
            story.drafted.target,
            deployment.connector(load_mode="async"),
            enforce_eager=story.eager,
            **story.graphs,
            **story.drafted.arguments(),
        )
        story.graph_mode = engine.config("compilation_config.cudagraph_mode")
        story.runner_v2 = engine.config("use_v2_model_runner")
        print(
            f"{story.drafted.speculative_config['method']}: runner V2 {story.runner_v2}, "
            f"graphs {story.graph_mode}"
        )
        block = int(engine.config("cache_config.block_size"))
        engine.rpc("adp_slow", SLOW_MS)
        engine.rpc("adp_note_pages", "save")
        pages = story.saved_pages
        for name, tokens in PROMPTS.items():
            story.local[name] = _with_local_hit(engine, tokens, block, pages)
        story.decoded = _one(engine, DECODED, NUM_DECODED, pages)
        deployment.wait_committed(NUM_SAVED)
        engine.reset_prefix_cache()
        story.other_mode = _one(engine, PROMPTS[LONG])
        deployment.kill9(engine)


def _second_life(deployment: Deployment, story: Story) -> None:
    with Engine() as engine:
        engine.start(
            story.drafted.target,
            deployment.connector(),
            enforce_eager=story.eager,
            **story.graphs,
            **story.drafted.arguments(),
        )
        engine.rpc("adp_slow", SLOW_MS)
        engine.rpc("adp_note_pages", "restore")
        pages = story.restored_pages
        for name, tokens in PROMPTS.items():
            story.restored[name] = _one(engine, tokens, pages=pages)
        continued = [*DECODED, *story.decoded.said.token_ids[:-1]]
        story.continued = _one(engine, continued, pages=pages)
        story.missed = deployment.counters().get("objects_missed", 0)
        names = next(iter(pages.values()))
        draft_caches = [name for name in names if story.drafted.is_draft(name)]
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True, None, draft_caches)
        story.no_head = _one(engine, PROMPTS[LONG])
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True)
        story.zeroed = _one(engine, PROMPTS[LONG])
        engine.shutdown()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def story(request, tmp_path_factory):
    method, eager, graphs = CASES[request.param]
    told = Story(MAKERS[method](), eager, graphs)
    card = {"capacity_bytes": "1GiB"}
    folder = tmp_path_factory.mktemp("restore")
    with Deployment(folder, card, shared_memory_size="256MiB") as deployment:
        _first_life(deployment, told)
        deployment.restart()
        _second_life(deployment, told)
        deployment.gateway.stop()
    return told


def test_graphs_stay(story):
    assert ("NONE" in story.graph_mode) is story.eager


@pytest.mark.parametrize("name", PROMPTS)
def test_restored_prompt_says_the_same_and_is_guessed_as_well(story, name):
    restored, local = story.restored[name], story.local[name]
    assert restored.said.num_cached_tokens == drafted_hit(len(PROMPTS[name]))
    assert local.said.num_cached_tokens == drafted_hit(len(PROMPTS[name]))
    assert restored.said.token_ids == local.said.token_ids
    assert restored.accepted == local.accepted


def test_async_restore_says_the_same_and_is_guessed_as_well(story):
    local = story.local[LONG]
    assert story.other_mode.said.num_cached_tokens == drafted_hit(len(PROMPTS[LONG]))
    assert story.other_mode.said.token_ids == local.said.token_ids
    assert story.other_mode.accepted == local.accepted


def test_some_guesses_are_right_and_some_wrong(story):
    """Else neither an accepted nor a rejected token would be in the pages of decoded chunks."""
    assert story.decoded.accepted > 0
    guesses = story.drafted.speculative_config["num_speculative_tokens"]
    assert story.decoded.accepted < NUM_DECODED * guesses // (guesses + 1)


def test_decoded_chunks_are_restored(story):
    length = len(DECODED) + NUM_DECODED - 1
    assert story.continued.said.num_cached_tokens == drafted_hit(length)
    assert drafted_hit(length) > len(DECODED), "no chunk of decoded tokens"


def test_head_s_caches_are_stored_and_restored(story):
    """Every layer of target and head, and each holds something of its own in every chunk."""
    drafted = story.drafted
    layers = list(range(drafted.target_layers + drafted.draft_layers))
    for pages in (story.saved_pages, story.restored_pages):
        for digests in pages.values():
            assert sorted(map(layer_of, digests)) == layers
        every = [digest for digests in pages.values() for digest in digests.values()]
        assert len(set(every)) == len(every)


def test_restored_pages_hold_the_computed_bytes(story):
    """What was saved is what the pages hold after all of it was said: nothing came later."""
    lengths = [*map(len, PROMPTS.values()), len(DECODED) + NUM_DECODED - 1]
    assert len(story.saved_pages) == NUM_SAVED
    assert len(story.restored_pages) == sum(map(drafted_hit, lengths)) // CHUNK
    different = [
        (chunk, name)
        for chunk, digests in story.restored_pages.items()
        for name, digest in digests.items()
        if story.saved_pages[chunk][name] != digest
    ]
    assert different == []
    assert story.missed == 0


def test_zeros_in_the_head_s_caches_cost_guesses(story):
    assert story.no_head.said.num_cached_tokens == drafted_hit(len(PROMPTS[LONG]))
    assert story.no_head.accepted < story.local[LONG].accepted


def test_zeros_in_place_of_restored_bytes_change_the_tokens(story):
    assert story.zeroed.said.num_cached_tokens == drafted_hit(len(PROMPTS[LONG]))
    assert story.zeroed.said.token_ids != story.local[LONG].said.token_ids

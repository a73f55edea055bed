"""Store, kill -9 of engine and gateway, restore, on a GPU: the same bytes in every page.

In bf16 the same token computed in another batch shape differs in its last bits. So the
first life answers each prompt with exactly that prefix in the GPU's own cache that the
second life restores: equal pages must then lead to equal tokens. And it compares the
pages: what the second life restored must be, byte for byte, what the first life
computed. The compute stream is held up beside every restore and layer, so
that a copy or a layer that does not wait for the other shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

CHUNK = 256
SLOW_MS = 3.0
PROMPTS = {
    "chunks and a rest": prompt(11, 4 * CHUNK + 76),
    "k chunks and a token": prompt(13, 3 * CHUNK + 1),  # one token left: a full graph replays
    "exactly k chunks": prompt(12, 3 * CHUNK),
}
DECODED = prompt(14, CHUNK + 40)
NUM_DECODED = 2 * CHUNK
MAX_TOKENS = 6
CASES = {
    "llama-graphs": ("llama", False),
    "llama-eager": ("llama", True),
    "mla-graphs": ("mla", False),
    "mla-eager": ("mla", True),
}


@dataclass
class Story:
    """What came out of both lives."""

    eager: bool
    graph_mode: str = ""
    block: int = 0
    local: dict[str, Completion] = field(default_factory=dict)
    decoded: Completion | None = None
    other_mode: Completion | None = None
    restored: dict[str, Completion] = field(default_factory=dict)
    continued: Completion | None = None
    zeroed: Completion | None = None
    pages: list[dict[str, str]] = field(default_factory=list)
    missed: int = 0


def _one(engine: Engine, tokens: list[int], max_tokens: int = MAX_TOKENS) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=max_tokens)
    return done


def _with_local_hit(engine: Engine, tokens: list[int]) -> Completion:
    """Compute what a restore would bring, then answer the prompt from the GPU's own cache."""
    hit = expected_hit(len(tokens), CHUNK)
    _one(engine, tokens[: hit + 1], max_tokens=1)
    done = _one(engine, tokens)
    assert done.num_cached_tokens == hit
    return done


def _first_life(model: str, deployment: Deployment, story: Story) -> None:
    with Engine() as engine:
        engine.start(model, deployment.connector(load_mode="async"), enforce_eager=story.eager)
        story.graph_mode = engine.config("compilation_config.cudagraph_mode")
        story.block = int(engine.config("cache_config.block_size"))
        engine.rpc("adp_slow", SLOW_MS)
        story.local = {name: _with_local_hit(engine, tokens) for name, tokens in PROMPTS.items()}
        story.decoded = _one(engine, DECODED, NUM_DECODED)
        num_decoded_chunks = (len(DECODED) + NUM_DECODED - 1) // CHUNK
        chunks = sum(len(tokens) // CHUNK for tokens in PROMPTS.values()) + num_decoded_chunks
        deployment.wait_committed(chunks)
        story.pages.append(engine.pages())
        engine.reset_prefix_cache()
        story.other_mode = _one(engine, PROMPTS["chunks and a rest"])
        deployment.kill9(engine)


def _second_life(model: str, deployment: Deployment, story: Story) -> None:
    with Engine() as engine:
        engine.start(model, deployment.connector(), enforce_eager=story.eager)
        engine.rpc("adp_slow", SLOW_MS)
        story.restored = {name: _one(engine, tokens) for name, tokens in PROMPTS.items()}
        story.continued = _one(engine, [*DECODED, *story.decoded.token_ids[:-1]])
        story.pages.append(engine.pages())
        story.missed = deployment.counters().get("objects_missed", 0)
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True)
        story.zeroed = _one(engine, PROMPTS["chunks and a rest"])
        engine.shutdown()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def story(request, tmp_path_factory):
    model, eager = CASES[request.param]
    told = Story(eager)
    card = {"capacity_bytes": "1GiB"}
    folder = tmp_path_factory.mktemp("restore")
    with Deployment(folder, card, shared_memory_size="256MiB") as deployment:
        _first_life(model, deployment, told)
        deployment.restart()
        _second_life(model, deployment, told)
        deployment.gateway.stop()
    return told


def test_graphs_stay_full(story):
    """The connector does not cost the engine its fastest graphs."""
    assert ("NONE" if story.eager else "FULL_AND_PIECEWISE") in story.graph_mode


@pytest.mark.parametrize("name", PROMPTS)
def test_restored_prompt_says_the_same(story, name):
    assert story.restored[name].num_cached_tokens == expected_hit(len(PROMPTS[name]), CHUNK)
    assert story.restored[name].token_ids == story.local[name].token_ids


def test_async_restore_says_the_same(story):
    name = "chunks and a rest"
    assert story.other_mode.num_cached_tokens == expected_hit(len(PROMPTS[name]), CHUNK)
    assert story.other_mode.token_ids == story.local[name].token_ids


def test_decoded_chunks_are_restored(story):
    length = len(DECODED) + NUM_DECODED - 1
    assert story.continued.num_cached_tokens == expected_hit(length, CHUNK)
    assert story.continued.num_cached_tokens > len(DECODED), "no chunk of decoded tokens"


def test_restored_pages_hold_the_computed_bytes(story):
    first, second = story.pages
    lengths = [*map(len, PROMPTS.values()), len(DECODED) + NUM_DECODED - 1]
    restored = sum(expected_hit(length, CHUNK) for length in lengths) // story.block
    same = sum(second[key] == digest for key, digest in first.items() if key in second)
    assert same >= restored
    assert story.missed == 0


def test_zeros_in_place_of_restored_bytes_change_the_tokens(story):
    name = "chunks and a rest"
    assert story.zeroed.num_cached_tokens == expected_hit(len(PROMPTS[name]), CHUNK)
    assert story.zeroed.token_ids != story.local[name].token_ids, "the restored bytes are not seen"

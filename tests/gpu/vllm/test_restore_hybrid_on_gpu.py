"""Hybrid models on a GPU: store, kill -9 of engine and gateway, restore; the same bytes.

As in test_restore_on_gpu.py the first life answers each prompt with exactly that prefix in the
GPU's own cache that the second life restores, and what was restored must be, byte for byte, what
was computed: in the blocks of each group by itself. The compute stream is held up beside every
restore and layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(600)]

SLOW_MS = 3.0
MAX_TOKENS = 6
SLIDING_CHUNK = 256
STATES = {
    "granite_hybrid": "Mamba-2",
    "falcon_h1": "Mamba-2 beside attention",
    "nemotron_h": "Mamba-2",
    "qwen3_next": "gated delta net",
}
CASES = {
    f"{model}-{'eager' if eager else 'graphs'}-{cache}": (model, eager, cache)
    for model in ("gemma3", *STATES)
    for eager in (False, True)
    for cache in ("auto", "fp8")
}


@dataclass
class Story:
    """What came out of both lives."""

    model: str
    eager: bool
    cache: str
    graph_mode: str = ""
    chunk: int = 0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)
    local: dict[str, Completion] = field(default_factory=dict)
    restored: dict[str, Completion] = field(default_factory=dict)
    zeroed: dict[str, Completion] = field(default_factory=dict)
    decoded: list[int] = field(default_factory=list)
    continued: Completion | None = None
    pages: list[dict[str, str]] = field(default_factory=list)
    missed: int = 0


def _one(engine: Engine, tokens: list[int], max_tokens: int = MAX_TOKENS) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=max_tokens, logprobs=True)
    return done


def _with_local_hit(engine: Engine, tokens: list[int], chunk: int) -> Completion:
    """Compute what a restore would bring, then answer the prompt from the GPU's own cache."""
    hit = expected_hit(len(tokens), chunk)
    _one(engine, tokens[: hit + 1], max_tokens=1)
    done = _one(engine, tokens)
    assert done.num_cached_tokens == hit
    return done


def _start(engine: Engine, deployment: Deployment, story: Story) -> None:
    chunk = 0 if story.model in STATES else SLIDING_CHUNK
    engine.start(
        story.model,
        deployment.connector(chunk_size=chunk),
        enforce_eager=story.eager,
        kv_cache_dtype=story.cache,
    )
    engine.rpc("adp_slow", SLOW_MS)
    story.chunk = chunk or int(engine.config("cache_config.block_size"))


def _first_life(deployment: Deployment, story: Story) -> None:
    with Engine() as engine:
        _start(engine, deployment, story)
        story.graph_mode = engine.config("compilation_config.cudagraph_mode")
        story.parts = engine.rpc("adp_parts")[0]
        chunk = story.chunk
        story.prompts = {
            "a token after a boundary": prompt(11, 2 * chunk + 1),
            "far after a boundary": prompt(12, 2 * chunk + chunk // 2),
        }
        story.local = {
            name: _with_local_hit(engine, tokens, chunk) for name, tokens in story.prompts.items()
        }
        start = prompt(14, chunk + 40)
        story.decoded = start + _one(engine, start, chunk).token_ids
        num_parts = sum(map(len, story.parts.values()))
        deployment.wait_committed(2 * num_parts)
        story.pages.append(engine.pages())
        deployment.kill9(engine)


def _second_life(deployment: Deployment, story: Story) -> None:
    with Engine() as engine:
        _start(engine, deployment, story)
        story.restored = {name: _one(engine, tokens) for name, tokens in story.prompts.items()}
        story.pages.append(engine.pages())
        story.continued = _one(engine, story.decoded)
        story.missed = deployment.counters().get("objects_missed", 0)
        for kind in [kind for kind, parts in story.parts.items() if parts]:
            engine.reset_prefix_cache()
            engine.rpc("adp_zero_restores", False)
            engine.rpc("adp_zero_restores", True, kind)
            story.zeroed[kind] = _one(engine, story.prompts["a token after a boundary"])
        engine.shutdown()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def story(request, tmp_path_factory):
    told = Story(*CASES[request.param])
    card = {"capacity_bytes": "1GiB"}
    folder = tmp_path_factory.mktemp("hybrid")
    with Deployment(folder, card, shared_memory_size="256MiB") as deployment:
        _first_life(deployment, told)
        deployment.restart()
        _second_life(deployment, told)
        deployment.gateway.stop()
    return told


def test_graphs_stay_full(story):
    """The connector does not cost the engine its fastest graphs."""
    assert ("NONE" if story.eager else "FULL") in story.graph_mode


def test_restored_prompts_say_the_same(story):
    for name, tokens in story.prompts.items():
        hit = expected_hit(len(tokens), story.chunk)
        assert story.restored[name].num_cached_tokens == hit
        assert story.restored[name].token_ids == story.local[name].token_ids
    assert story.missed == 0


def test_restored_pages_of_each_group_hold_the_computed_bytes(story):
    first, second = story.pages
    for kind, parts in story.parts.items():
        for part in parts:
            mine = {key for key in first if int(key[-8:], 16) == part}
            same = sum(second.get(key) == first[key] for key in mine)
            # A state or the blocks of a window for each prompt; of full attention all of it.
            assert same >= len(story.prompts), f"{kind}, group {part}: {same} of {len(mine)}"


def test_decoded_chunk_is_restored(story):
    """States that decoding leaves are stored where vLLM says which they are (0.29 and later)."""
    assert story.continued.num_cached_tokens >= story.chunk
    if story.model not in STATES:
        assert story.continued.num_cached_tokens == expected_hit(len(story.decoded), story.chunk)


def test_zeros_in_place_of_each_kind_change_what_is_said(story):
    want = story.local["a token after a boundary"]
    for kind, done in story.zeroed.items():
        assert done.num_cached_tokens == 2 * story.chunk
        pairs = zip(done.logprobs, want.logprobs, strict=True)
        differs = done.token_ids != want.token_ids or max(abs(a - b) for a, b in pairs) > 0.03
        assert differs, f"{kind} is not seen"


@pytest.mark.parametrize("model", STATES)
def test_local_hit_without_its_state_is_not_used(model, tmp_path):
    """vLLM 0.25 counts the attention layers' local hit, whether or not a state is there.

    The second prompt shares a chunk of which no state was kept, since the first prompt's step
    ran past it. A state that is not there is zeros or somebody else's: far from the right one.
    """
    card = {"capacity_bytes": "1GiB"}
    with Deployment(tmp_path, card, shared_memory_size="256MiB") as deployment:
        with Engine() as engine:
            engine.start(model, deployment.connector(chunk_size=0), enforce_eager=True)
            chunk = int(engine.config("cache_config.block_size"))
            shared = prompt(31, chunk)
            prompts = [shared + prompt(seed, chunk + 1) for seed in (32, 33)]
            got = [_one(engine, tokens) for tokens in prompts]
            engine.shutdown()
        deployment.gateway.stop()
    with Engine() as engine:
        engine.start(model, enforce_eager=True)
        want = []
        for tokens in prompts:
            want.append(_one(engine, tokens))
            engine.reset_prefix_cache()
        engine.shutdown()
    for one, other in zip(got, want, strict=True):
        assert one.token_ids[0] == other.token_ids[0]
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.15)


def test_lost_object_of_one_group(tmp_path):
    """Recomputed where vLLM takes failed requests (0.30); else one clear message, and no tokens."""
    card = {"capacity_bytes": "1GiB"}
    with Deployment(tmp_path, card, faulty=True, shared_memory_size="256MiB") as deployment:
        connector = deployment.connector("recompute", chunk_size=0)
        with Engine() as engine:
            engine.start("falcon_h1", connector, enforce_eager=True)
            chunk = int(engine.config("cache_config.block_size"))
            engine.rpc("adp_note_saves")
            want = _one(engine, prompt(41, 2 * chunk + 1))
            states = engine.rpc("adp_parts")[0]["state"]
            deployment.wait_committed(2 + len(states))
            saved = [entry for entry in engine.rpc("adp_saved")[0] if entry[0] in states]
            deployment.kill9(engine)
        deployment.lose_object(saved[-1][2][-1], saved[-1][1][0])
        deployment.restart()
        with Engine() as engine:
            engine.start("falcon_h1", connector, enforce_eager=True)
            if engine.rpc("adp_takes_failed_requests")[0]:
                done = _one(engine, prompt(41, 2 * chunk + 1))
                assert done.token_ids[0] == want.token_ids[0]
            else:
                with pytest.raises(Exception, match="nothing half-restored is served"):
                    _one(engine, prompt(41, 2 * chunk + 1))

"""Store, kill -9, restore on two GPUs that share the tokens of every block (DCP).

VLLM chooses the attention backend; on Hopper FlashAttention's and FlashMLA's serve DCP. The same
prefix is in the GPUs' own cache at first as is restored afterwards, so that batch shapes, and with
them the tokens, are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.vllm]

CHUNK = 256
MAX_TOKENS = 6
PROMPTS = [
    prompt(71, 4 * CHUNK + 76),
    prompt(72, 3 * CHUNK + 1),  # one token left: a full graph replays
]
NUM_CHUNKS = sum(len(tokens) // CHUNK for tokens in PROMPTS)
CASES = {
    "mla-graphs": ("mla", {}),
    "mla-eager-by-blocks": ("mla", {"enforce_eager": True, "cp_kv_cache_interleave_size": 64}),
    "mqa-graphs": ("mqa", {}),
}


@dataclass
class Story:
    """What came out of both lives."""

    local: list[Completion] = field(default_factory=list)
    restored: list[Completion] = field(default_factory=list)
    beside: list[Completion] = field(default_factory=list)
    zeroed: Completion | None = None
    exchanges: list[bool] = field(default_factory=list)
    pages: list[list[dict[str, str]]] = field(default_factory=list)
    bytes_restored: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    log: str = ""


def _start(engine: Engine, case: str, deployment: Deployment) -> None:
    model, args = CASES[case]
    engine.start(
        model,
        deployment.connector(nvlink_fanout=True),
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        **args,
    )
    engine.rpc("adp_note_pages")


def _one(engine: Engine, tokens: list[int], max_tokens: int = MAX_TOKENS) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=max_tokens)
    return done


def _first_life(case: str, deployment: Deployment, told: Story) -> None:
    with Engine(separate_core=True) as engine:
        _start(engine, case, deployment)
        told.exchanges = engine.rpc("adp_exchange", "always")
        for tokens in PROMPTS:
            _one(engine, tokens[: expected_hit(len(tokens), CHUNK) + 1], max_tokens=1)
            told.local.append(_one(engine, tokens))
        deployment.wait_committed(NUM_CHUNKS)
        told.pages.append(engine.rpc("adp_noted_pages"))
        told.log = engine.child.log()
        deployment.kill9(engine)


def _second_life(case: str, deployment: Deployment, told: Story) -> None:
    with Engine(separate_core=True) as engine:
        _start(engine, case, deployment)
        told.restored = [_one(engine, tokens) for tokens in PROMPTS]
        told.pages.append(engine.rpc("adp_noted_pages"))
        told.bytes_restored = [counts["bytes_restored"] for counts in engine.rpc("adp_counts")]
        told.counters = deployment.counters()
        engine.reset_prefix_cache()
        told.beside = engine.generate(PROMPTS, max_tokens=1)
        engine.reset_prefix_cache()
        engine.rpc("adp_zero_restores", True)
        told.zeroed = _one(engine, PROMPTS[0])


@pytest.fixture(scope="module", params=CASES)
def story(request, tmp_path_factory):
    told, card = Story(), {"capacity_bytes": "1GiB"}
    folder = tmp_path_factory.mktemp("dcp")
    with Deployment(folder, card, shared_memory_size="256MiB") as deployment:
        _first_life(request.param, deployment, told)
        deployment.restart()
        _second_life(request.param, deployment, told)
        deployment.gateway.stop()
    return told


def test_restored_prompts_say_the_same(story):
    for tokens, before, after in zip(PROMPTS, story.local, story.restored, strict=True):
        hit = expected_hit(len(tokens), CHUNK)
        assert before.num_cached_tokens == hit, "not what the GPUs' own cache gives"
        assert after.num_cached_tokens == hit
        assert after.token_ids == before.token_ids
    assert story.counters.get("objects_missed", 0) == 0


def test_prompts_of_one_step_are_restored(story):
    assert [done.num_cached_tokens for done in story.beside] == [
        expected_hit(len(tokens), CHUNK) for tokens in PROMPTS
    ]


def test_restored_pages_hold_the_computed_bytes(story):
    for before, after in zip(*story.pages, strict=True):
        assert len(after) == NUM_CHUNKS
        assert after == before


def test_ranks_hold_other_bytes_of_every_chunk(story):
    one, other = story.pages[0]
    assert set(one) == set(other)
    assert all(one[key] != other[key] for key in one)


def test_each_rank_reads_its_half_of_an_object(story):
    one, other = story.bytes_restored
    assert one == other
    assert one + other == story.counters["bytes_read"]


def test_zeros_in_place_of_restored_bytes_change_the_tokens(story):
    assert story.zeroed.num_cached_tokens == expected_hit(len(PROMPTS[0]), CHUNK)
    assert story.zeroed.token_ids != story.local[0].token_ids, "the restored bytes are not seen"


def test_fanout_that_is_asked_for_is_off_with_one_line(story):
    assert story.exchanges == [False, False]
    (line,) = [line for line in story.log.splitlines() if "fan-out is off" in line]
    assert "decode_context_parallel_size = 2" in line

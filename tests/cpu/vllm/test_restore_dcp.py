"""Store, kill -9, restore with two ranks that share the tokens of every block (DCP).

VLLM has no DCP on CPUs: where a token goes and attention are stand-ins, the rest is vLLM's own
(tests/support/dcp_on_cpu.py). On GPUs everything is: tests/gpu/vllm/test_restore_dcp_on_gpu.py.

    first life   prompts computed and stored, one restored again layer by layer
    kill -9      of engine and gateway
    second life  restored asynchronously; with zeros in place of the bytes; from a damaged card
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = pytest.mark.vllm

CHUNK = 256
BLOCK = 64  # 32 tokens on each of two ranks
EXTENSION = "tests.support.dcp_on_cpu.WorkerExtension"
SHARED = prompt(63, 2 * CHUNK + 10)
PROMPTS = [prompt(61, 3 * CHUNK + 76), prompt(62, 2 * CHUNK + 1), SHARED]
MAX_TOKENS = 6


@dataclass
class Story:
    """What came out of both lives."""

    cold: list[Completion] = field(default_factory=list)
    layerwise: Completion | None = None
    restored: list[Completion] = field(default_factory=list)
    zeroed: Completion | None = None
    computed_anew: Completion | None = None
    pages: list[list[dict[str, str]]] = field(default_factory=list)
    bytes_restored: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    log: str = ""
    second_log: str = ""


def _start(engine: Engine, deployment: Deployment, policy: str, **settings: object) -> None:
    engine.start(
        "mqa",
        deployment.connector(policy, nvlink_fanout=True, **settings),
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        worker_extension_cls=EXTENSION,
    )
    engine.rpc("adp_note_pages")


def _one(engine: Engine, tokens: list[int]) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=MAX_TOKENS, logprobs=True)
    return done


def _first_life(deployment: Deployment, told: Story) -> None:
    with Engine(separate_core=True) as engine:
        _start(engine, deployment, "fail", load_mode="layerwise")
        told.cold = [_one(engine, tokens) for tokens in PROMPTS]
        deployment.wait_committed(sum(len(tokens) // CHUNK for tokens in PROMPTS))
        told.pages.append(engine.rpc("adp_noted_pages"))
        told.layerwise = engine.answer(PROMPTS[0], MAX_TOKENS)
        told.log = engine.child.log()
        deployment.kill9(engine)


def _second_life(deployment: Deployment, told: Story) -> None:
    with Engine(separate_core=True) as engine:
        _start(engine, deployment, "recompute")
        # A block of the second chunk becomes a local hit; its others must come from the card.
        _one(engine, SHARED[: CHUNK + BLOCK + 1])
        told.restored = [_one(engine, tokens) for tokens in PROMPTS]
        told.pages.append(engine.rpc("adp_noted_pages"))
        told.bytes_restored = [counts["bytes_restored"] for counts in engine.rpc("adp_counts")]
        told.counters = deployment.counters()
        engine.rpc("adp_zero_restores", True)
        told.zeroed = engine.answer(PROMPTS[0], MAX_TOKENS)
        engine.rpc("adp_zero_restores", False)
        assert deployment.damage_card()
        told.computed_anew = engine.answer(PROMPTS[0], MAX_TOKENS)
        told.second_log = engine.child.log()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    told = Story()
    with Deployment(tmp_path_factory.mktemp("dcp")) as deployment:
        _first_life(deployment, told)
        deployment.restart()
        _second_life(deployment, told)
        deployment.gateway.stop()
    return told


def test_restored_prompts_say_the_same(story):
    assert [done.num_cached_tokens for done in story.cold] == [0] * len(PROMPTS)
    for tokens, before, after in zip(PROMPTS, story.cold, story.restored, strict=True):
        assert after.num_cached_tokens == expected_hit(len(tokens), CHUNK), story.second_log
        assert after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
    assert story.counters.get("objects_missed", 0) == 0


def test_layerwise_restore_says_the_same(story):
    assert story.layerwise.num_cached_tokens == expected_hit(len(PROMPTS[0]), CHUNK)
    assert story.layerwise.token_ids == story.cold[0].token_ids


def test_restored_pages_hold_the_computed_bytes(story):
    for before, after in zip(*story.pages, strict=True):
        assert set(after) <= set(before), "nothing is stored again"
        # Not the chunk of which a block was a local hit.
        assert len(after) == sum(expected_hit(len(tokens)) // CHUNK for tokens in PROMPTS) - 1
        assert {key: before[key] for key in after} == after


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
    assert story.zeroed.token_ids != story.cold[0].token_ids, "the restored bytes are not seen"


def test_what_a_damaged_card_does_not_give_is_computed_anew(story):
    """VLLM is told of failed blocks, each of which is that of both ranks."""
    assert story.computed_anew.finish_reason == "length"
    assert story.computed_anew.token_ids == story.cold[0].token_ids


def test_fanout_that_is_asked_for_is_off_with_one_line(story):
    (line,) = [line for line in story.log.splitlines() if "fan-out is off" in line]
    assert "decode_context_parallel_size = 2" in line

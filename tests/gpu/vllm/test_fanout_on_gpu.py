"""Ranks that exchange the pages of a replicated cache, in a real vLLM with tensor parallelism.

Two, four or eight of them, as there are devices.

The same prefix is in the GPUs' own cache at first as is restored afterwards, so that batch
shapes, and with them the tokens, are the same. The tiny models' batches are too small to be
exchanged by themselves: tests switch between always and never (adp_exchange).

Sparse attention says the same tokens again only while it has nothing to choose: beyond
index_topk tokens the engine says others when it computes a prompt twice by itself. Longer
prompts are therefore compared by the bytes of their pages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine
from tests.support.process import ChildError

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.vllm]

CHUNK = 256
MAX_TOKENS = 6
LENGTHS = {"mla": (4 * CHUNK + 76, 3 * CHUNK + 1), "dsa": (7 * CHUNK + 76, 6 * CHUNK + 1)}
LONG = {"mla": 7 * CHUNK + 76, "dsa": 12 * CHUNK + 76}
LATE_S = 2.0
SAVE_LIMIT_S = 20.0
LOAD_TIMEOUT_S = 10.0
CASES = {
    "mla-graphs": ("mla", False),
    "mla-eager": ("mla", True),
    "dsa-graphs": ("dsa", False),
    "dsa-eager": ("dsa", True),
}


@dataclass
class Life:
    """An engine with prompts stored, and what it says of them.

    Attributes:
        computed: with nothing of the prompt in any cache; local: with its hit in the GPUs' own.
    """

    engine: Engine
    deployment: Deployment
    prompts: list[list[int]]
    computed: list[Completion]
    local: list[Completion]

    def one(self, index: int = 0) -> Completion:
        """Answer a prompt, of which nothing is in the GPUs' own cache."""
        self.forget()
        (done,) = self.engine.generate([self.prompts[index]], max_tokens=MAX_TOKENS)
        return done

    def forget(self) -> None:
        """Empty the GPUs' own cache, as soon as no save holds a block of it."""
        deadline = time.monotonic() + SAVE_LIMIT_S
        while True:
            try:
                return self.engine.reset_prefix_cache()
            except ChildError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def counts(self, name: str) -> list[int]:
        """Return a counter of every rank."""
        return [counts.get(name, 0) for counts in self.engine.rpc("adp_counts")]


def _num_ranks() -> int:
    import torch

    return max(num for num in (2, 4, 8) if num <= max(2, torch.cuda.device_count()))


def _start(model: str, eager: bool, folder, policy: str) -> Life:
    deployment = Deployment(folder, {"capacity_bytes": "1GiB"}, shared_memory_size="256MiB")
    engine = Engine(separate_core=True)
    mode = "layerwise" if policy == "fail" else "async"
    settings = {"nvlink_fanout": True, "load_timeout_s": LOAD_TIMEOUT_S, "load_mode": mode}
    engine.start(
        model,
        deployment.connector(policy, **settings),
        tensor_parallel_size=_num_ranks(),
        enforce_eager=eager,
    )
    assert all(engine.rpc("adp_exchange", "always")), "the ranks form no group"
    prompts = [prompt(41 + i, length) for i, length in enumerate(LENGTHS[model])]
    return Life(engine, deployment, prompts, [], [])


def _live(model: str, eager: bool, folder, policy: str) -> Life:
    life = _start(model, eager, folder, policy)
    engine, deployment, prompts = life.engine, life.deployment, life.prompts
    for tokens in prompts:
        life.computed += engine.generate([tokens], max_tokens=MAX_TOKENS, cache_salt="another")
        hit = expected_hit(len(tokens), CHUNK)
        engine.generate([tokens[: hit + 1]], max_tokens=1)
        (local,) = engine.generate([tokens], max_tokens=MAX_TOKENS)
        assert local.num_cached_tokens == hit
        life.local.append(local)
    deployment.wait_committed(2 * sum(len(tokens) // CHUNK for tokens in prompts))
    return life


def _end(life: Life) -> None:
    life.engine.close()
    life.deployment.gateway.close()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def life(request, tmp_path_factory):
    model, eager = CASES[request.param]
    life = _live(model, eager, tmp_path_factory.mktemp("fanout"), "fail")
    yield life
    _end(life)


@pytest.mark.parametrize("when", ["always", "never"])
def test_restore_says_the_same(life, when):
    life.engine.rpc("adp_exchange", when)
    before = life.counts("bytes_exchanged")
    for index, tokens in enumerate(life.prompts):
        done = life.one(index)
        assert done.num_cached_tokens == expected_hit(len(tokens), CHUNK)
        assert done.token_ids == life.local[index].token_ids
    exchanged = [b > a for a, b in zip(before, life.counts("bytes_exchanged"), strict=True)]
    assert exchanged == [when == "always"] * _num_ranks()
    assert life.deployment.counters().get("objects_missed", 0) == 0


def test_prompts_of_one_step_say_the_same(life):
    life.engine.rpc("adp_exchange", "always")
    life.forget()
    done = life.engine.generate(life.prompts, max_tokens=1)
    assert [d.num_cached_tokens for d in done] == [expected_hit(len(p)) for p in life.prompts]


def test_late_rank_is_waited_for(life):
    life.engine.rpc("adp_exchange", "always")
    life.engine.rpc("adp_share", 1, "late", LATE_S)
    began = time.monotonic()
    done = life.one()
    assert time.monotonic() - began > LATE_S
    life.engine.rpc("adp_share", 1, "well")
    assert done.token_ids == life.local[0].token_ids
    assert life.engine.rpc("adp_off") == [None] * _num_ranks()


def test_failed_share_fails_the_request_alone(life):
    life.engine.rpc("adp_exchange", "always")
    life.engine.rpc("adp_share", 1, "fail")
    done = life.one()
    life.engine.rpc("adp_share", 1, "well")
    assert done.finish_reason == "error"
    assert life.one(1).token_ids == life.local[1].token_ids


def test_zeros_in_place_of_shares_change_the_tokens(life):
    life.engine.rpc("adp_exchange", "always")
    life.engine.rpc("adp_zero_restores", True)
    done = life.one()
    life.engine.rpc("adp_zero_restores", False)
    assert done.token_ids != life.local[0].token_ids, "the exchanged bytes are not seen"


@pytest.mark.parametrize("model", ["mla", "dsa"])
def test_exchanged_pages_hold_the_computed_bytes(model, tmp_path):
    life = _start(model, True, tmp_path, "fail")
    try:
        life.prompts[:] = [prompt(51, LONG[model])]
        hit = expected_hit(LONG[model], CHUNK)
        computed = _pages_after(life, 0)
        life.deployment.wait_committed(hit // CHUNK)
        assert _pages_after(life, hit) == computed
        assert all(count > 0 for count in life.counts("bytes_exchanged"))
        life.engine.rpc("adp_zero_restores", True)
        for zeroed, before in zip(_pages_after(life, hit), computed, strict=True):
            assert zeroed.keys() == before.keys()
            assert not any(zeroed[name] == before[name] for name in before), "no restored page"
    finally:
        _end(life)


def _pages_after(life: Life, hit: int) -> list[dict[str, str]]:
    """Answer the prompt; return each rank's digests of the pages that were saved or restored."""
    life.engine.rpc("adp_note_pages")
    assert life.one().num_cached_tokens == hit
    return life.engine.rpc("adp_noted_pages")


@pytest.mark.parametrize("model", ["mla", "dsa"])
def test_failed_share_is_computed_again(model, tmp_path):
    life = _live(model, True, tmp_path, "recompute")
    try:
        life.engine.rpc("adp_share", 0, "fail")
        done = life.one()
        assert done.token_ids == life.computed[0].token_ids
        life.engine.rpc("adp_share", 0, "well")
        assert life.one(1).token_ids == life.local[1].token_ids
    finally:
        _end(life)


def test_killed_rank_ends_in_an_error(tmp_path):
    life = _live("mla", False, tmp_path, "fail")
    try:
        life.engine.rpc("adp_share", 1, "kill")
        life.forget()
        began = time.monotonic()
        with pytest.raises(ChildError):
            life.engine.generate([life.prompts[0]], max_tokens=1, timeout_s=4 * LOAD_TIMEOUT_S)
        assert time.monotonic() - began < 3 * LOAD_TIMEOUT_S, "it hung"
    finally:
        _end(life)

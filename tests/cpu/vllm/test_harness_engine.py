"""The engine harness by itself: real vLLM, tiny models, no connector."""

import pytest

from tests.support.engine import Engine
from tests.support.process import ChildError
from tests.support.server import Server

pytestmark = pytest.mark.vllm

PROMPT = [(7 * i) % 2000 + 3 for i in range(300)]
EARLY_CHANGE = [*PROMPT[:3], 99, *PROMPT[4:]]
OTHER = [(11 * i) % 2000 + 3 for i in range(200)]


def test_llama_repeats_and_depends_on_cache():
    with Engine() as engine:
        facts = engine.start("llama")
        assert facts["device"] in {"cpu", "cuda"}
        first, other = engine.generate([PROMPT, OTHER], max_tokens=8, logprobs=True)
        assert len(first.token_ids) == 8
        assert first.finish_reason == "length"
        assert first.num_cached_tokens == 0
        assert first.ttft_s is not None
        assert first.ttft_s > 0
        assert all(value is not None and value < 0 for value in first.logprobs)
        assert other.token_ids != first.token_ids

        (again,) = engine.generate([PROMPT], max_tokens=8)
        assert again.token_ids == first.token_ids
        assert again.num_cached_tokens == 288  # 9 blocks of 32
        (salted,) = engine.generate([PROMPT], max_tokens=8, cache_salt="tenant")
        assert salted.num_cached_tokens == 0
        (changed,) = engine.generate([EARLY_CHANGE], max_tokens=8)
        assert changed.token_ids != first.token_ids, "weights too small: the KV cache is not seen"

        engine.reset_prefix_cache()
        (cold,) = engine.generate([PROMPT], max_tokens=8)
        assert cold.num_cached_tokens == 0
        assert engine.metrics()["vllm:prefix_cache_hits"] == 288
        engine.shutdown()


def test_llama_tp2_says_the_same_and_dies_whole(engine):
    engine.start("llama")
    (alone,) = engine.generate([PROMPT], max_tokens=8)
    with Engine(separate_core=True) as killed:
        killed.start("llama", tensor_parallel_size=2)
        (together,) = killed.generate([PROMPT], max_tokens=8)
        assert together.token_ids == alone.token_ids
        assert len(killed.child.members()) >= 4  # child, core, two workers
        killed.begin_generate([PROMPT] * 64, max_tokens=1000)  # minutes: the kill comes first
        shared = killed.child.shared_memory()
        assert shared
        killed.kill9()
        assert not [path for path in shared if path.exists()], "the engine's shared memory stayed"
        assert killed.child.members() == []
        with pytest.raises(ChildError, match="died before it replied"):
            killed.finish_generate(timeout_s=5)


def test_mla_repeats_and_depends_on_cache(engine):
    engine.start("mla")
    first, changed = engine.generate([PROMPT, EARLY_CHANGE], max_tokens=8)
    (again,) = engine.generate([PROMPT], max_tokens=8)
    assert again.token_ids == first.token_ids
    assert changed.token_ids != first.token_ids


def test_bad_engine_argument_shows_its_error(engine):
    with pytest.raises(ChildError, match="no_such_argument"):
        engine.start("llama", no_such_argument=1)
    engine.start("llama")  # the child lives


def test_child_that_does_not_reply_in_time_is_killed():
    """Its late reply would be taken for that to the next request."""
    with Engine() as engine:
        with pytest.raises(ChildError, match="no reply within"):
            engine.metrics(timeout_s=0.0)
        assert not engine.child.alive()


def test_server_counts_cached_tokens():
    with Server() as server:
        server.start("llama")
        first = server.complete(PROMPT, max_tokens=8)
        again = server.complete(PROMPT, max_tokens=8)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 288)
        assert again.token_ids == first.token_ids
        assert len(first.token_ids) == 8
        assert first.ttft_s is not None
        assert server.metrics()["vllm:prefix_cache_hits_total"] == 288
        server.shutdown()

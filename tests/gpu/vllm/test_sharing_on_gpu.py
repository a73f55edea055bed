"""Who shares what on a GPU: 200 random prompts over two lives, salts, namespaces, a torn save.

In bf16 the same token computed in another batch shape differs in its last bits, so every
prompt runs alone and its first answer has the very hit that later answers have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt, random_prompts
from tests.support.engine import Completion, Engine
from tests.support.process import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

CHUNK = 64
NUM_PROMPTS = 200
PROMPTS = random_prompts(3, NUM_PROMPTS)
SALTED = prompt(21, 3 * CHUNK + 5)
TORN = prompt(42, 6 * CHUNK + 3)
MAX_TOKENS = 4
CARD = {"capacity_bytes": "1GiB", "slot_bytes": "64KiB"}


@dataclass
class Story:
    """What came out of three lives; tokens and hits by prompt."""

    first: list[Completion] = field(default_factory=list)
    restored: list[Completion] = field(default_factory=list)
    hits_of_salts: dict[str | None, int] = field(default_factory=dict)
    torn_before: Completion | None = None
    torn: Completion | None = None
    other_namespace: int = -1
    read: int = 0
    missed: int = 0


def _one(
    engine: Engine, tokens: list[int], max_tokens: int = MAX_TOKENS, **how: object
) -> Completion:
    (done,) = engine.generate([tokens], max_tokens=max_tokens, **how)
    return done


def _with_local_hit(engine: Engine, tokens: list[int]) -> Completion:
    """Compute what a restore would bring, then answer from the GPU's own cache."""
    _one(engine, tokens[: expected_hit(len(tokens), CHUNK) + 1], max_tokens=1)
    return _one(engine, tokens)


def _first_life(engine: Engine, deployment: Deployment, story: Story) -> None:
    story.first = [_with_local_hit(engine, tokens) for tokens in PROMPTS]
    _one(engine, SALTED, cache_salt="one")
    chunks = {tuple(tokens[:end]) for tokens in PROMPTS for end in _chunk_ends(tokens)}
    deployment.wait_committed(len(chunks) + len(SALTED) // CHUNK)
    story.torn_before = _one(engine, TORN[: CHUNK + 1], max_tokens=1)
    deployment.wait_committed(len(chunks) + len(SALTED) // CHUNK + 1)
    deployment.inject("write 60")  # objects reach the card, their commit record does not
    puts = deployment.counters()["puts"]
    engine.begin_generate([TORN])
    wait_until(lambda: deployment.counters()["puts"] > puts, 60, "the save has begun")
    deployment.kill9(engine)
    deployment.inject("")


def _second_life(engine: Engine, deployment: Deployment, story: Story) -> None:
    story.restored = [_one(engine, tokens) for tokens in PROMPTS]
    story.torn = _one(engine, TORN)
    for salt in ("two", "one", None):
        story.hits_of_salts[salt] = _one(engine, SALTED, cache_salt=salt).num_cached_tokens
    counters = deployment.counters()
    story.read, story.missed = counters["objects_read"], counters.get("objects_missed", 0)


def _chunk_ends(tokens: list[int]) -> range:
    return range(CHUNK, len(tokens) + 1, CHUNK)


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def story(request, tmp_path_factory):
    told = Story()
    folder = tmp_path_factory.mktemp("sharing")
    how = {"enforce_eager": request.param}
    with Deployment(folder, CARD, faulty=True, shared_memory_size="256MiB") as deployment:
        with Engine() as engine:
            engine.start("llama", deployment.connector(chunk_size=CHUNK, key_namespace="a"), **how)
            _first_life(engine, deployment, told)
        deployment.restart()
        with Engine() as engine:
            engine.start("llama", deployment.connector(chunk_size=CHUNK, key_namespace="a"), **how)
            _second_life(engine, deployment, told)
            engine.shutdown()
        with Engine() as engine:
            engine.start("llama", deployment.connector(chunk_size=CHUNK, key_namespace="b"), **how)
            told.other_namespace = _one(engine, PROMPTS[0]).num_cached_tokens
            engine.shutdown()
        deployment.gateway.stop()
    return told


def test_random_prompts_say_the_same_after_a_restart(story):
    """Their prefixes come from the card at first, then from the GPU's own cache."""
    assert [one.token_ids for one in story.restored] == [one.token_ids for one in story.first]
    hits = [expected_hit(len(tokens), CHUNK) for tokens in PROMPTS]
    assert all(one.num_cached_tokens >= hit for one, hit in zip(story.restored, hits, strict=True))
    assert story.read > 0
    assert story.missed == 0


def test_two_salts_never_share(story):
    assert story.hits_of_salts == {"two": 0, "one": expected_hit(len(SALTED), CHUNK), None: 0}


def test_two_namespaces_never_share(story):
    assert story.other_namespace == 0


def test_half_written_chunks_are_never_offered(story):
    """One chunk was committed before the save that was torn."""
    assert story.torn.num_cached_tokens == CHUNK

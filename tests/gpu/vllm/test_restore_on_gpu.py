"""Store, kill -9, restore on a CUDA device: full graphs, eager, asynchronous, MLA, two ranks.

In bf16 another shape of the same computation may say another token, so every prompt is
compared with a run of the same shape: the same prompt hit in the engine's own prefix cache
just as far as it is hit on the card. Both then compute the same few tokens from the same
bytes. Lengths are chosen for that: a few tokens beyond whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine

pytestmark = pytest.mark.vllm

CHUNK = 256
PLUS_ONE = prompt(61, 4 * CHUNK + 1)  # its one token left to compute replays a full graph
PLUS_NINE = prompt(62, 3 * CHUNK + 9)
BEFORE_DECODE = prompt(63, 2 * CHUNK - 10)
MAX_TOKENS = 12
DECODED = CHUNK + 40  # a whole chunk of decoded tokens
GRAPHS: dict[str, bool] = {}  # the default of vLLM, and of the harness on a device
EAGER = {"enforce_eager": True}
FULL_GRAPHS = "FULL_AND_PIECEWISE"
LOGPROB_TOLERANCE = 1e-3


@dataclass
class Told:
    """What came out of one engine configuration.

    Attributes:
        prompts: what was restored: PLUS_ONE, PLUS_NINE and one that ends with decoded tokens.
        hot: hit in the engine's own prefix cache; restored: hit on the card.
    """

    device: str = ""
    graph_modes: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    hot: list[Completion] = field(default_factory=list)
    restored: list[Completion] = field(default_factory=list)
    zeroed: Completion | None = None
    counters: dict[str, int] = field(default_factory=dict)


def start(engine, deployment, told, model, settings=None, **args):
    settings = {"chunk_size": CHUNK} | (settings or {})
    told.device = engine.start(model, deployment.connector(**settings), **args)["device"]
    told.graph_modes.append(engine.config("compilation_config.cudagraph_mode"))


def one(engine, tokens):
    (done,) = engine.generate([tokens], max_tokens=MAX_TOKENS, logprobs=True)
    return done


def store(engine, deployment, told):
    """Compute everything, then once more out of the engine's own cache."""
    before = deployment.counters().get("chunks_committed", 0)
    (decoded,) = engine.generate([BEFORE_DECODE], max_tokens=DECODED)
    told.prompts = [
        PLUS_ONE,
        PLUS_NINE,
        (BEFORE_DECODE + decoded.token_ids)[: 3 * CHUNK + 1],
    ]
    for tokens in told.prompts[:2]:
        one(engine, tokens)
    told.hot = [one(engine, tokens) for tokens in told.prompts]
    deployment.wait_committed(before + 4 + 3 + 3)


def restore(engine, deployment, told):
    """Bring everything back from the card; then see that zeros would have been noticed."""
    engine.reset_prefix_cache()
    told.restored = [one(engine, tokens) for tokens in told.prompts]
    told.counters = deployment.counters()
    engine.reset_prefix_cache()
    engine.rpc("adp_zero_restores", True)
    told.zeroed = one(engine, PLUS_ONE)
    engine.rpc("adp_zero_restores", False)
    engine.reset_prefix_cache()


def judge(told, graph_mode):
    """Check one configuration's outcome."""
    hits = [expected_hit(len(tokens), CHUNK) for tokens in told.prompts]
    assert [done.num_cached_tokens for done in told.hot] == hits, "other shapes are compared"
    assert [done.num_cached_tokens for done in told.restored] == hits
    for restored, hot in zip(told.restored, told.hot, strict=True):
        assert restored.token_ids == hot.token_ids
        assert restored.logprobs == pytest.approx(hot.logprobs, abs=LOGPROB_TOLERANCE)
    assert told.counters.get("objects_missed", 0) == 0
    assert told.counters["objects_read"] > 0
    assert told.zeroed.num_cached_tokens == hits[0]
    assert told.zeroed.token_ids != told.hot[0].token_ids, "the restored bytes are not seen"
    if told.device == "cuda":
        assert set(told.graph_modes) == {graph_mode}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Every single-device configuration, in three processes: each start costs much."""
    graphs, eager, waiting, mla = (Told() for _ in range(4))
    with Deployment(tmp_path_factory.mktemp("gpu"), shared_memory_size="256MiB") as deployment:
        with Engine() as engine:
            start(engine, deployment, graphs, "llama", **GRAPHS)
            store(engine, deployment, graphs)
            deployment.kill9(engine)
        deployment.restart()
        with Engine() as engine:
            start(engine, deployment, graphs, "llama", **GRAPHS)
            restore(engine, deployment, graphs)
            start(engine, deployment, eager, "llama", {"key_namespace": "eager"}, **EAGER)
            store(engine, deployment, eager)
            restore(engine, deployment, eager)
            asynchronous = {"key_namespace": "async", "load_mode": "async"}
            start(engine, deployment, waiting, "llama", asynchronous, **GRAPHS)
            store(engine, deployment, waiting)
            restore(engine, deployment, waiting)
            start(engine, deployment, mla, "mla", **GRAPHS)
            store(engine, deployment, mla)
            deployment.kill9(engine)
        deployment.restart()
        with Engine() as engine:
            start(engine, deployment, mla, "mla", **GRAPHS)
            restore(engine, deployment, mla)
            engine.shutdown()
        deployment.gateway.stop()
    return {"graphs": graphs, "eager": eager, "async": waiting, "mla": mla}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "graph_mode"),
    [("graphs", FULL_GRAPHS), ("eager", "NONE"), ("async", FULL_GRAPHS), ("mla", FULL_GRAPHS)],
)
def test_restored_says_the_same(stories, name, graph_mode):
    judge(stories[name], graph_mode)


@pytest.mark.multi_gpu
def test_two_ranks_restored_say_the_same(tmp_path):
    told = Told()
    with Deployment(tmp_path, shared_memory_size="256MiB") as deployment:
        for life in (store, restore):
            with Engine(separate_core=True) as engine:
                start(engine, deployment, told, "llama", tensor_parallel_size=2, **GRAPHS)
                life(engine, deployment, told)
                deployment.kill9(engine)
            deployment.restart()
    judge(told, FULL_GRAPHS)

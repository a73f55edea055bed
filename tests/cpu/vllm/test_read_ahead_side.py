"""Reading ahead from the scheduler side: what waiting requests say, and a real engine's queue."""

import importlib
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from adp_kv.layout.parts import Part
from adp_kv.wire.keys import part_keys
from tests.support.deployment import Deployment, prompt

pytestmark = pytest.mark.vllm

KEYS = np.arange(16, dtype=np.uint64).reshape(8, 2)


class Client:
    """Notes what is said to the gateway."""

    def __init__(self):
        self.said = []

    def read_ahead(self, chunks, part):
        assert part == 0
        self.said.append(chunks[:, 0].tolist())
        return len(self.said)

    def forget(self, number):
        self.said.append(-number)


class Pool:
    """vLLM's prefix cache: so many leading blocks are in it."""

    def __init__(self, num_cached):
        self.num_cached = num_cached

    def get_cached_block(self, block_hash, groups):
        assert groups == [0]
        return [block_hash] if block_hash < self.num_cached else None


@pytest.fixture
def side():
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        module = importlib.import_module("adp_kv.connector.read_ahead")
    engine = SimpleNamespace(
        chunk_tokens=64, hash_tokens=32, parts=(Part(0, 32, 2),), undoable=True
    )
    return module.ReadAheadSide(Client(), engine)


def request_of(name="r"):
    return SimpleNamespace(request_id=name, block_hashes=list(range(16)))


def ask(side, name="r"):
    ticket = SimpleNamespace(stored=None)
    side.on_asked(name, ticket)
    return ticket


@pytest.mark.parametrize(
    ("num_cached", "hit_tokens", "chunks"),
    [(0, 256, [0, 2, 4, 6]), (3, 256, [2, 4, 6]), (4, 256, [4, 6]), (16, 256, []), (0, 0, [])],
    ids=["nothing local", "half a chunk local", "two chunks local", "all local", "no hit"],
)
def test_what_the_gpu_lacks_is_told(side, num_cached, hit_tokens, chunks):
    side.tell(request_of(), KEYS, hit_tokens, Pool(num_cached))
    assert side._client.said == ([chunks] if chunks else [])


@pytest.mark.parametrize("local", [False, True])
def test_each_part_is_told_what_it_needs(side, local):
    """Attention from its local hit on, a window the last chunk, a state the one at the end."""
    side._engine.parts = (Part(0, 32, 2), Part(1, 32, 2, 31), Part(2, 64, 1, 1, recurrent=True))
    side._engine.undoable = False
    told = []
    side._client.read_ahead = lambda chunks, part: told.append((part, chunks.tolist()))
    cached = {(i, 0) for i in range(4)} | {(1, 1), (1, 2)} if local else set()
    pool = SimpleNamespace(
        get_cached_block=lambda key, groups: ["b"] if (key, groups[0]) in cached else None
    )
    side.tell(request_of(), KEYS, 4 * 64, pool)
    first = 1 if local else 0
    assert told == [
        (0, KEYS[first:4].tolist()),
        (1, part_keys(KEYS[3:4], 1).tolist()),
        (2, part_keys(KEYS[3:4], 2).tolist()),
    ]


def test_pool_that_can_not_be_asked_has_nothing(side):
    side.tell(request_of(), KEYS, 128, SimpleNamespace())
    assert side._client.said == [[0, 2]]


def test_request_is_considered_once_when_its_answer_comes(side):
    ticket = ask(side)
    assert side.answered() == []
    ticket.stored = np.array([True])
    assert side.answered() == ["r"]
    assert side.answered() == []


def test_admitted_request_is_told_no_more(side):
    ticket = ask(side)
    side.on_admitted("r", restores=True)
    ticket.stored = np.array([True])
    assert side.answered() == []


def test_request_that_restores_nothing_or_ends_is_forgotten(side):
    for name in ("a", "b", "c"):
        side.tell(request_of(name), KEYS, 128, Pool(0))
    said = side._client.said
    side.on_admitted("a", restores=False)
    side.on_admitted("b", restores=True)
    assert said[3:] == [-1]
    side.on_finished("b")
    side.on_finished("c")
    side.on_finished("c")
    assert said[3:] == [-1, -2, -3]


def test_preempted_request_replaces_what_it_said(side):
    side.tell(request_of(), KEYS, 128, Pool(0))
    side.tell(request_of(), KEYS, 256, Pool(0))
    assert side._client.said == [[0, 2], -1, [0, 2, 4, 6]]


def test_waiting_request_of_an_engine_is_read_ahead(engine, tmp_path):
    """One request runs, one waits: the second one's layers are in the ring when it is admitted."""
    stored, running = prompt(31, 4 * 256 + 20), prompt(32, 40)
    with Deployment(tmp_path) as deployment:
        engine.start("llama", deployment.connector(chunk_size=256), max_num_seqs=1)
        (cold,) = engine.generate([stored], max_tokens=8, logprobs=True)
        deployment.wait_committed(4)
        engine.reset_prefix_cache()
        _, warm = engine.generate([running, stored], max_tokens=8, logprobs=True)
        assert warm.num_cached_tokens == 1024
        assert warm.token_ids == cold.token_ids
        counters = deployment.counters()
        assert counters["objects_taken_ahead"] > 0
        assert counters["objects_read"] == 16  # 4 layers, those read ahead included
        assert counters.get("objects_unused_ahead", 0) == 0

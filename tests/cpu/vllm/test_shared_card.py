"""Several deployments on one card that more than one gateway may open: a real Valkey.

What two deployments share follows from vLLM's own configuration (tests/support/key_rig.py), and
goes through two real gateways; the last test has two real engines.
"""

import contextlib
import json
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support import tiny_models
from tests.support.deployment import off_lines, prompt, transfer_config
from tests.support.engine import Engine
from tests.support.gateways import Gateway
from tests.support.key_rig import Setup, chunk_keys, hellos
from tests.support.process import wait_until
from tests.support.serving import Rank, get, store, welcome_all
from tests.support.valkey import ValkeyServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CHUNK = 128
SETTINGS = {"chunk_size": CHUNK, "key_namespace": "chat"}


@pytest.fixture(scope="module", autouse=True)
def valkey():
    """A server for all tests; made before what counts a test's children."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The deployment that the others are compared with."""
    folder = tmp_path_factory.mktemp("models") / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_models.load("llama").config))
    return Setup(str(folder), settings=SETTINGS)


def gateway_on(valkey):
    return Gateway.serve("resp", {"endpoints": valkey.tcp}, shared_memory_size="16MiB")


@dataclass
class Joined:
    """An engine's ranks at a gateway of its own, and the keys of one prompt."""

    ranks: list
    chunks: object

    def store(self, version):
        store(self.ranks, self.chunks, version=version)

    def finds(self):
        return self.ranks[0].lookup(self.chunks)

    def restores(self, seq, version):
        """Return whether every object came; get() compares each byte."""
        outcomes = get(self.ranks, seq, self.chunks, list(self.ranks[0].caches), version=version)
        return all(set(o.status.values()) == {0} and not o.failed for o in outcomes.values())


@contextlib.contextmanager
def deployed(valkey, setup):
    """Join a new gateway as the ranks of an engine with this setup would."""
    with gateway_on(valkey) as gateway, contextlib.ExitStack() as stack:
        ranks = []
        for hello in hellos(setup):
            rank = Rank(gateway.address, hello.rank, hello.caches)
            stack.callback(rank.close, "done")
            rank.hello = hello
            rank.send(hello)
            ranks.append(rank)
        welcomes = welcome_all(ranks)
        for rank, welcome in zip(ranks, welcomes, strict=True):
            rank.attach(welcome)
        yield Joined(ranks, chunk_keys(setup, welcomes[0].geometry))


def of(base, **changes):
    """Return the base with changes, as another process on another host."""
    other = {"process": {"engine_id": "two", "pid": 4711, "request_id": "s"}}
    return replace(base, **(other | changes))


SAME = {
    "another process": {},
    "more memory and blocks": {"engine": {"num_gpu_blocks_override": 99, "max_num_seqs": 3}},
    "other time-outs": {"settings": SETTINGS | {"load_timeout_s": 3.0, "reconnect": True}},
}
OTHER = {
    "namespace": {"settings": SETTINGS | {"key_namespace": "search"}},
    "no namespace": {"settings": {"chunk_size": CHUNK}},
    "chunk size": {"settings": SETTINGS | {"chunk_size": 64}},
    "block size": {"engine": {"block_size": 64}},
    "dtype": {"engine": {"dtype": "bfloat16"}, "dtype": torch.bfloat16},
    "KV dtype": {"dtype": torch.bfloat16},
    "layout": {"layout": "HND"},
    "TP": {"engine": {"tensor_parallel_size": 2}},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_same_namespace_and_model_is_shared(valkey, base, changes):
    valkey.client.flushall()
    with deployed(valkey, base) as one, deployed(valkey, of(base, **changes)) as two:
        assert two.finds() == [False, False]
        one.store(version=1)
        assert two.finds() == [True, True]
        assert two.restores(seq=7, version=1)


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_other_namespace_or_bytes_are_not_shared(valkey, base, changes):
    """Neither finds what the other stored; both find their own, byte by byte."""
    valkey.client.flushall()
    with deployed(valkey, base) as one, deployed(valkey, of(base, **changes)) as two:
        one.store(version=1)
        assert not any(two.finds())
        two.store(version=2)
        assert two.restores(seq=7, version=2)
        assert one.restores(seq=8, version=1)


PROMPT = prompt(71, 3 * CHUNK + 9)


def connector(gateway, **settings):
    return transfer_config(gateway.address, **(SETTINGS | settings))


def test_two_engines_of_one_namespace_share_a_valkey(engine, valkey):
    """The second hits what the first, which still lives, has stored; another namespace misses."""
    valkey.client.flushall()
    one, before = engine, off_lines(engine.child.log())
    with gateway_on(valkey) as a, gateway_on(valkey) as b, Engine() as two:
        one.start("llama", connector(a))
        (computed,) = one.generate([PROMPT])
        assert computed.num_cached_tokens == 0
        wait_until(lambda: a.counters().get("chunks_committed", 0) == 3, 30, "stored")
        two.start("llama", connector(b, key_namespace="search"))
        (apart,) = two.generate([PROMPT])
        assert apart.num_cached_tokens == 0
        two.start("llama", connector(b))
        (shared,) = two.generate([PROMPT])
        assert shared.num_cached_tokens == 3 * CHUNK
        assert shared.token_ids == apart.token_ids == computed.token_ids
        one.reset_prefix_cache()
        assert one.generate([PROMPT])[0].num_cached_tokens == 3 * CHUNK
        assert off_lines(one.child.log()) == before
        assert off_lines(two.child.log()) == 0

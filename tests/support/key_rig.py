"""The keys an engine would use, without an engine: vLLM's configuration and hashes, our code.

    base = keys(Setup(folder))
    assert keys(Setup(folder, cache_salt="b")).isdisjoint(base)

What is vLLM's own: VllmConfig from EngineArgs, cache specs, the hash functions, the root hash
and Request. What is ours: the facts, the caches of every rank, the gateway's digest of them,
and the scheduler side. Only the lookup client is a stand-in: it keeps what it is asked.
"""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch

from adp_kv.config import ConnectorSettings
from adp_kv.layout.fingerprint import digest
from adp_kv.sdk.rank_client import declare
from adp_kv.wire.keys import commit_keys, fragment_keys, object_keys
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello
from gateway.session import Session

NUM_BLOCKS = 4
PROMPT = tuple(range(5, 5 + 300))


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that may or may not matter to a key.

    Attributes:
        engine: vLLM's EngineArgs; model is the folder.
        mutate: called with the VllmConfig, for what this platform would not accept.
        settings: the connector's.
        environment: of the engine's process.
        heads, head_size, dtype, num_layers: of the cache; layout: how its dimensions lie.
        request: keyword arguments of vLLM's Request.
        patches: names in vllm_view and their values.
        process: host facts: pid, engine_id.
    """

    folder: str
    engine: dict = field(default_factory=dict)
    mutate: object = None
    settings: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.float32
    num_layers: int = 2
    layout: str = "NHD"
    layout_name: str | None = None
    prompt: tuple = PROMPT
    request: dict = field(default_factory=dict)
    patches: dict = field(default_factory=dict)
    process: dict = field(default_factory=dict)


class Asked:
    """Stands in for the lookup client."""

    off = ended = again = False
    key_file = ""

    def __init__(self, geometry):
        self.welcome = SimpleNamespace(geometry=geometry)
        self.chunks = None

    def __call__(self, *_args):
        return self

    def start(self):
        pass

    def wait_settled(self, timeout_s):
        pass

    def ask(self, chunks, timeout_s):
        self.chunks = chunks


def chunk_keys(setup, geometry=None):
    """Return the chunk keys of the setup's request: uint64 [n, 2].

    Args:
        setup: of the engine and the request.
        geometry: as a gateway told it; worked out here where there is none.
    """
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": "0"} | setup.environment):
        return _chunk_keys(setup, geometry)


def keys(setup):
    """Return every key of the request's chunks: objects, fragments, commits."""
    chunks = chunk_keys(setup)
    objects = object_keys(chunks, [8 * layer for layer in range(setup.num_layers)])
    every = [commit_keys(chunks), objects]
    rows = torch.arange(len(objects)).numpy()
    every += [fragment_keys(objects, rows, rows * 0 + number) for number in (0, 1)]
    return {key.tobytes() for array in every for key in array}


def _chunk_keys(setup, geometry):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    import adp_kv.connector.scheduler as scheduler_side
    import adp_kv.connector.vllm_view as view

    config = _vllm_config(setup)
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(hash_fn)
    settings = ConnectorSettings(**setup.settings)
    cache_config = _cache_config(setup, config)
    patches = {"FORMAT_VERSION": view.FORMAT_VERSION} | setup.patches
    with mock.patch.multiple(view, **patches):
        engine = view.view_engine(config, cache_config, settings)
    client = Asked(geometry or _geometry(setup, config, engine))
    with mock.patch.object(scheduler_side, "LookupClient", client):
        side = scheduler_side.SchedulerSide(engine, settings, digest(engine.facts))
    side.on_new_request(_request(setup, engine, hash_fn, kv_cache_utils))
    assert client.chunks is not None, "nothing was asked: the cache is off"
    return client.chunks


def _vllm_config(setup):
    from vllm.engine.arg_utils import EngineArgs

    transfer = {
        "kv_connector": "AdpConnector",
        "kv_connector_module_path": "adp_kv.connector",
        "kv_role": "kv_both",
        "engine_id": setup.process.get("engine_id", "one"),
        "kv_port": setup.process.get("kv_port", 14579),
    }
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    arguments = {"model": str(setup.folder), "kv_transfer_config": transfer}
    config = EngineArgs(**(arguments | defaults | setup.engine)).create_engine_config()
    if setup.mutate is not None:
        setup.mutate(config)
    return config


def _cache_config(setup, config, stage=0, num_stages=1):
    """Return the cache configuration of a pipeline stage; by default of all layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=max(1, setup.heads // config.parallel_config.tensor_parallel_size),
        head_size=setup.head_size,
        dtype=setup.dtype,
    )
    layers = range(setup.num_layers)[stage::num_stages]
    names = [f"model.layers.{layer}.self_attn.attn" for layer in layers]
    groups = [KVCacheGroupSpec(names, spec)]
    return KVCacheConfig(NUM_BLOCKS, [], groups, kv_cache_layout=setup.layout_name)


def hellos(setup):
    """Return what every rank of the setup would say to the gateway, by rank."""
    import adp_kv.connector.vllm_view as view

    config = _vllm_config(setup)
    settings = ConnectorSettings(**setup.settings)
    engine = view.view_engine(config, _cache_config(setup, config), settings)
    return _hellos(setup, config, engine)


def _hellos(setup, config, engine):
    from adp_kv.connector.vllm_caches import view_caches

    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}[setup.layout]
    said = []
    for rank in range(engine.world_size):
        cache_config = _cache_config(setup, config, rank // tp, pp)
        (group,) = cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        shape = (NUM_BLOCKS, spec.block_size, spec.num_kv_heads, 2 * spec.head_size)
        stored = torch.zeros([shape[i] for i in order], dtype=spec.dtype)
        tensors = dict.fromkeys(group.layer_names, stored.permute(order))  # its own inverse
        caches = view_caches(tensors, config, cache_config, engine.parts, rank % tp)
        said.append(
            Hello(
                version=PROTOCOL_VERSION,
                release="any",
                engine=engine.engine_id,
                rank=rank,
                world_size=engine.world_size,
                namespace=digest(engine.facts),
                caches=declare(caches),
                pid=setup.process.get("pid", 1) + rank,
            )
        )
    return said


def _geometry(setup, config, engine):
    """Return what the gateway tells: its digest of all ranks' caches."""
    session = Session(engine.engine_id, engine.world_size, digest(engine.facts))
    for hello in _hellos(setup, config, engine):
        session.join(bytes([hello.rank]), hello, 0.0)
    session.settle()
    return session.geometry()


def _request(setup, engine, hash_fn, kv_cache_utils):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=setup.process.get("request_id", "r"),
        prompt_token_ids=list(setup.prompt),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(engine.hash_tokens, hash_fn),
        **setup.request,
    )

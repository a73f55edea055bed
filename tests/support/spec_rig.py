"""The caches a model has in vLLM, without weights, an engine or other ranks.

    rig = specs(folder, tp_size=2)      # vLLM's own layers, on the meta device
    said = hellos(rig)                  # what its ranks would tell the gateway

vLLM builds the model, asks each layer for its cache, fits the block size to the states and groups
the caches, all by its own code. Stand-ins: the process groups (their sizes alone are asked), the
attention backend where there is none for CPUs, and the pages, bytes of the size that vLLM says.
"""

import contextlib
import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

from adp_kv.config import ConnectorSettings
from adp_kv.layout.fingerprint import digest
from adp_kv.sdk.rank_client import declare
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello

NUM_BLOCKS = 2
ONE_RANK = ("_WORLD", "_PP", "_DP", "_EP", "_DCP", "_PCP")


@dataclass(frozen=True, slots=True)
class Rig:
    """A model's configuration in vLLM and its caches: config, KVCacheConfig, our view of both."""

    config: object
    cache_config: object
    engine: object

    @property
    def block_tokens(self):
        return self.config.cache_config.block_size


def _group(size):
    ranks = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(
        world_size=size,
        rank_in_group=0,
        rank=0,
        ranks=list(range(size)),
        is_first_rank=True,
        is_last_rank=True,
        device_group=ranks,
        cpu_group=ranks,
        device=torch.device("cpu"),
    )


@contextlib.contextmanager
def _ranks(tp_size):
    """Let vLLM see a rank of a tensor-parallel group, and otherwise groups of one."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    names = [
        n for n in ("_WORLD", "_PP", "_DP", "_EP", "_DCP", "_PCP") if hasattr(parallel_state, n)
    ]
    groups = {name: _group(1) for name in names} | {"_TP": _group(tp_size)}
    lazy = registry._LazyRegisteredModel

    def inspect(self):
        """Look at the class here; vLLM starts a process for each."""
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls, selected_backend, attn_selector_config, num_heads=None):
        """Sparse attention does not run on a CPU; its caches are those it has on a GPU."""
        dense = attn_selector_config._replace(use_sparse=False)
        return choose(cls, selected_backend, dense, num_heads)

    with (
        mock.patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(backend)),
        mock.patch.multiple(parallel_state, **groups),
        mock.patch.object(lazy, "inspect_model_cls", inspect),
    ):
        yield


def specs(folder, tp_size=1, **engine):
    """Return a model's caches as rank 0 of tp_size has them.

    Args:
        folder: of config.json.
        tp_size: tensor-parallel ranks.
        engine: vLLM's EngineArgs.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    view = importlib.import_module("adp_kv.connector.vllm_view")
    transfer = {"kv_connector": "AdpConnector", "kv_role": "kv_both", "engine_id": "sized"}
    transfer["kv_connector_module_path"] = "adp_kv.connector"
    usual = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enable_prefix_caching": True}
    arguments = usual | {"model": str(folder), "tensor_parallel_size": tp_size} | engine
    with _ranks(tp_size):
        config = EngineArgs(kv_transfer_config=transfer, **arguments).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"  # the CPU backend's; the core chooses it
        with set_current_vllm_config(config), torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        caches = _cache_config(config)
    return Rig(config, caches, view.view_engine(config, caches, ConnectorSettings()))


def _cache_config(config):
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheConfig

    layers = config.compilation_config.static_forward_context
    asked = {name: getattr(layer, "get_kv_cache_spec", None) for name, layer in layers.items()}
    found = {name: ask(config) for name, ask in asked.items() if ask is not None}
    found = {name: spec for name, spec in found.items() if spec is not None}
    return KVCacheConfig(NUM_BLOCKS, [], get_kv_cache_groups(config, found))


def hellos(rig):
    """Return what every rank would say to the gateway, by rank."""
    caches = importlib.import_module("adp_kv.connector.vllm_caches")
    pages = {
        name: torch.zeros(NUM_BLOCKS, 1, 1, caches._used_bytes(spec), dtype=torch.int8)
        for group in rig.cache_config.kv_cache_groups
        for name, spec in caches.layer_specs(group).items()
    }
    said = []
    for rank in range(rig.engine.world_size):
        view = caches.view_caches(pages, rig.config, rig.cache_config, rig.engine.parts, rank)
        said.append(
            Hello(
                version=PROTOCOL_VERSION,
                release="any",
                engine=rig.engine.engine_id,
                rank=rank,
                world_size=rig.engine.world_size,
                namespace=digest(rig.engine.facts),
                caches=declare(view),
                pid=1 + rank,
            )
        )
    return said

"""The only module that spells vLLM's names: configuration, caches, requests.

Everything below the connector works with what this returns: plain facts, geometry,
numbers. Features are probed for, versions are not compared.
"""

from __future__ import annotations

import json
import platform
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adp_kv.config import ConnectorSettings, hash_seed
from adp_kv.errors import ConfigError
from adp_kv.layout.fingerprint import FORMAT_VERSION, weights_fingerprint
from adp_kv.layout.geometry import CacheGeometry, dense_pages, head_slices, layer_indices
from adp_kv.units import ceil_div

DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class EngineView:
    """Facts of one engine that scheduler side and workers share.

    Attributes:
        engine_id: the same on both sides and in every rank; new at every start.
        block_tokens: tokens of a block; hash_tokens: tokens of a block hash.
        chunk_tokens: tokens of a chunk.
    """

    engine_id: str
    world_size: int
    tp_size: int
    block_tokens: int
    hash_tokens: int
    chunk_tokens: int
    address: str
    async_loads: bool
    facts: Mapping[str, object]

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def hashes_per_chunk(self) -> int:
        """Block hashes of a chunk; the last one names it."""
        return self.chunk_tokens // self.hash_tokens


def view_engine(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> EngineView:
    """Read an engine's configuration.

    Raises:
        ConfigError: A model or parallel layout this release can't serve, or a setting
            that does not fit the engine; names the remedy.
    """
    parallel = vllm_config.parallel_config
    _refuse_context_parallel(parallel)
    _refuse_scales_of_the_day(vllm_config.cache_config)
    group = _only_group(kv_cache_config)
    block_tokens = int(group.kv_cache_spec.block_size)
    return EngineView(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        world_size=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        block_tokens=block_tokens,
        hash_tokens=_hash_tokens(vllm_config, kv_cache_config, block_tokens),
        chunk_tokens=_chunk_tokens(settings, block_tokens),
        address=_address(settings, parallel),
        async_loads=_async_loads(vllm_config, settings),
        facts=_facts(vllm_config, kv_cache_config, settings, block_tokens),
    )


def _refuse_context_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} = {getattr(parallel, name)}: not available in this release of adp-kv; set "
                "it to 1"
            )


def _refuse_scales_of_the_day(cache: Any) -> None:
    """VLLM 0.25 can take the scales of an fp8 cache from the first batch a process sees."""
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: every start would store with scales of its own, which the next "
            "one reads wrongly; remove it and use a checkpoint with scales, or scale 1"
        )


def _only_group(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in groups})
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups ({', '.join(kinds)}): hybrid models are "
            "not available in this release of adp-kv; a sliding-window model can run with "
            "--disable-hybrid-kv-cache-manager"
        )
    for name, spec in _layer_specs(groups[0]).items():
        if type(spec).__name__ not in {"FullAttentionSpec", "MLAAttentionSpec"}:
            raise ConfigError(
                f"layer {name} has a cache of kind {type(spec).__name__}: only full attention and "
                "MLA are available in this release of adp-kv"
            )
    return groups[0]


def _layer_specs(group: Any) -> dict[str, Any]:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: (per_layer or {}).get(name, group.kv_cache_spec) for name in group.layer_names}


def _hash_tokens(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> int:
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is None:
        resolved = getattr(vllm_config.cache_config, "hash_block_size", None)
    return int(resolved or block_tokens)


def _chunk_tokens(settings: ConnectorSettings, block_tokens: int) -> int:
    chunk = settings.chunk_size or ceil_div(DEFAULT_CHUNK_TOKENS, block_tokens) * block_tokens
    if chunk % block_tokens:
        raise ConfigError(
            f"chunk_size = {chunk} is no multiple of vLLM's block size {block_tokens}: use "
            f"{ceil_div(chunk, block_tokens) * block_tokens}, or leave it out"
        )
    return chunk


def _address(settings: ConnectorSettings, parallel: Any) -> str:
    if parallel.data_parallel_size > 1 and "{dp_rank}" not in settings.gateway:
        raise ConfigError(
            f"gateway = {settings.gateway!r} with data_parallel_size = "
            f"{parallel.data_parallel_size}: each data-parallel rank is an engine of its own and "
            "needs its own gateway; put {dp_rank} into the address"
        )
    return settings.gateway.replace("{dp_rank}", str(parallel.data_parallel_rank))


def _async_loads(vllm_config: Any, settings: ConnectorSettings) -> bool:
    """Return whether restores are asynchronous.

    Under the policy `recompute` they are: vLLM leaves the blocks of a layer-wise load that
    failed in its prefix cache and lets one request compute them anew, over several steps,
    while others that share them take them for computed. Blocks that load asynchronously
    are shared only once they are there.
    """
    recompute = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    if settings.load_mode == "layerwise" and recompute:
        raise ConfigError(
            "load_mode = layerwise with kv_load_failure_policy = recompute: vLLM would share "
            "blocks whose load has failed before they are computed anew. Use load_mode async or "
            "auto, or the policy fail"
        )
    return settings.load_mode == "async" or recompute


def _facts(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, block_tokens: int
) -> dict[str, object]:
    """Everything that changes bytes or hashes, is not in a block hash, and names no process."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    algorithm = str(cache.prefix_caching_hash_algo)
    folder = Path(str(model.model))
    dummy = str(vllm_config.load_config.load_format) == "dummy"
    return {
        "format": FORMAT_VERSION,
        "key_namespace": settings.key_namespace,
        "model": str(model.model),
        "revision": str(getattr(model, "revision", None)),
        "commit": str(getattr(model.hf_config, "_commit_hash", None)),
        "weights": weights_fingerprint(folder) if folder.is_dir() and not dummy else None,
        "dummy_seed": int(model.seed or 0) if dummy else None,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "config": _config_text(model.hf_config),
        "draft": _draft(vllm_config),
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "block_tokens": block_tokens,
        "chunk_tokens": _chunk_tokens(settings, block_tokens),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "hash": algorithm,
        # The default algorithms hash pickled objects, whose bytes are Python's business.
        "python": None if "cbor" in algorithm else platform.python_version_tuple()[:2],
        "byteorder": sys.byteorder,
    }


def _config_text(config: Any) -> str:
    """Return a model's config.json as vLLM uses it: --hf-overrides changes keys and values too."""
    told = {k: v for k, v in config.to_dict().items() if k not in _NOT_OF_THE_BYTES}
    return json.dumps(told, sort_keys=True, default=lambda value: type(value).__name__)


_NOT_OF_THE_BYTES = {"_name_or_path", "_commit_hash", "transformers_version"}


def _draft(vllm_config: Any) -> list[str | None] | None:
    """Return what is known of the draft model, whose layers have caches like all others."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    model = str(getattr(speculative, "model", None))
    folder = Path(model)
    weights = weights_fingerprint(folder) if folder.is_dir() else None
    return [str(getattr(speculative, "method", None)), model, weights]


def view_caches(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: Any,
    kv_cache_config: Any,
    engine: EngineView,
    tp_rank: int,
) -> list[CacheGeometry]:
    """Return this rank's caches in layer order, from the tensors vLLM registered.

    Raises:
        ConfigError: A cache whose pages this release can't address.
    """
    specs = _layer_specs(_only_group(kv_cache_config))
    indices = layer_indices(list(specs))
    model = vllm_config.model_config
    total_heads = int(model.get_total_num_kv_heads())
    caches = []
    for name, spec in specs.items():
        tensor = kv_caches[name]
        pages = dense_pages(
            name, tensor.shape, tensor.stride(), tensor.element_size(), kv_cache_config.num_blocks
        )
        if pages.page_bytes != spec.page_size_bytes:
            raise ConfigError(
                f"{name}: pages have {pages.page_bytes} bytes, vLLM says {spec.page_size_bytes}"
            )
        latent = type(spec).__name__ == "MLAAttentionSpec"
        usual = max(1, total_heads // engine.tp_size) == spec.num_kv_heads
        heads = None if latent else (total_heads if usual else engine.tp_size)
        slice_idx, num_slices, replica_idx, num_replicas = head_slices(
            tp_rank, engine.tp_size, heads
        )
        caches.append(
            CacheGeometry(
                index=indices[name],
                name=name,
                base_address=tensor.data_ptr(),
                block_stride_bytes=pages.block_stride_bytes,
                page_bytes=pages.page_bytes,
                num_blocks=kv_cache_config.num_blocks,
                blocks_per_chunk=engine.blocks_per_chunk,
                slice_idx=slice_idx,
                num_slices=num_slices,
                replica_idx=replica_idx,
                num_replicas=num_replicas,
                layout=f"{tensor.dtype} {tuple(tensor.shape[1:])} {tensor.stride()[1:]}",
            )
        )
    return sorted(caches, key=lambda cache: cache.index)


def worker_ranks() -> tuple[int, int]:
    """Return (rank in the engine, rank in the tensor-parallel group) of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415

    tp = get_tp_group()
    return get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group, tp.rank_in_group


def tell_tp_ranks(text: bytes) -> list[bytes]:
    """Say something to all ranks of this worker's tensor-parallel group, at start.

    Goes by vLLM's group of CPUs, as vLLM's own custom all-reduce does when it starts; all ranks
    call this together, before anything is computed.
    """
    import torch.distributed as dist  # noqa: PLC0415
    from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415

    group = get_tp_group()
    said: list[bytes] = [b""] * group.world_size
    dist.all_gather_object(said, text, group=group.cpu_group)
    return said


def root_hash() -> bytes:
    """Return the hash that every first block's hash starts from, once the engine has set it."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    return bytes(kv_cache_utils.NONE_HASH)


def hashes_repeatable() -> bool:
    """Return whether a restarted engine computes the same block hashes."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    if hash_seed() not in (None, "", "random"):
        return True
    seed_of = getattr(kv_cache_utils, "get_none_hash_seed", None)
    fixed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return seed_of is not None and fixed is not None and seed_of() == fixed


def locally_cached(pool: Any, hashes: Sequence[Any]) -> int:
    """Return how many leading blocks of a prompt the GPU has: vLLM's prefix cache, looked at."""
    look = getattr(pool, "get_cached_block", None)
    if look is None:
        return 0
    return bisect_left(range(len(hashes)), 1, key=lambda i: int(not look(hashes[i], [0])))


def hooks_will_fire(forward_context: Any) -> bool:
    """Return whether this step's layers run in Python, so that their hooks can wait.

    A full CUDA graph replays without them. Runner V1 says so in the mode; runner V2
    starts loads outside the forward context then, which has no attention metadata.
    """
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    full = getattr(mode, "name", "") == "FULL"
    return not full and getattr(forward_context, "attn_metadata", None) is not None


def adapter_folder(request: Any) -> Path | None:
    """Return the folder of a request's LoRA adapter, or None."""
    lora = getattr(request, "lora_request", None)
    path = getattr(lora, "lora_path", None)
    return Path(path) if path else None


def prompt_hashes(
    tokens: list[int], hash_tokens: int, algorithm: str, root: bytes, salt: str | None
) -> list[bytes]:
    """Return the block hashes an engine would give a prompt of text, with vLLM's own code.

    Args:
        tokens: of the prompt.
        hash_tokens: tokens of a block hash.
        algorithm: as vLLM's --prefix-caching-hash-algo.
        root: the engine's root hash; set for this whole process.
        salt: the request's cache_salt.
    """
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    hash_fn = get_hash_fn_by_name(algorithm)
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(root)
    request = Request(
        request_id="inspect",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(hash_tokens, hash_fn),
    )
    return [bytes(block_hash) for block_hash in request.block_hashes]

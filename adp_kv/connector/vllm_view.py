"""Spells vLLM's names, with the other vllm_*: configuration, hashes, what a step carries.

Everything below the connector works with what this returns: plain facts, geometry,
numbers. Features are probed for, versions are not compared.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base

from adp_kv.config import ConnectorSettings, hash_seed
from adp_kv.connector.vllm_caches import (
    common_block_tokens,
    has_states,
    keeps_every_state,
    view_parts,
)
from adp_kv.connector.vllm_dcp import check_dcp_rank, dcp_facts, token_shards
from adp_kv.connector.vllm_drafts import draft_layers, has_draft_cache
from adp_kv.errors import ConfigError
from adp_kv.layout.fingerprint import FORMAT_VERSION, weights_fingerprint
from adp_kv.layout.parts import Part
from adp_kv.units import ceil_div

DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class EngineView:
    """Facts of one engine that scheduler side and workers share.

    Attributes:
        engine_id: the same on both sides and in every rank; new at every start.
        parts: its KV cache groups.
        hash_tokens: tokens of a block hash; chunk_tokens: tokens of a chunk.
        every_state: recurrent states are kept at every block boundary.
        local_hits_diverge: vLLM may count a local hit that not every group has (0.25).
        draft_cache: a draft model has caches, whose last entries depend on the token after.
        draft_layers: vLLM's names of its layers, which do not compute in every step.
        async_beside_others: a request that is alone loads layer by layer, others asynchronously.
        token_shards: ranks that share the tokens of every block (DCP).
    """

    engine_id: str
    world_size: int
    parts: tuple[Part, ...]
    hash_tokens: int
    chunk_tokens: int
    address: str
    async_loads: bool
    facts: Mapping[str, object]
    every_state: bool = False
    local_hits_diverge: bool = False
    draft_cache: bool = False
    draft_layers: frozenset[str] = frozenset()
    async_beside_others: bool = False
    token_shards: int = 1

    @property
    def undoable(self) -> bool:
        """Whether vLLM can truncate a request at a failed block: one group that keeps all."""
        return _can_undo(self.parts)

    @property
    def hashes_per_chunk(self) -> int:
        """Block hashes of a chunk; the last one names it."""
        return self.chunk_tokens // self.hash_tokens


def log_as_vllm() -> None:
    """Let our lines go where vLLM's go, unless somebody has said where: INFO would go nowhere."""
    ours, theirs = logging.getLogger("adp_kv"), logging.getLogger("vllm")
    if ours.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False  # somebody may yet give the root logger a handler: once is enough


def _can_undo(parts: tuple[Part, ...]) -> bool:
    return len(parts) == 1 and parts[0].kept_tokens is None


def view_engine(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> EngineView:
    """Read an engine's configuration.

    Raises:
        ConfigError: A model or parallel layout this release can't serve, or a setting
            that does not fit the engine; names the remedy.
    """
    parallel = vllm_config.parallel_config
    _refuse_scales_of_the_day(vllm_config.cache_config)
    _refuse_what_hashes_do_not_tell(vllm_config)
    draft_cache = has_draft_cache(vllm_config)
    shards = token_shards(parallel, kv_cache_config, draft_cache=draft_cache)
    block_tokens = common_block_tokens(kv_cache_config, shards)
    recurrent = has_states(kv_cache_config)
    if recurrent:
        _check_recurrent(vllm_config, settings, block_tokens)
    # States are there at block boundaries only, and not at every one.
    chunk_tokens = block_tokens if recurrent else _chunk_tokens(settings, block_tokens, shards)
    parts = view_parts(kv_cache_config, chunk_tokens, shards)
    return EngineView(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        world_size=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        parts=parts,
        hash_tokens=_hash_tokens(vllm_config, kv_cache_config, block_tokens),
        chunk_tokens=chunk_tokens,
        address=_address(settings, parallel),
        async_loads=_async_loads(vllm_config, settings, parts),
        async_beside_others=settings.load_mode == "auto" and _can_undo(parts),
        facts=_facts(vllm_config, kv_cache_config, settings, parts, chunk_tokens),
        every_state=keeps_every_state(kv_cache_config),
        local_hits_diverge=recurrent
        and not hasattr(vllm_base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"),
        draft_cache=draft_cache,
        draft_layers=draft_layers(vllm_config, kv_cache_config),
        token_shards=shards,
    )


def _check_recurrent(vllm_config: Any, settings: ConnectorSettings, block_tokens: int) -> None:
    """Refuse what can't be right with recurrent states."""
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            "speculative decoding with recurrent states (Mamba-type layers) is not available in "
            "this release of adp-kv: remove --speculative-config, or the connector"
        )
    if settings.reconnect:
        raise ConfigError(
            "reconnect = true with recurrent states (Mamba-type layers): only engines whose layers "
            "are all attention take up a restarted gateway; remove it, and restart gateway and "
            "engine together"
        )
    if settings.load_mode == "layerwise":
        raise ConfigError(
            "load_mode = layerwise with recurrent states (Mamba-type layers): vLLM copies a state "
            "before any layer could wait for it; use load_mode async or auto"
        )
    if settings.chunk_size not in {0, block_tokens}:
        raise ConfigError(
            f"chunk_size = {settings.chunk_size} with recurrent states (Mamba-type layers): vLLM "
            f"keeps one every {block_tokens} tokens; use {block_tokens}, or leave it out"
        )


def _refuse_scales_of_the_day(cache: Any) -> None:
    """VLLM 0.25 can take the scales of an fp8 cache from the first batch a process sees."""
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: every start would store with scales of its own, which the next "
            "one reads wrongly; remove it and use a checkpoint with scales, or scale 1"
        )


def _refuse_what_hashes_do_not_tell(vllm_config: Any) -> None:
    """Refuse engines in which equal block hashes do not mean that a prefix may be left out."""
    model = vllm_config.model_config
    if getattr(model, "is_diffusion", False):
        raise ConfigError(
            "a block diffusion model: it may emit tokens whose cache it never wrote; not available "
            "in this release of adp-kv, remove the connector"
        )
    if getattr(vllm_config.cache_config, "enable_prefix_caching", True):
        return
    if getattr(model, "runner_type", "generate") == "pooling":
        raise ConfigError(
            "prefix caching is off, as vLLM has it where a pooling needs every token of a prompt: "
            "what is restored would be missing in the result. Set --enable-prefix-caching if this "
            "pooling needs the last token only, or remove the connector"
        )
    media = getattr(model, "multimodal_config", None)
    if media is not None and not media.mm_processor_cache_gb:
        raise ConfigError(
            "prefix caching and the multimodal processor's cache are both off: vLLM then names "
            "images by a number, which another image has after a restart. Leave one of them on "
            "(--enable-prefix-caching, or --mm-processor-cache-gb more than 0)"
        )


def _hash_tokens(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> int:
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is None and len(kv_cache_config.kv_cache_groups) > 1:
        _, resolved = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if resolved is None:
        resolved = getattr(vllm_config.cache_config, "hash_block_size", None)
    return int(resolved or block_tokens)


def _chunk_tokens(settings: ConnectorSettings, block_tokens: int, shards: int) -> int:
    chunk = settings.chunk_size or ceil_div(DEFAULT_CHUNK_TOKENS, block_tokens) * block_tokens
    if chunk % block_tokens:
        of = f" times decode_context_parallel_size {shards}" if shards > 1 else ""
        raise ConfigError(
            f"chunk_size = {chunk} is no multiple of vLLM's block size {block_tokens // shards}{of}"
            f": use {ceil_div(chunk, block_tokens) * block_tokens}, or leave it out"
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


def _async_loads(vllm_config: Any, settings: ConnectorSettings, parts: tuple[Part, ...]) -> bool:
    """Return whether restores are asynchronous.

    Recurrent states must be: vLLM copies a state before any layer could wait for it. A
    layer-wise load that fails can't be undone with several groups: where vLLM takes failed
    requests, those get asynchronous loads. So does the policy `recompute`: vLLM leaves the
    blocks of a layer-wise load that failed in its prefix cache and lets one request compute
    them anew, over several steps, while others that share them take them for computed.
    Blocks that load asynchronously are shared only once they are there.
    """
    if any(part.recurrent for part in parts):
        return True
    recompute = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    if settings.load_mode == "layerwise" and recompute:
        raise ConfigError(
            "load_mode = layerwise with kv_load_failure_policy = recompute: vLLM would share "
            "blocks whose load has failed before they are computed anew. Use load_mode async or "
            "auto, or the policy fail"
        )
    better = not _can_undo(parts) and takes_failed_requests() and settings.load_mode == "auto"
    return settings.load_mode == "async" or recompute or better


def takes_failed_requests() -> bool:
    """Return whether vLLM is told of failed restores by request, whatever the groups are."""
    return hasattr(vllm_base, "KVConnectorTransferResults")


def _facts(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: ConnectorSettings,
    parts: tuple[Part, ...],
    chunk_tokens: int,
) -> dict[str, object]:
    """Everything that changes bytes or hashes, is not in a block hash, and names no process."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    algorithm = str(cache.prefix_caching_hash_algo)
    folder = Path(str(model.model))
    config = _config_text(model.hf_config)
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
        "config": config,
        "draft": _draft(vllm_config),
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "parts": [[p.block_tokens, p.kept_tokens, p.recurrent] for p in parts],
        "chunk_tokens": chunk_tokens,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "hash": algorithm,
        # The default algorithms hash pickled objects, whose bytes are Python's business.
        "python": None if "cbor" in algorithm else platform.python_version_tuple()[:2],
        "byteorder": sys.byteorder,
        # LongRoPE has other factors where the longest sequence is longer.
        **({"max_model_len": int(model.max_model_len)} if '"longrope"' in config else {}),
        **_media_facts(getattr(model, "multimodal_config", None)),
        **dcp_facts(parallel),
    }


def _media_facts(media: Any) -> dict[str, object]:
    """Return what the engine does to every image, of which vLLM hashes only the content."""
    pruning = getattr(media, "video_pruning_rate", None)
    told = {
        "processor": getattr(media, "mm_processor_kwargs", None) or None,
        "pruning": [pruning, str(getattr(media, "video_pruning_method", None))]
        if pruning
        else None,
        "encoder": getattr(media, "mm_encoder_attn_dtype", None),
    }
    return {"media": json.dumps(told, sort_keys=True, default=str)} if any(told.values()) else {}


def _config_text(config: Any) -> str:
    """Return a model's config.json as vLLM uses it: --hf-overrides changes keys and values too."""
    told = {k: v for k, v in config.to_dict().items() if k not in _NOT_OF_THE_BYTES}
    return json.dumps(told, sort_keys=True, default=lambda value: type(value).__name__)


# max_model_len: MiniMax-M2 writes it there in the workers, once the model is loaded.
_NOT_OF_THE_BYTES = {"_name_or_path", "_commit_hash", "transformers_version", "max_model_len"}


def _draft(vllm_config: Any) -> list[str | None] | None:
    """Return what is known of the draft model, whose layers have caches like all others."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    model = str(getattr(speculative, "model", None))
    folder = Path(model)
    weights = weights_fingerprint(folder) if folder.is_dir() else None
    return [str(getattr(speculative, "method", None)), model, weights]


def worker_ranks(token_shards: int) -> tuple[int, int]:
    """Return (rank in the engine, rank in the tensor-parallel group) of this worker.

    Raises:
        ConfigError: The ranks that share tokens are not those that token_shards stands for.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415

    tp = get_tp_group()
    check_dcp_rank(token_shards, tp.rank_in_group)
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


def tables_now(output: Any, request_id: str) -> tuple[list[int], ...] | None:
    """Return a request's block ids of each group as vLLM has them in this step (0.29 and later)."""
    state = getattr(output, "kv_connector_block_state", None)
    return None if state is None else state.get_block_ids(request_id)


def offered_states(output: Any) -> Mapping[str, list[tuple[int, int, int]]] | None:
    """Return (group, block, boundary in tokens) of the states that this step leaves, by request.

    None where vLLM does not say (before 0.29).
    """
    state = getattr(output, "kv_connector_block_state", None)
    return None if state is None else state.boundary_state_offloads


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

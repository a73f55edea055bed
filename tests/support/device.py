"""What an engine needs on this machine's device; runs in children, never in the test itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "auto",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "seed": 0,
}
# The cache's size is given, so the utilization only says how much must be free at the start.
CUDA: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.05,
    "dtype": "bfloat16",
}
CPU: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


def find_device() -> str:
    """Return "cuda" or "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def cpu_binding(cores: list[int], num_ranks: int) -> str:
    """Return VLLM_CPU_OMP_THREADS_BIND: an equal share of the cores for each rank, at least one."""
    per_rank = max(1, len(cores) // num_ranks)
    shares = [cores[i * per_rank : (i + 1) * per_rank] or cores[:1] for i in range(num_ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def set_environment(device: str, num_ranks: int) -> None:
    """Set what vLLM reads when it is imported, unless the caller has set it already."""
    if device == "cuda":
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        # Looking for a device has touched CUDA, so nothing forked from here could use it.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        return
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cpu_binding(cores, num_ranks))
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first logprobs take 28 s


def engine_args(
    device: str, model_args: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return engine arguments; later ones win: common, the device's, the model's, the caller's.

    Args:
        device: "cuda" or "cpu".
        model_args: the model's needs by device.
        given: the caller's.
    """
    merged = COMMON | (CUDA if device == "cuda" else CPU)
    if given.get("tensor_parallel_size", 1) > 1:
        merged["distributed_executor_backend"] = "mp"
    return merged | dict(model_args.get(device, {})) | dict(given)

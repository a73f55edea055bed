"""What benchmarks run inside an engine's workers: random weights, the link, a stand-in load.

vLLM's own dummy weights are ±1e-3: every prompt then leads to the same token whatever the
cache holds. The load format `adp_random` draws weights so large that attention is sharp
and a token depends on the restored bytes; equal on every engine of one machine.
Imported by vLLM as the worker's extension, which registers the format in time.
"""

from __future__ import annotations

import statistics
import time
import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tests.support.worker_extension import WorkerExtension

LOAD_FORMAT = "adp_random"
GAIN = 3.0  # of a projection: attention scores then differ by several units


@register_model_loader(LOAD_FORMAT)
class RandomLoader(DummyModelLoader):
    """Draws every weight from its name: matrices normal, norms one, biases zero."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        del model_config
        for name, weight in model.named_parameters():
            generator = torch.Generator(weight.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                if weight.dim() >= 2:
                    weight.normal_(0, GAIN * weight.shape[-1] ** -0.5, generator=generator)
                else:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)


class BenchWorker(WorkerExtension):
    """Mixed into every worker."""

    def adp_watch(self) -> None:
        """From now on note when a restore passes its stages (adp_timeline)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker
        client = worker.client
        stages: dict[str, float] = {}
        self._adp_stages = stages
        start_load, fence = worker.start_load, worker._fence
        on_granted, has_landed = client._on_granted, client._has_landed

        def noted_start_load(meta: Any, forward_context: Any) -> None:
            if meta.restore or meta.async_restore:
                stages.clear()
                stages["load"] = time.perf_counter()
            start_load(meta, forward_context)

        def noted_on_granted(message: Any) -> None:
            stages.setdefault("first_grant", time.perf_counter())
            on_granted(message)
            stages["last_copy_queued"] = time.perf_counter()

        def noted_fence(step: Any, index: int) -> None:
            waits = index in step.unfenced
            fence(step, index)
            if waits:
                stages["last_layer_fenced"] = time.perf_counter()

        def noted_has_landed(flight: Any) -> bool:
            landed = has_landed(flight)
            if landed:
                stages["last_copy_landed"] = time.perf_counter()
            return landed

        worker.start_load, worker._fence = noted_start_load, noted_fence
        client._on_granted, client._has_landed = noted_on_granted, noted_has_landed

    def adp_timeline(self) -> dict[str, float]:
        """Return when the last restore passed its stages, on the machine's monotonic clock."""
        return dict(self._adp_stages)

    def adp_link(self, num_bytes: int, repeats: int) -> float:
        """Return GB/s of a contiguous copy from pinned memory to the device."""
        cuda = torch.cuda.is_available()
        source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=cuda)
        target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
        times = []
        for _ in range(repeats + 1):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return num_bytes / statistics.median(times[1:]) / 1e9

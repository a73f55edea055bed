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

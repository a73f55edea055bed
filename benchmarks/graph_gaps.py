"""What work beside a CUDA graph leaves behind: the time between the graph's kernels.

python -m benchmarks.graph_gaps [--out DIR] [--only NAME] [--quick]

A decode step is a CUDA graph of some 450 kernels, and a kernel follows the one before after a
fraction of a microsecond. Other work of the same process, copies or kernels on streams of their
own, can make that longer, and it stays longer when the work has ended: 0.2 µs is a tenth of a
millisecond a step. Here a graph of short kernels is timed before, beside and after one kind of
work; then after a rest, and after another process has used the device. Each kind has a process
of its own, since what it leaves behind would be in the figures of the next.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.plan import RESTORE, SAVE, Way
from adp_kv.units import KiB, MiB
from benchmarks._copies import forced, shared_ring
from benchmarks._results import Results, argument_parser
from benchmarks.interference import Traffic

CODE = ("adp_kv/kernels", "adp_kv/transfer")
NUM_KERNELS = 450
ELEMENTS = 1 << 18
RING_BYTES = 256 * MiB
PAGE_BYTES, NUM_PAGES = 64 * KiB, 128
WINDOW_S = 0.3
REST_S = 2.0
CHILD_TIMEOUT_S = 90.0
NOTHING = "nothing"
KERNELS = {
    "kernel.device": ("pool", "pool"),
    "kernel.reads_host": ("ring", "pool"),
    "kernel.writes_host": ("pool", "ring"),
}
"""Where a plain kernel reads and writes."""
COPIES = {"copy.to_host": ("pool", "ring"), "copy.to_device": ("ring", "pool")}
MOVES = tuple(f"{direction}.{way.value}" for direction in ("save", "restore") for way in Way)
REMOTE = ".remote_domain"
"""With this ending the work's streams are in the domain for memory far away: fences of kernels in
the default one, such as the graph's, need not wait for its writes (Hopper and later)."""
_REMOTE = tuple(name + REMOTE for name in ("kernel.writes_host", "save.direct", "save.staged"))
CASES = (NOTHING, *COPIES, *KERNELS, "kernel.two_streams", "kernel.urgent", *MOVES, *_REMOTE)
QUICK_CASES = (NOTHING, "copy.to_host", "save.direct")
_MEM_SYNC_DOMAIN, _REMOTE_DOMAIN = 10, 1  # cuda.h: CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN
_COPY_KERNEL = r"""
extern "C" __global__ void copy_words(float4* to, const float4* from, int num) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num; i += gridDim.x * blockDim.x)
        to[i] = from[i];
}
"""


class Graph:
    """Kernels that follow each other, with a small copy to the host behind them, as in a step."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._words = torch.ones(ELEMENTS, device="cuda")
        self._told = torch.empty(64, pin_memory=True)
        self._stream, self._copies = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._words.mul_(1.0)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(NUM_KERNELS):
                self._words.mul_(1.0)

    def us_a_kernel(self) -> float:
        """Return the time of a kernel and what lies between it and the next, over WINDOW_S."""
        cuda = self._torch.cuda
        total_ms, num = 0.0, 0
        end = time.perf_counter() + WINDOW_S
        with cuda.stream(self._stream):
            while time.perf_counter() < end:
                before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                before.record()
                for _ in range(10):
                    self._step()
                after.record()
                after.synchronize()
                total_ms += before.elapsed_time(after)
                num += 10
        return total_ms * 1e3 / num / NUM_KERNELS

    def _step(self) -> None:
        self._graph.replay()
        ended = self._torch.cuda.Event()
        ended.record()
        self._copies.wait_event(ended)
        with self._torch.cuda.stream(self._copies):
            self._told.copy_(self._words[:64], non_blocking=True)


class Work:
    """One kind of work on streams of its own: start() queues some and returns its end."""

    def __init__(self, name: str) -> None:
        import torch

        from adp_kv.transfer.device import TorchDevice
        from adp_kv.transfer.registration import RingRegistration
        from adp_kv.transfer.runtime import load_runtime

        self._torch = torch
        self._runtime = load_runtime()
        self._api = TorchDevice(torch.device("cuda"), self._runtime)
        self._api.bind()
        self._api.prepare()
        ring = shared_ring(RING_BYTES)
        self._ring = ring  # the mapping lives as long as this
        self._registration = RingRegistration(self._runtime, self._api.index)
        self._registration.register(ring.ctypes.data, RING_BYTES)
        self._pool = torch.zeros(RING_BYTES, dtype=torch.uint8, device="cuda")
        self._at = {"ring": int(ring.ctypes.data), "pool": self._pool.data_ptr()}
        self._is_remote = name.endswith(REMOTE)
        self.start: Callable[[], Any] = self._find(name.removesuffix(REMOTE))

    def _find(self, name: str) -> Callable[[], Any]:
        if name in COPIES:
            return self._copies(*COPIES[name])
        if name in KERNELS:
            return self._kernels(*KERNELS[name], [self._stream()])
        if name == "kernel.two_streams":
            return self._kernels("pool", "pool", [self._stream(), self._stream()])
        if name == "kernel.urgent":
            return self._kernels("pool", "pool", [self._stream(priority=-1)])
        direction, way = name.split(".")
        return self._moves(direction, Way(way))

    def _stream(self, priority: int = 0) -> Any:
        stream = self._torch.cuda.Stream(priority=priority)
        if self._is_remote:
            enter_remote_domain(stream.cuda_stream)
        return stream

    def _copies(self, source: str, target: str) -> Callable[[], Any]:
        stream = self._stream()
        sides = self._at[target], self._at[source]
        kind = 2 if target == "ring" else 1  # cudaMemcpyKind

        def start() -> Any:
            self._runtime.memcpyAsync(*sides, NUM_PAGES * PAGE_BYTES, kind, stream.cuda_stream)
            return self._ended(stream)

        return start

    def _kernels(self, source: str, target: str, streams: list[Any]) -> Callable[[], Any]:
        import cupy

        kernel = cupy.RawKernel(_COPY_KERNEL, "copy_words")
        half = RING_BYTES // 2 if source == target else 0
        pointers = (np.uint64(self._at[target] + half), np.uint64(self._at[source]))
        num = np.int32(NUM_PAGES * PAGE_BYTES // 16)

        def start() -> Any:
            for stream in streams:
                with cupy.cuda.ExternalStream(stream.cuda_stream):
                    kernel((16,), (256,), (*pointers, num))
            return [self._ended(stream) for stream in streams][-1]

        return start

    def _moves(self, direction: str, way: Way) -> Callable[[], Any]:
        from adp_kv.transfer.copy_engine import CopyEngine, open_batch
        from adp_kv.transfer.cuda_mover import CudaMover
        from adp_kv.transfer.settings import MoverSettings

        settings = MoverSettings(restore=forced(RESTORE, way), save=forced(SAVE, way))
        engine = CopyEngine(self._runtime, open_batch())
        # Its streams are asked of the device.
        self._api.stream = self._stream  # type: ignore[method-assign]
        self._mover = CudaMover(self._api, engine, self._registration, settings)
        pages = np.arange(NUM_PAGES, dtype=np.int64) * PAGE_BYTES
        scattered = np.random.default_rng(1).permutation(pages).reshape(-1, 1)
        copy = SliceCopy(self._at["ring"] + pages, self._at["pool"] + scattered, PAGE_BYTES)
        begin = getattr(self._mover, direction)
        return lambda: begin(copy, self._mover.mark()).done

    def _ended(self, stream: Any) -> Callable[[], bool]:
        event = self._torch.cuda.Event()
        event.record(stream)
        return event.query  # type: ignore[no-any-return]


def enter_remote_domain(stream: int) -> None:
    """Put a stream's later launches into the domain for memory far away.

    Raises:
        RuntimeError: The driver or the device knows none.
    """
    set_attribute = ctypes.CDLL("libcuda.so.1").cuStreamSetAttribute
    set_attribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    value = (ctypes.c_int * 16)(_REMOTE_DOMAIN)  # a union of 64 bytes
    if (status := set_attribute(stream, _MEM_SYNC_DOMAIN, value)) != 0:
        raise RuntimeError(f"cuStreamSetAttribute: {status}")


def measure(name: str) -> dict[str, float]:
    """Return µs a kernel of a graph by when it was timed; in a process of its own."""
    graph = Graph()
    bytes_each = NUM_PAGES * PAGE_BYTES
    traffic = nullcontext() if name == NOTHING else Traffic(Work(name).start, bytes_each)
    graph.us_a_kernel()
    found = {"before": graph.us_a_kernel()}
    with traffic:
        found["beside"] = [graph.us_a_kernel() for _ in range(3)][-1]
    found["after"] = [graph.us_a_kernel() for _ in range(2)][-1]
    time.sleep(REST_S)
    found["rested"] = graph.us_a_kernel()
    subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"],
        check=True,
        timeout=CHILD_TIMEOUT_S,
    )
    found["another_process"] = graph.us_a_kernel()
    return found


def add_rows(results: Results, name: str, found: dict[str, float]) -> None:
    """Add what was measured of a case, and how much longer a step's kernels take after it."""
    for when, value in found.items():
        results.add(f"graph_gaps.{name}.{when}", value, "µs a kernel", better="lower")
    longer = (found["after"] - found["before"]) * NUM_KERNELS
    results.add(f"graph_gaps.{name}.step", longer, "µs a step of 450", better="lower")


def in_own_process(name: str) -> dict[str, float]:
    """Return measure(name) of a process that has done nothing else.

    Raises:
        SubprocessError: It failed; its stderr says why.
    """
    child = [sys.executable, "-m", "benchmarks.graph_gaps", "--child", name]
    done = subprocess.run(
        child, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(
    results: Results, names: Sequence[str], measured: Callable[[str], dict[str, float]]
) -> bool:
    """Measure the cases and add their rows; return whether all could be."""
    whole = True
    for name in names:
        try:
            add_rows(results, name, measured(name))
        except subprocess.SubprocessError as error:
            whole = False
            print(f"graph_gaps: {name} failed: {error}\n{getattr(error, 'stderr', '')}")
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; status 1 if a case failed."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only", action="append", choices=CASES, metavar="CASE",
        help=f"of {', '.join(CASES)}; repeatable",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="three cases")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        print(json.dumps(measure(given.child)))
        return 0
    results = Results("graph_gaps")
    whole = run(results, given.only or (QUICK_CASES if given.quick else CASES), in_own_process)
    results.write(given.out)
    return int(not whole)


if __name__ == "__main__":
    sys.exit(main())

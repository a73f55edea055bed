"""What restores cost a model that runs beside them, by the way the bytes take.

python -m benchmarks.interference [--out DIR] [--quick]

A decode-like stream (small batch, every weight read once: bound by memory) and a compute-bound
stream of bf16 matmuls, each one CUDA graph of many kernels, so that Python takes no part in
what is measured. Meanwhile a thread keeps eight restores in flight, as the layers of a
restore are: by the planner's choice, by kernels alone (`direct`), and as one contiguous
copy (`copy engine`), which is what the copy engine itself costs. Slowdown: time of the
graphs beside restores over their time alone, medians of alternating runs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.plan import Way
from adp_kv.units import KiB, MiB
from benchmarks._copies import PLANNER, POOL_BYTES, RING_BYTES, TOTAL_BYTES, Case, CudaBench, table
from benchmarks._results import Results, argument_parser

CODE = ("adp_kv/kernels", "adp_kv/transfer")
TARGET = 1.08
LOADS = ("decode", "compute")
COPY_ENGINE = "copy engine"
WAYS = (COPY_ENGINE, PLANNER, Way.DIRECT.value)
IN_FLIGHT = 8
RUN_S = 0.3
WARM_S = 0.05
IDLE_S = 0.0002
# Pages of 8B Llama and of MLA, whole and as one rank's part of wider ring slots.
CASES = (
    Case("contiguous", MiB, MiB, 64 * KiB),
    Case("contiguous", 72 * KiB, 72 * KiB, 72 * KiB),
    Case("strided", 1024 * KiB, 128 * KiB, 8 * KiB),
)
QUICK_CASES = CASES[:1]


@dataclass(frozen=True, slots=True)
class Beside:
    """A load's seconds a graph beside restores, and GB/s that those moved meanwhile."""

    seconds: float
    speed: float


class Bench(Protocol):
    """What can be measured; a stand-in replaces it where there is no device."""

    def link(self) -> float:
        """Return GB/s of a contiguous copy of 1 GiB on an idle device."""

    def alone(self, load: str) -> float:
        """Return seconds a graph of a load takes on an idle device."""

    def beside(self, load: str, case: Case, way: str) -> Beside:
        """Return the same beside restores of a case."""


class Traffic:
    """Transfers kept in flight by a thread.

    Args:
        start: queues one and returns whether it has ended, as a function.
        num_bytes: of each.
    """

    def __init__(self, start: Callable[[], Callable[[], bool]], num_bytes: int) -> None:
        self._start = start
        self._num_bytes = num_bytes
        self._stopping = False
        self._error: BaseException | None = None
        self.num_ended = 0
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(30)
        if self._error is not None:
            raise self._error

    @property
    def moved_bytes(self) -> int:
        """Bytes of the restores that have ended."""
        return self.num_ended * self._num_bytes

    def _run(self) -> None:
        try:
            flying: list[Callable[[], bool]] = []
            while flying or not self._stopping:
                if len(flying) < IN_FLIGHT and not self._stopping:
                    flying.append(self._start())
                elif flying[0]():
                    del flying[0]
                    self.num_ended += 1
                else:
                    time.sleep(IDLE_S)
        except BaseException as error:  # noqa: BLE001  raised where the traffic is stopped
            self._error = error


class CudaInterference(CudaBench):
    """Loads and restores on the current device."""

    def __init__(self, *, repeats: int) -> None:
        super().__init__(to_device=True, repeats=repeats)
        self._steps: list[Callable[[], None]] = []  # hold what the graphs read and write
        self._loads = {"decode": self._decode_graph(), "compute": self._compute_graph()}

    def _decode_graph(self) -> Any:
        """32 sequences through 3.6 GB of weights: each is read once a step."""
        torch = self._torch
        weights = [torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16) for _ in range(31)]
        x = torch.randn(32, 4096, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(32, 14336, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            for weight in weights:
                torch.mm(x, weight, out=out)

        return self._graph(step, 8)

    def _compute_graph(self) -> Any:
        torch = self._torch
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return self._graph(lambda: torch.mm(a, b, out=out), 8)

    def _graph(self, step: Callable[[], None], repeats: int) -> Any:
        cuda = self._torch.cuda
        self._steps.append(step)
        with cuda.stream(self._stream):
            step()
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=self._stream):
            for _ in range(repeats):
                step()
        cuda.synchronize()
        return graph

    def alone(self, load: str) -> float:
        """Return seconds a graph takes on an idle device."""
        self._torch.cuda.synchronize()
        return self._replay(load)

    def _replay(self, load: str) -> float:
        """Return seconds a graph, of as many as take RUN_S."""
        graph, cuda = self._loads[load], self._torch.cuda
        num, seconds = 1, 0.0
        while True:
            before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            with cuda.stream(self._stream):
                before.record()
                for _ in range(num):
                    graph.replay()
                after.record()
            while not after.query():  # a wait in CUDA might hold up the other thread's calls
                time.sleep(IDLE_S)
            seconds = before.elapsed_time(after) / 1e3
            if seconds >= RUN_S / 2:
                return seconds / num
            num = max(num + 1, int(RUN_S / seconds * num))

    def beside(self, load: str, case: Case, way: str) -> Beside:
        """Return seconds a graph takes beside restores, and what those moved."""
        self._replay(load)
        with Traffic(*self._transfers(case, way)) as traffic:
            time.sleep(WARM_S)
            began, moved = time.perf_counter(), traffic.moved_bytes
            seconds = self._replay(load)
            took = time.perf_counter() - began
            speed = (traffic.moved_bytes - moved) / took / 1e9
        self._torch.cuda.synchronize()
        return Beside(seconds, speed)

    def _transfers(self, case: Case, way: str) -> tuple[Callable[[], Callable[[], bool]], int]:
        if way == COPY_ENGINE:
            stream = self._torch.cuda.Stream()

            def start_copy() -> Callable[[], bool]:
                args = (self.pool.data_ptr(), self._address, TOTAL_BYTES, 1, stream.cuda_stream)
                self._runtime.memcpyAsync(*args)
                event = self._torch.cuda.Event()
                event.record(stream)
                return event.query

            return start_copy, TOTAL_BYTES
        slices, pages = table(case, RING_BYTES, POOL_BYTES, TOTAL_BYTES)
        copy = SliceCopy(self._address + slices, self.pool.data_ptr() + pages, case.page_bytes)
        mover = self._movers[way]
        return lambda: mover.restore(copy, None).done, copy.total_bytes


def run(bench: Bench, results: Results, cases: Sequence[Case], repeats: int) -> None:
    """Measure every load beside every way and add the rows."""
    link = bench.link()
    results.add("interference.link", link, "GB/s", better="higher")
    worst: dict[tuple[str, str], float] = {}
    for load in LOADS:
        alone: list[float] = []
        found: dict[tuple[str, str], list[Beside]] = {}
        for _ in range(repeats):
            for case in cases:
                for way in WAYS:
                    alone.append(bench.alone(load))
                    found.setdefault((case.name, way), []).append(bench.beside(load, case, way))
        idle = statistics.median(alone)
        results.add(f"interference.{load}.alone", idle * 1e3, "ms a graph", better="lower")
        for (case_name, way), runs in found.items():
            slowdown = statistics.median(run.seconds for run in runs) / idle
            prefix = f"interference.{load}.{case_name}.{way}"
            results.add(f"{prefix}.slowdown", slowdown, "x", better="lower")
            speed = statistics.median(run.speed for run in runs)
            results.add(f"{prefix}.speed", speed, "GB/s", better="higher")
            share = speed / link
            results.add(f"{prefix}.link_share", share, "of the link", better="higher")
            worst[load, way] = max(worst.get((load, way), 0.0), slowdown)
    for load in LOADS:
        results.add(
            f"interference.{load}.slowdown", worst[load, PLANNER], "x", better="lower",
            target=TARGET, baseline=worst[load, COPY_ENGINE],
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case, one repeat")
    given = parser.parse_args(argv)
    results = Results("interference")
    bench = CudaInterference(repeats=3)
    try:
        quick = given.quick
        run(bench, results, QUICK_CASES if quick else CASES, 1 if quick else 3)
    finally:
        bench.close()
    results.write(given.out)


if __name__ == "__main__":
    main()

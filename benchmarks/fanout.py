"""The same pages into every rank's memory: read by all, by one who broadcasts, or by fan-out.

python -m benchmarks.fanout [--out DIR] [--quick] [--gpus N ...]

Every rank needs all pages of a replicated cache. In one run: every rank reads all; rank 0 reads
and broadcasts; fan-out. Times are of the slowest rank, from before the first is queued to the
end of the last. The limit: every rank's link busy with its share, the exchange hidden.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from adp_kv.units import GiB, KiB, MiB
from benchmarks._fanout_rank import Rank
from benchmarks._ranks import Ranks
from benchmarks._results import Results, argument_parser

CODE = (
    "adp_kv/fanout",
    "adp_kv/kernels",
    "adp_kv/transfer/copy_engine.py",
    "adp_kv/transfer/tables.py",
)
RING_BYTES = 2 * GiB
READ_ALL, RANK_0, FAN_OUT, CHOICE = "readall", "rank0", "fanout", "choice"
PAGES_KIB = (18, 41, 72)
LAYERS, LAYER_BYTES = 61, 15 * MiB
TARGET_1GIB, TARGET_LAYERS, TARGET_SMALL = 1.9, 1.8, 1.05
SMALL_BYTES = (72 * KiB, 288 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB, 64 * MiB)
PAIR = 2


class Bench(Protocol):
    """What can be measured; a stand-in replaces it where there are no devices."""

    num_ranks: int

    def link(self) -> float:
        """Return GB/s of a contiguous copy, all ranks at once, each its part of 1 GiB."""

    def all_gather(self) -> float:
        """Return GB/s delivered per rank."""

    def seconds(
        self, ways: Sequence[str], page_kib: int, layer_bytes: int, num_layers: int
    ) -> list[list[float]]:
        """Return, for each way, seconds until the last rank has all, turn by turn."""


class CudaBench:
    """Ranks on devices 0 to num_ranks - 1, over one ring in shared memory."""

    def __init__(self, num_ranks: int, repeats: int) -> None:
        self.num_ranks = num_ranks
        self._repeats = repeats
        with tempfile.TemporaryFile(dir="/dev/shm") as file:  # where a ring lies; has no name
            file.truncate(RING_BYTES)
            words = np.memmap(file, np.int64, "r+", shape=(RING_BYTES // 4096, 512))
            words[:] = np.arange(512)
            words[:, 0] = np.arange(words.shape[0]) * 0x9E3779B97F4A7
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            self._ranks = Ranks(Rank, num_ranks, path, RING_BYTES, free_port())

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _slowest(self, name: str, *given: object) -> float:
        """Return the median over runs of the slowest rank's seconds."""
        return statistics.median(map(max, zip(*self._ranks.call(name, *given), strict=True)))

    def link(self) -> float:
        """Return GB/s of a contiguous copy, all ranks at once, each its part of 1 GiB."""
        num_bytes = GiB // self.num_ranks
        return num_bytes / self._slowest("link", num_bytes, self._repeats) / 1e9

    def all_gather(self) -> float:
        """Return GB/s delivered per rank."""
        return GiB / self._slowest("all_gather", GiB, self._repeats) / 1e9

    def seconds(
        self, ways: Sequence[str], page_kib: int, layer_bytes: int, num_layers: int
    ) -> list[list[float]]:
        """Return, for each way, seconds until the last rank has all, turn by turn."""
        turns = self._repeats if layer_bytes * num_layers > 64 * MiB else 5 * self._repeats
        given = (tuple(ways), page_kib * KiB, layer_bytes, num_layers, turns)
        ranks = self._ranks.call("run", *given)
        return np.max(np.array(ranks), axis=0).tolist()


def free_port() -> int:
    """Return a port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(bench: Bench, results: Results) -> None:
    """Measure everything and add the rows."""
    num = bench.num_ranks
    name = f"fanout.{num}gpu"
    link, gathered = bench.link(), bench.all_gather()
    limit = min(num * link, gathered)
    results.add(f"{name}.link", link, "GB/s", better="higher")
    results.add(f"{name}.allgather", gathered, "GB/s", better="higher")
    results.add(f"{name}.limit.share", limit / link, "of the link", better="higher")
    ours, others = [], []
    for kib in PAGES_KIB:
        speeds = _speeds(bench, results, f"{name}.1GiB.{kib}KiB", kib, GiB, 1)
        ours.append(speeds[FAN_OUT] / link)
        others.append(max(speeds[READ_ALL], speeds[RANK_0]) / link)
    targets = (TARGET_1GIB, TARGET_LAYERS) if num == PAIR else (None, None)
    results.add(
        f"{name}.1GiB.share.min", min(ours), "of the link", better="higher", target=targets[0],
        baseline=min(others),
    )  # fmt: skip
    speeds = _speeds(bench, results, f"{name}.layers15MiB", 72, LAYER_BYTES, LAYERS)
    results.add(
        f"{name}.layers15MiB.share", speeds[FAN_OUT] / link, "of the link", better="higher",
        target=targets[1], baseline=max(speeds[READ_ALL], speeds[RANK_0]) / link,
    )  # fmt: skip
    _smallest(bench, results, name)


def _speeds(
    bench: Bench, results: Results, prefix: str, kib: int, layer_bytes: int, num_layers: int
) -> dict[str, float]:
    """Add and return GB/s delivered per rank by every way."""
    slice_bytes = kib * KiB * (16 if kib == 18 else 4)
    total = layer_bytes // slice_bytes * slice_bytes * num_layers
    ways = (READ_ALL, RANK_0, FAN_OUT)
    speeds = {}
    for way, times in zip(ways, bench.seconds(ways, kib, layer_bytes, num_layers), strict=True):
        speeds[way] = total / statistics.median(times) / 1e9
        results.add(f"{prefix}.{way}", speeds[way], "GB/s", better="higher")
    return speeds


def _smallest(bench: Bench, results: Results, name: str) -> None:
    """Add how a single transfer of each size compares with every rank reading all."""
    ratios = []
    for num_bytes in SMALL_BYTES:
        readall, chosen, always = bench.seconds((READ_ALL, CHOICE, FAN_OUT), 72, num_bytes, 1)
        ratios.append(_ratio(chosen, readall))
        prefix = f"{name}.single.{num_bytes // KiB}KiB"
        results.add(f"{prefix}.readall", statistics.median(readall) * 1e6, "µs", better="lower")
        results.add(f"{prefix}.over_readall", ratios[-1], "time ÷ time", better="lower")
        results.add(
            f"{prefix}.always.over_readall", _ratio(always, readall), "time ÷ time", better="lower"
        )
    target = TARGET_SMALL if bench.num_ranks == PAIR else None
    results.add(
        f"{name}.smallest.over_readall", max(ratios), "time ÷ time", better="lower", target=target
    )


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of ratios, turn by turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument(
        "--gpus", type=int, nargs="+", help="numbers of ranks [2 4 8, as there are]"
    )
    given = parser.parse_args()
    import torch

    there = torch.cuda.device_count()
    results = Results("fanout")
    for num_ranks in given.gpus or [num for num in (2, 4, 8) if num <= there]:
        bench = CudaBench(num_ranks, repeats=3 if given.quick else 9)
        try:
            run(bench, results)
        finally:
            bench.close()
    results.write(given.out)


if __name__ == "__main__":
    main()

"""How fast the memory card fills a ring: GB/s of reads by number of copy threads.

python -m benchmarks.memory_card [--out DIR] [--quick]

The card alone, values of 1 MiB written and read in one order, four batches in flight, into a
shared-memory ring. Runs without a GPU, on the host whose restores are of interest: the
default of copy_threads has to feed the link (55 GB/s on an H200). Beside it, threads that
do nothing but copy: what the memory of this machine gives.
"""

from __future__ import annotations

import ctypes
import os
import queue
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from adp_kv.units import GiB, MiB
from benchmarks._copies import shared_ring
from benchmarks._results import Results, argument_parser
from gateway.cards.base import Batch, Op
from gateway.cards.memory import MemoryCard, MemorySettings

CODE = ("gateway/cards/memory.py", "gateway/cards/batches.py", "gateway/cards/slots.py")
TARGET = 60.0
VALUE_BYTES = MiB
IN_FLIGHT = 4
TIMEOUT_S = 60.0
THREADS = (1, 2, 4, 8, 12, 16)
BATCHES = (16 * MiB, 128 * MiB)


class Rig:
    """A memory card full of values and a ring to read them into."""

    def __init__(self, ring: np.ndarray, threads: int) -> None:
        self.ring = ring
        self.num_values = ring.size // VALUE_BYTES
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._tokens = 0
        self.card = MemoryCard(
            MemorySettings(
                capacity_bytes=ring.size,
                max_value_bytes=VALUE_BYTES,
                copy_threads=threads,
                prefault=True,
            )
        )
        self.card.open(lambda token, status: self._done.put(int(status.max())))
        rng = np.random.default_rng(1)
        self._keys = rng.integers(0, 2**64, (self.num_values, 2), dtype=np.uint64)
        self._addresses = ring.ctypes.data + np.arange(self.num_values) * VALUE_BYTES
        self.pass_over(Op.WRITE, 16 * MiB)

    def pass_over(self, op: Op, batch_bytes: int) -> float:
        """Move every value once; return seconds."""
        rows = batch_bytes // VALUE_BYTES
        began = time.perf_counter()
        under_way = 0
        for first in range(0, self.num_values, rows):
            if under_way == IN_FLIGHT:
                self._take()
                under_way -= 1
            self._submit(op, slice(first, first + rows))
            under_way += 1
        for _ in range(under_way):
            self._take()
        return time.perf_counter() - began

    def _submit(self, op: Op, rows: slice) -> None:
        keys = self._keys[rows]
        self._tokens += 1
        self.card.submit(
            Batch(
                op=op,
                token=self._tokens,
                databases=np.zeros(len(keys), dtype=np.uint16),
                keys=keys,
                addresses=self._addresses[rows].astype(np.uint64),
                lengths=np.full(len(keys), VALUE_BYTES, dtype=np.uint32),
            )
        )

    def _take(self) -> None:
        assert self._done.get(timeout=TIMEOUT_S) == 0


def plain_copy_s(source: np.ndarray, target: np.ndarray, threads: int) -> float:
    """Return seconds that threads take for one copy of everything, each its own part."""
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    part = source.size // threads
    workers = [
        threading.Thread(
            target=memmove,
            args=(target.ctypes.data + i * part, source.ctypes.data + i * part, part),
        )
        for i in range(threads)
    ]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def run(results: Results, num_bytes: int, threads: Sequence[int], repeats: int) -> None:
    """Measure every number of threads that this machine has cores for."""
    ring = shared_ring(num_bytes)
    other = np.ones(num_bytes, dtype=np.uint8)
    for count in [n for n in threads if n <= (os.cpu_count() or 1)]:
        plain = statistics.median(plain_copy_s(other, ring, count) for _ in range(repeats))
        speed = num_bytes / plain / 1e9
        results.add(f"memory_card.plain.{count}", speed, "GB/s", better="higher")
    best = 0.0
    for count in [n for n in (0, *threads) if n <= (os.cpu_count() or 1)]:
        rig = Rig(ring, count)
        try:
            for batch in [size for size in BATCHES if size <= num_bytes]:
                times = [rig.pass_over(Op.READ, batch) for _ in range(repeats)]
                speed = num_bytes / statistics.median(times) / 1e9
                name = f"threads{count}" if count else "default"
                metric = f"memory_card.read.{name}.batch{batch // MiB}MiB"
                results.add(metric, speed, "GB/s", better="higher")
                best = max(best, speed) if not count else best
        finally:
            rig.card.close()
    results.add("memory_card.read", best, "GB/s", better="higher", target=TARGET)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="little memory, two repeats")
    given = parser.parse_args(argv)
    results = Results("memory_card")
    if given.quick:
        run(results, 64 * MiB, (1, 2), 2)
    else:
        run(results, 2 * GiB, THREADS, 5)
    results.write(given.out)


if __name__ == "__main__":
    main()

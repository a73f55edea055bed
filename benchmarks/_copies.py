"""What benchmarks.scatter and benchmarks.gather share: cases, a ring and pool, timing, rows.

Every run is set against a contiguous 1 GiB copy in the same direction right before it, since
a host that others use is not the same from one second to the next; shares are medians of
these ratios.
A transfer is 256 MiB; shares are of eight transfers queued one behind the other, as the layers
of a restore are, from before the first is planned to the end of the last. `single` is one
transfer alone, on an idle device.
Ways of ours: what the planner chooses, and each way forced. Beside them, what an engine
does without us: a copy call a page, and batched copies (the forced way "batch").
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adp_kv.transfer.base import SliceCopy
from adp_kv.transfer.plan import RESTORE, SAVE, Thresholds, Way
from adp_kv.units import GiB, KiB, MiB
from benchmarks._results import Results, argument_parser

RING_BYTES = 2 * GiB
POOL_BYTES = 6 * GiB
TOTAL_BYTES = 256 * MiB
MAX_PAGE_CALLS = 2048
TRANSFERS = 8
REPEATS = 5
OTHERS_REPEATS = 3
NUM_CHECKED = 256
PLANNER = "planner"
PAGE_CALLS = "a call a page"
SINGLE = "single"
WAYS = (PLANNER, *(way.value for way in Way), SINGLE, PAGE_CALLS)
SINGLE_OF = {SINGLE: PLANNER}


@dataclass(frozen=True, slots=True)
class Case:
    """Slices in ring slots: a run without gaps, a strided run, or random slots."""

    kind: str
    slot_bytes: int
    slice_bytes: int
    page_bytes: int

    @property
    def name(self) -> str:
        """Name of the case, as in contiguous.8KiB or strided.16KiB-of-128KiB."""
        size = f"{self.page_bytes // KiB}KiB"
        if self.kind != "strided":
            return f"{self.kind}.{size}"
        return f"{self.kind}.{self.slice_bytes // KiB}KiB-of-{self.slot_bytes // KiB}KiB"


PAGES_KIB = (8, 18, 32, 41, 72, 128, 1024, 2048)
STRIDED_KIB = ((32, 4), (64, 8), (128, 16), (160, 24), (256, 32), (512, 64), (144, 72), (1024, 128))
QUICK_PAGES_KIB = (8, 72, 2048)
QUICK_STRIDED_KIB = ((128, 16), (144, 72))


def all_cases(*, quick: bool) -> list[Case]:
    """Return what is measured."""
    pages = [kib * KiB for kib in (QUICK_PAGES_KIB if quick else PAGES_KIB)]
    strided = QUICK_STRIDED_KIB if quick else STRIDED_KIB
    found = [Case("contiguous", page, page, page) for page in pages]
    found += [
        Case("strided", slot * KiB, piece * KiB, min(piece, 8) * KiB if piece % 8 == 0 else 4 * KiB)
        for slot, piece in strided
    ]
    return found + [Case("random", page, page, page) for page in pages]


def table(case: Case, ring_bytes: int, pool_bytes: int, total: int) -> tuple[Any, Any]:
    """Return offsets in the ring [n] and in the pool [n, pages per slice] of a case."""
    room = ring_bytes // case.slot_bytes
    num = min(total // case.slice_bytes, room)
    rng = np.random.default_rng(1)
    slots = rng.permutation(room)[:num] if case.kind == "random" else np.arange(num)
    inside = case.slot_bytes - case.slice_bytes  # the last rank's slice
    per_slice = case.slice_bytes // case.page_bytes
    pages = rng.permutation(pool_bytes // case.page_bytes)[: num * per_slice]
    slices = slots.astype(np.int64) * case.slot_bytes + inside
    return slices, (pages.astype(np.int64) * case.page_bytes).reshape(num, per_slice)


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians: GB/s, and the share of the copy that was measured right before."""

    gb_per_s: float
    share: float


class Bench(Protocol):
    """What can be measured; a stand-in replaces it where there is no device."""

    def link(self) -> float:
        """Return GB/s of a contiguous copy of 1 GiB."""

    def measure(self, case: Case, way: str) -> Speed:
        """Return the speed of a case, after its bytes were checked."""


class CudaBench:
    """A ring in shared memory and a pool of pages on the current device.

    Args:
        to_device: restore (scatter) rather than save (gather).
        repeats: runs that a median is taken of.
    """

    def __init__(self, *, to_device: bool, repeats: int) -> None:
        import torch

        from adp_kv.transfer.copy_engine import CopyEngine, open_batch
        from adp_kv.transfer.cuda_mover import CudaMover
        from adp_kv.transfer.device import TorchDevice
        from adp_kv.transfer.registration import RingRegistration
        from adp_kv.transfer.runtime import load_runtime
        from adp_kv.transfer.settings import MoverSettings

        self._torch = torch
        self._to_device = to_device
        self._repeats = repeats
        self._runtime = load_runtime()
        api = TorchDevice(torch.device("cuda"), self._runtime)
        api.bind()
        api.prepare()
        self.ring = shared_ring(RING_BYTES)
        self._address = self.ring.ctypes.data
        registration = RingRegistration(self._runtime, api.index)
        registration.register(self._address, RING_BYTES)
        self._registration = registration
        self.pool = torch.zeros(POOL_BYTES, dtype=torch.uint8, device="cuda")
        words = self.pool.view(torch.int64).view(-1, 512)
        words[:, 0] = torch.arange(words.shape[0], device="cuda")
        self._stream = torch.cuda.Stream()
        engine = CopyEngine(self._runtime, open_batch())
        self._movers = {}
        for name in (PLANNER, *(way.value for way in Way)):
            force = None if name == PLANNER else Way(name)
            chosen = [base if force is None else forced(base, force) for base in (RESTORE, SAVE)]
            settings = MoverSettings(restore=chosen[0], save=chosen[1])
            self._movers[name] = CudaMover(api, engine, registration, settings)

    def close(self) -> None:
        """Give the ring back."""
        self._torch.cuda.synchronize()
        for mover in self._movers.values():
            mover.close()

    def link(self) -> float:
        """Return GB/s of a contiguous copy of 1 GiB."""
        times = [self._seconds(self._copy_through) for _ in range(max(self._repeats, 5))]
        return GiB / statistics.median(times) / 1e9

    def measure(self, case: Case, way: str) -> Speed:
        """Return the speed of a case, after its bytes were checked."""
        slices, pages = table(case, RING_BYTES, POOL_BYTES, TOTAL_BYTES)
        if way == PAGE_CALLS:
            most = max(1, MAX_PAGE_CALLS * case.page_bytes // case.slice_bytes)
            slices, pages = slices[:most], pages[:most]
        copy = SliceCopy(self._address + slices, self.pool.data_ptr() + pages, case.page_bytes)

        def start() -> None:
            if way == PAGE_CALLS:
                self._call_for_each(copy)
                return
            mover = self._movers[SINGLE_OF.get(way, way)]
            begin = mover.restore if self._to_device else mover.save
            tickets = [begin(copy, mover.mark()) for _ in range(num_transfers)]
            for ticket in tickets:  # they end in any order
                ticket.fence()

        num_transfers = 1
        self._poison(case, slices)
        self._seconds(start)
        self._check(case, way, slices, pages)
        if way not in {PAGE_CALLS, SINGLE}:
            num_transfers = TRANSFERS
        total = num_transfers * copy.total_bytes
        speeds = []
        for _ in range(self._repeats if way == PLANNER else OTHERS_REPEATS):
            through = GiB / self._seconds(self._copy_through)
            speed = total / self._seconds(start)
            speeds.append((speed / 1e9, speed / through))
        return Speed(*(statistics.median(column) for column in zip(*speeds, strict=True)))

    def _copy_through(self) -> None:
        sides = (self.pool.data_ptr(), self._address)
        dst, src = sides if self._to_device else sides[::-1]
        self._call(dst, src, GiB)

    def _seconds(self, start: Any) -> float:
        """Return the time from before start() until its work is done."""
        cuda = self._torch.cuda
        with cuda.stream(self._stream):
            cuda.synchronize()
            before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            before.record()
            start()
            after.record()
            cuda.synchronize()
            return float(before.elapsed_time(after)) / 1e3

    def _call(self, dst: int, src: int, num_bytes: int) -> None:
        kind = 1 if self._to_device else 2
        self._runtime.memcpyAsync(dst, src, num_bytes, kind, self._stream.cuda_stream)

    def _call_for_each(self, copy: SliceCopy) -> None:
        per_slice = copy.page_addrs.shape[1]
        inside = np.arange(per_slice, dtype=np.int64) * copy.page_bytes
        hosts = (copy.slice_addrs[:, None] + inside).reshape(-1).tolist()
        for host, page in zip(hosts, copy.page_addrs.reshape(-1).tolist(), strict=True):
            dst, src = (page, host) if self._to_device else (host, page)
            self._call(dst, src, copy.page_bytes)

    def _poison(self, case: Case, slices: NDArray[np.int64]) -> None:
        """Overwrite the side that is written, where it will be checked."""
        if self._to_device:
            self.pool.fill_(0xA5)
        else:
            for row in checked_rows(slices.size):
                self.ring[slices[row] : slices[row] + case.slice_bytes] = 0xA5

    def _check(self, case: Case, way: str, slices: Any, pages: Any) -> None:
        for row in checked_rows(slices.size):
            inside = slice(slices[row], slices[row] + case.slice_bytes)
            parts = [self.pool[at : at + case.page_bytes] for at in pages[row].tolist()]
            there = self._torch.cat(parts).cpu().numpy()
            if not np.array_equal(self.ring[inside], there):
                raise AssertionError(f"{case.name}, {way}: slice {row} arrived with other bytes")


def shared_ring(num_bytes: int) -> NDArray[np.uint8]:
    """Return a mapped file in shared memory that has no name; every 4 KiB has its number."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:  # where a ring lies
        file.truncate(num_bytes)
        ring = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    ring[:] = 0x3C
    words = ring.view(np.int64).reshape(-1, 512)
    words[:, 0] = np.arange(words.shape[0])
    return ring


def checked_rows(num: int) -> set[int]:
    """Return which of num slices are compared: the first, the last, some between."""
    chosen = np.random.default_rng(2).permutation(num)[:NUM_CHECKED]
    return {0, num - 1, *chosen.tolist()}


def forced(base: Thresholds, way: Way) -> Thresholds:
    """Return thresholds that use a way for everything, but cut as the base does."""
    return replace(base, force=way)


def run(bench: Bench, results: Results, cases: list[Case], targets: dict[str, float]) -> None:
    """Measure every case by every way and add the rows.

    Args:
        bench: what measures.
        results: what the rows are added to; its name is "scatter" or "gather".
        cases: what is measured.
        targets: the least share of the link for each kind; "" stands for all kinds.
    """
    link = bench.link()
    results.add(f"{results.name}.link", link, "GB/s", better="higher")
    shares: dict[str, list[float]] = {}
    baselines: dict[str, list[float]] = {}
    for case in cases:
        speeds = {way: bench.measure(case, way) for way in WAYS}
        share = speeds[PLANNER].share
        without_us = max(speeds[way].share for way in (PAGE_CALLS, Way.BATCH.value))
        prefix = f"{results.name}.{case.name}"
        results.add(
            f"{prefix}.share", share, "of the link", better="higher", baseline=without_us,
        )  # fmt: skip
        for way, speed in speeds.items():
            results.add(f"{prefix}.{way}", speed.gb_per_s, "GB/s", better="higher")
        for kind in targets.keys() & {case.kind, ""}:
            shares.setdefault(kind, []).append(share)
            baselines.setdefault(kind, []).append(without_us)
    for kind, target in targets.items():
        metric = ".".join(filter(None, (results.name, kind, "share.min")))
        results.add(
            metric, min(shares[kind]), "of the link", better="higher", target=target,
            baseline=min(baselines[kind]),
        )  # fmt: skip


def main(name: str, doc: str | None, targets: dict[str, float], *, to_device: bool) -> None:
    """Run a benchmark from the command line."""
    parser = argument_parser(doc)
    parser.add_argument("--quick", action="store_true", help="few sizes, few repeats")
    given = parser.parse_args()
    results = Results(name)
    bench = CudaBench(to_device=to_device, repeats=REPEATS)
    try:
        run(bench, results, all_cases(quick=given.quick), targets)
    finally:
        bench.close()
    results.write(given.out)

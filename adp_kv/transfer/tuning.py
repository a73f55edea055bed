"""Measure on this device from which size on one way is faster than another.

    ways of a size, forced turn by turn ──► ratios of their times ──► Thresholds ──► cache folder

A threshold is the smallest size from which a way is at least as fast at every larger size that
was measured; transfers are queued one behind the other, as the layers of a restore are. A host
that others use is not the same from one moment to the next: times are compared in pairs, and a
default only gives way to a clear difference. What was not measured before the budget was spent
keeps its default, and is not cached: it is measured at the next start.

Owning thread: the one that opens the mover, before any transfer. Failure scope: none; an error
leaves the defaults, with one line in the log.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

import numpy as np

from adp_kv.errors import TransferError
from adp_kv.transfer.base import Mark, SliceCopy, Ticket
from adp_kv.transfer.plan import NEVER, RESTORE, SAVE, Thresholds, Way
from adp_kv.units import KiB, MiB

if TYPE_CHECKING:
    from adp_kv.transfer.device import TorchDevice

logger = logging.getLogger(__name__)

FORMAT = 6
"""Of a cached result; another one is measured anew."""
STAGED_FROM = 32 * MiB
"""Runs of this size are staged whatever was measured: no kernel moves as much over a link as the
copy engine, and it takes multiprocessors from the model."""
BUDGET_S = 1.0
RING_BYTES = 64 * MiB
TOTAL_BYTES = 32 * MiB
_DEADLINE_S = 5.0
_REPEATS = 3
_CLEAR = 1.07
"""A ratio of times that is not noise."""
_CLEAR_SAVE_BATCH = 1.25
"""Nobody waits for a save, but a kernel beside the model costs that more (plan.py)."""
_PAGE_BYTES = 8 * KiB

Kind: TypeAlias = Literal["staged", "strided", "batch"]
Measure: TypeAlias = Callable[[bool, Kind, int], float]
"""Return the time of a kind's way over the kernel's: to the device or from it, kind, size.

Raises TimeoutError when the budget is spent.
"""
SIZES: dict[Kind, tuple[int, ...]] = {
    "staged": (MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB),
    "strided": (16 * KiB, 32 * KiB, 64 * KiB, 128 * KiB),
    "batch": (16 * KiB, 40 * KiB, 64 * KiB, 128 * KiB, 512 * KiB, MiB),
}
"""What is measured: bytes of a run, of a strided slice, of a page in a slot of its own."""
_RIVAL: dict[Kind, Way] = {"staged": Way.STAGED, "strided": Way.STAGED, "batch": Way.BATCH}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds of one device and driver, as they are cached in JSON."""

    format: int
    machine: str
    restore: dict[Kind, int]
    save: dict[Kind, int]


class Tunable(Protocol):
    """What is measured: a mover that nothing uses yet."""

    def use(self, restore: Thresholds, save: Thresholds) -> None:
        """Choose ways by these thresholds from the next transfer on."""

    def register_ring(self, address: int, num_bytes: int) -> None:
        """As base.Mover."""

    def release_ring(self) -> None:
        """Wait for transfers in flight and unregister the ring."""

    def restore(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        """As base.Mover."""

    def save(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        """As base.Mover."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Thresholds in use, and whether all of them were measured."""

    restore: Thresholds
    save: Thresholds
    is_complete: bool


def crossover(sizes: Sequence[int], is_faster: Sequence[bool]) -> int:
    """Return the smallest size from which on every one is faster; NEVER if the last is not."""
    found = NEVER
    for size, faster in zip(reversed(sizes), reversed(is_faster), strict=True):
        if not faster:
            break
        found = size
    return found


def measure_thresholds(measure: Measure, kinds: Sequence[Kind]) -> tuple[Tuned, Tuning]:
    """Compare each kind's way with the kernel, at every size, in both directions."""
    found: dict[bool, dict[Kind, int]] = {True: {}, False: {}}
    is_complete = True
    try:
        for to_device in (True, False):
            for kind in kinds:
                default = getattr(RESTORE if to_device else SAVE, kind)
                is_save_batch = kind == "batch" and not to_device
                most_slower = _CLEAR_SAVE_BATCH if is_save_batch else _CLEAR
                faster = [
                    measure(to_device, kind, size)
                    <= (most_slower if size >= default else 1 / _CLEAR)
                    for size in SIZES[kind]
                ]
                most = STAGED_FROM if kind == "staged" else NEVER
                found[to_device][kind] = min(crossover(SIZES[kind], faster), most)
    except TimeoutError:
        is_complete = False
    tuned = Tuned(_with(RESTORE, found[True]), _with(SAVE, found[False]), is_complete)
    return tuned, Tuning(FORMAT, "", found[True], found[False])


def tune(mover: Tunable, device: TorchDevice, folder: Path, *, has_batch: bool) -> None:
    """Let a mover use thresholds of this machine: cached ones, or measured now and cached.

    Args:
        mover: one without a ring, that nothing uses yet.
        device: the mover's.
        has_batch: whether batched copies can be measured.
        folder: of the cache; created if it is missing.
    """
    machine = device.machine()
    path = folder / f"tuning-{device.index}.json"
    cached = _load(path, machine)
    if cached is not None:
        mover.use(_with(RESTORE, cached.restore), _with(SAVE, cached.save))
        return
    began = time.monotonic()
    kinds: list[Kind] = ["staged", "strided", *(["batch"] if has_batch else [])]  # type: ignore[list-item]
    try:
        with _Rig(mover, device, began + BUDGET_S) as rig:
            tuned, result = measure_thresholds(rig.ratio, kinds)
    except (TransferError, RuntimeError, OSError) as error:
        logger.warning("transfers use default thresholds: measuring failed: %s", error)
        mover.use(RESTORE, SAVE)
        return
    mover.use(tuned.restore, tuned.save)
    took = time.monotonic() - began
    logger.info("transfer thresholds measured in %.2f s: %s", took, _describe(tuned))
    if tuned.is_complete:
        _store(path, replace(result, machine=machine))


class _Rig:
    """A small ring and pool; transfers of one way at a time."""

    def __init__(self, mover: Tunable, device: TorchDevice, end: float) -> None:
        self._mover = mover
        self._end = end
        self._pool = device.allocate(RING_BYTES)
        self._memory = mmap.mmap(-1, RING_BYTES)
        ring = np.frombuffer(self._memory, np.uint8)
        ring[::4096] = 1  # locked memory must be there
        self._address = int(ring.ctypes.data)
        mover.register_ring(self._address, RING_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.release_ring()

    def ratio(self, to_device: bool, kind: Kind, size: int) -> float:  # noqa: FBT001
        """Return the median of a few rounds (see Measure); the first is not counted."""
        move = self._mover.restore if to_device else self._mover.save
        copy = self._copy(kind, size)
        count = max(2, TOTAL_BYTES // copy.total_bytes)
        ratios = []
        for _ in range(1 + _REPEATS):
            ours, kernel = (
                self._seconds(move, copy, count, way) for way in (_RIVAL[kind], Way.DIRECT)
            )
            ratios.append(ours / kernel)
        return statistics.median(ratios[1:])

    def _seconds(
        self,
        move: Callable[[SliceCopy, Mark | None], Ticket],
        copy: SliceCopy,
        count: int,
        way: Way,
    ) -> float:
        began = time.monotonic()
        if began > self._end:
            raise TimeoutError
        self._mover.use(replace(RESTORE, force=way), replace(SAVE, force=way))
        tickets = [move(copy, None) for _ in range(count)]
        for ticket in tickets:  # they end in any order
            _wait(ticket, began + _DEADLINE_S)
        return time.monotonic() - began

    def _copy(self, kind: Kind, size: int) -> SliceCopy:
        if kind == "staged":
            slices, pitch, page = size // _PAGE_BYTES, _PAGE_BYTES, _PAGE_BYTES
        else:
            slices, pitch = TOTAL_BYTES // size, 2 * size
            page = size if kind == "batch" else _PAGE_BYTES
        total = size if kind == "staged" else TOTAL_BYTES
        rng = np.random.default_rng(1)
        order = rng.permutation(slices) if kind == "batch" else np.arange(slices)
        pages = rng.permutation(total // page).reshape(slices, -1)
        hosts = self._address + order.astype(np.int64) * pitch
        return SliceCopy(hosts, self._pool.data_ptr() + pages.astype(np.int64) * page, page)


def _wait(ticket: Ticket, deadline: float) -> None:
    while not ticket.done():
        if time.monotonic() > deadline:
            raise TransferError("the device does not finish")


def _with(base: Thresholds, found: Mapping[Kind, int]) -> Thresholds:
    return replace(
        base,
        staged=found.get("staged", base.staged),
        strided=found.get("strided", base.strided),
        batch=found.get("batch", base.batch),
    )


def _describe(tuned: Tuned) -> str:
    parts: Iterator[str] = (
        f"{name} {kind} from "
        + ("never" if (at := getattr(chosen, kind)) == NEVER else f"{at // KiB} KiB")
        for name, chosen in (("restore", tuned.restore), ("save", tuned.save))
        for kind in SIZES
    )
    return ", ".join(parts)


def _load(path: Path, machine: str) -> Tuning | None:
    """Return a cached result of the same machine and format; anything else is none."""
    try:
        cached = Tuning(**json.loads(path.read_bytes()))
        is_sound = all(value > 0 for value in (*cached.restore.values(), *cached.save.values()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    is_ours = (cached.format, cached.machine) == (FORMAT, machine)
    return cached if is_ours and is_sound else None


def _store(path: Path, result: Tuning) -> None:
    """Write a file whole or not at all: other ranks read it meanwhile."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(result)))
        part.replace(path)
    except OSError as error:
        logger.info("transfer thresholds are not cached: %s", error)

"""What cards are set against, on the very same file where there is one: fio and others.

Each peer moves values of one size and says GB/s and CPU seconds a GB. A peer that is not
installed here is left out, with a line that says so.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adp_kv.units import PAGE_BYTES, MiB, align_up
from gateway.cards.slab_format import DATA_OFFSET

FILE_THREADS = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """One way of moving values: GB/s and CPU seconds a GB."""

    gb_s: float
    cpu_s_per_gb: float


def cpu_seconds() -> float:
    """Return user and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(num_bytes: int, move: Callable[[], object]) -> Figure:
    """Run `move` once, which moves so many bytes."""
    cpu, began = cpu_seconds(), time.perf_counter()
    move()
    took = time.perf_counter() - began
    return Figure(num_bytes / took / 1e9, (cpu_seconds() - cpu) / (num_bytes / 1e9))


def find_fio(given: str) -> str | None:
    """Return the fio program: the given one, or that of PATH."""
    found = given or shutil.which("fio")
    if not found:
        print("fio: not installed; its rows and ratios are left out", flush=True)
    return found


def fio(program: str, file: Path, size: int, total: int, *, write: bool, depth: int) -> Figure:
    """Run random direct I/O of one block size on a slab's slots, by io_uring."""
    command = [
        program,
        "--name=card",
        f"--filename={file}",
        f"--rw={'randwrite' if write else 'randread'}",
        f"--bs={align_up(size, PAGE_BYTES)}",
        f"--size={total}",
        f"--offset={DATA_OFFSET}",
        f"--iodepth={depth}",
        "--ioengine=io_uring",
        "--fixedbufs=1",
        "--direct=1",
        "--overwrite=1",
        "--randrepeat=0",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["write" if write else "read"]
    seconds = side["runtime"] / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Figure(side["io_bytes"] / seconds / 1e9, cpu / (side["io_bytes"] / 1e9))


class RawBlock:
    """LMCache's raw-block package on a slab's file: io_uring, O_DIRECT, 64 rows a batch."""

    def __init__(self, file: Path, memory: memoryview, depth: int) -> None:
        """Open the file.

        Raises:
            ImportError: The package is not installed.
        """
        from lmcache_rust_raw_block_io import RawBlockDevice  # type: ignore[import-not-found]

        how = {"use_odirect": True, "alignment": PAGE_BYTES, "io_engine": "io_uring"}
        self._device = RawBlockDevice(str(file), True, iouring_queue_depth=depth, **how)
        self._memory = memory

    def move(self, size: int, slots: np.ndarray, stride: int, *, write: bool) -> None:
        """Move values of `size` to or from slots."""
        rows = 64
        padded = align_up(size, PAGE_BYTES)
        call = self._device.batched_write if write else self._device.batched_read
        for start in range(0, len(slots), rows):
            mine = slots[start : start + rows]
            room = len(self._memory) // padded
            places = [(start + i) % room * padded for i in range(len(mine))]
            views = [self._memory[place : place + padded] for place in places]
            offsets = [int(DATA_OFFSET + slot * stride) for slot in mine]
            _, errors = self._device.wait_iouring(call(offsets, views, [padded] * len(mine)))
            assert not errors, errors[0]

    def close(self) -> None:
        """Close the file."""
        self._device.close()


class Files:
    """One file a value, by eight threads with O_DIRECT: what a file system does alone."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        """Make the folder."""
        self._folder = folder
        folder.mkdir()
        self._memory = memory

    def move(self, size: int, numbers: np.ndarray, *, write: bool) -> None:
        """Write or read the files of these numbers."""
        padded = align_up(size, PAGE_BYTES)
        flags = os.O_DIRECT | (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)

        def one(number: int) -> None:
            place = number % (len(self._memory) // padded) * padded
            view = self._memory[place : place + padded]
            descriptor = os.open(self._folder / f"{number:06d}", flags, 0o600)
            try:
                moved = (
                    os.pwrite(descriptor, view, 0) if write else os.preadv(descriptor, [view], 0)
                )
                assert moved == padded
            finally:
                os.close(descriptor)

        with ThreadPoolExecutor(FILE_THREADS) as pool:
            for _ in pool.map(one, numbers.tolist(), chunksize=8):
                pass

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder)


def buffers(num_bytes: int) -> np.ndarray:
    """Return page-aligned memory filled with noise."""
    memory = mmap.mmap(-1, align_up(num_bytes, MiB))
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, array.size, dtype=np.uint8)
    return array

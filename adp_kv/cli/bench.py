"""How fast this machine is where it matters: link, scatter, card. A minute, not a benchmark suite.

    link     host memory to GPU and back, one large copy
    scatter  ring slices to pages, by the same mover that restores (on the host without a GPU)
    card     objects onto a card and back, in a process of the gateway's

Figures for documents come from benchmarks/, with baselines; this says whether a machine is far
off. Failure scope: ConfigError where something is missing, with how to get it.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from adp_kv.cli.show import Progress
from adp_kv.errors import AdpError, ConfigError
from adp_kv.units import MiB

if TYPE_CHECKING:
    import torch

LINK_BYTES = 256 * MiB
SCATTER_BYTES = 64 * MiB
ROUNDS = 8
CARD_TIMEOUT_S = 600.0


def _torch() -> ModuleType:
    try:
        import torch  # noqa: PLC0415  only where it is asked for
    except ImportError as error:
        raise ConfigError(f"no torch here ({error}): run this where vLLM is") from error
    return torch


def _best(what: str, once: Callable[[], None], wait: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some rounds."""
    progress, best = Progress(what), float("inf")
    once()
    wait()
    for number in range(ROUNDS):
        began = time.perf_counter()
        once()
        wait()
        best = min(best, time.perf_counter() - began)
        progress.step((number + 1) / ROUNDS)
    progress.end()
    return best


def bench_link() -> dict[str, object]:
    """Return GB/s of one large copy in each direction; of host memory where there is no GPU."""
    torch = _torch()
    cuda = torch.cuda.is_available()
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=cuda)
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda" if cuda else "cpu")

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def rate(seconds: float) -> float:
        return round(LINK_BYTES / seconds / 1e9, 2)

    to_device = _best("host to device", lambda: device.copy_(host, non_blocking=True), wait)
    to_host = _best("device to host", lambda: host.copy_(device, non_blocking=True), wait)
    return {
        "device": torch.cuda.get_device_name() if cuda else "none: host memory only",
        "bytes": LINK_BYTES,
        "host_to_device_gb_s": rate(to_device),
        "device_to_host_gb_s": rate(to_host),
    }


def bench_scatter(page_bytes: int, pages_per_slice: int) -> dict[str, object]:
    """Return GB/s between ring slices and scattered pages, both ways, by the product's mover.

    Raises:
        ConfigError: Sizes that make no transfer.
    """
    torch = _torch()
    slice_bytes = page_bytes * pages_per_slice
    num_slices = SCATTER_BYTES // slice_bytes if slice_bytes else 0
    if num_slices < 1 or page_bytes % 8:
        raise ConfigError(
            f"--page-bytes {page_bytes} --pages {pages_per_slice}: a multiple of 8, and at most "
            f"{SCATTER_BYTES} bytes together"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    with mmap.mmap(-1, SCATTER_BYTES) as ring:
        seconds = _scatter(torch, device, ring, (num_slices, pages_per_slice, page_bytes))
    moved = num_slices * slice_bytes
    return {
        "device": torch.cuda.get_device_name() if cuda else "none: host memory only",
        "page_bytes": page_bytes,
        "pages": num_slices * pages_per_slice,
        "restore_gb_s": round(moved / seconds[0] / 1e9, 2),
        "save_gb_s": round(moved / seconds[1] / 1e9, 2),
    }


def _scatter(
    torch: ModuleType, device: torch.device, ring: mmap.mmap, shape: tuple[int, int, int]
) -> tuple[float, float]:
    from adp_kv.transfer.base import SliceCopy, Ticket  # noqa: PLC0415  brings torch
    from adp_kv.transfer.factory import open_mover  # noqa: PLC0415

    num_slices, pages_per_slice, page_bytes = shape
    num_pages = num_slices * pages_per_slice
    pool = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
    order = np.random.default_rng(0).permutation(num_pages).reshape(num_slices, -1)
    view = np.frombuffer(ring, dtype=np.uint8)
    slices = view.ctypes.data + np.arange(num_slices, dtype=np.int64) * pages_per_slice * page_bytes
    copy = SliceCopy(slices, pool.data_ptr() + order.astype(np.int64) * page_bytes, page_bytes)
    mover = open_mover(device)
    try:
        mover.register_ring(view.ctypes.data, len(ring))

        def finish(ticket: Ticket) -> None:
            while not ticket.done():
                time.sleep(0)

        nothing: Callable[[], None] = lambda: None  # noqa: E731
        return (
            _best("restore", lambda: finish(mover.restore(copy, mover.mark())), nothing),
            _best("save", lambda: finish(mover.save(copy, mover.mark())), nothing),
        )
    finally:
        mover.close()
        del view


def bench_card(arguments: Sequence[str], seconds: float) -> dict[str, object]:
    """Return what `python -m gateway.bench` measures with the gateway's card settings.

    Raises:
        ConfigError: The gateway is not installed here, or the card can't be opened.
    """
    command = [sys.executable, "-m", "gateway.bench", f"--seconds={seconds}", *arguments]
    progress = Progress("card")
    with subprocess.Popen(  # noqa: S603  this interpreter, arguments as a list
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        began = time.monotonic()
        try:
            while child.poll() is None:
                if time.monotonic() - began > CARD_TIMEOUT_S:
                    raise ConfigError(f"the card took longer than {CARD_TIMEOUT_S:g} s")
                progress.step((time.monotonic() - began) / (2 * seconds + 1))
                time.sleep(0.05)
        finally:
            progress.end()
            if child.poll() is None:
                child.kill()
        told, errors = child.communicate()
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise AdpError(f"gateway.bench: {last[0]}")
    result: dict[str, object] = json.loads(told)
    return result

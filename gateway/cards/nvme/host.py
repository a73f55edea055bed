"""What the card asks of the operating system, so that tests can stand in for it.

Threads. ioctl() from any thread, it blocks; a ring belongs to the thread that opened it.
Failure scope. OSError from open() and open_ring(); the rest answers -errno or None.
"""

from __future__ import annotations

import ctypes
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from adp_kv.units import KiB
from gateway.cards.uring import URing

GET_NAMESPACE_ID: Final = 0x4E40
ADMIN_COMMAND: Final = 0xC0504E47
IO_COMMAND_VEC: Final = 0xC0504E49
URING_COMMAND_VEC: Final = 0xC0484E81

_NODE: Final = re.compile(r"(?:ng|nvme)(\d+n\d+)")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_ioctl: Final = _libc.ioctl
_ioctl.restype = ctypes.c_int
_ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What the kernel's request queue of a namespace takes; None where it does not say.

    Attributes:
        max_transfer_bytes: of one command (MDTS and the transport's limit); longer is EINVAL.
        max_segments: pieces of memory of one command.
    """

    max_transfer_bytes: int | None
    max_segments: int | None


class Host(ABC):
    """Devices by path (see the module's contract)."""

    @abstractmethod
    def open(self, path: str) -> int:
        """Return a descriptor of a device node."""

    @abstractmethod
    def close(self, fd: int) -> None:
        """Close it; no command is in flight."""

    @abstractmethod
    def ioctl(self, fd: int, request: int, argument: int) -> int:
        """Run an ioctl; return its result, >= 0, or -errno."""

    @abstractmethod
    def open_ring(self, entries: int) -> URing:
        """Return a wide ring for commands."""

    @abstractmethod
    def queue_limits(self, path: str) -> QueueLimits:
        """Return the limits of the device's queue."""


class KernelHost(Host):
    """Linux."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        """Read limits below `sysfs`."""
        self._sysfs = sysfs

    @override
    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @override
    def close(self, fd: int) -> None:
        os.close(fd)

    @override
    def ioctl(self, fd: int, request: int, argument: int) -> int:
        result: int = _ioctl(fd, request, argument)
        return result if result >= 0 else -ctypes.get_errno()

    @override
    def open_ring(self, entries: int) -> URing:
        return URing(entries, wide=True)

    @override
    def queue_limits(self, path: str) -> QueueLimits:
        node = _NODE.fullmatch(Path(path).resolve().name)
        if node is None:
            return QueueLimits(None, None)
        # A KV namespace has a hidden disk of the same numbers, with a queue like any other.
        queue = self._sysfs / "block" / f"nvme{node[1]}" / "queue"
        kib = _number(queue / "max_hw_sectors_kb")
        return QueueLimits(None if kib is None else kib * KiB, _number(queue / "max_segments"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

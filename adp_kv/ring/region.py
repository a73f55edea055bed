"""The ring file in /dev/shm: created by the gateway, mapped by every rank.

    gateway   reserve()  unnamed file (O_TMPFILE), memory reserved: nothing to leave behind
              divide()   header written once the engine's geometry is known
              publish()  the file gets its name, for as long as the ranks need to open it
              withdraw() the name goes when every rank has mapped it
    rank      attach()   opens by name, checks the header, maps

So a kill -9 of any process leaves no file, except inside the short time between
publish and withdraw; sweep() removes such a file once no process holds its lock.
A new engine gets a new file: a stalled process that still writes to the old
mapping can't harm a successor.

Threads: none of its own. Failure scope: RingError before anything was touched.
The mapped memory outlives the file's name and goes with the last mapping.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import RingError
from adp_kv.ring.header import HEADER_BYTES, RingHeader, divide
from adp_kv.units import PAGE_BYTES, align_up, format_bytes

SHM_DIR = Path("/dev/shm")  # noqa: S108  the ring's home by design
NAME_PREFIX = "adp_kv-"
NAME_SUFFIX = ".ring"


def ring_path(name: str, directory: Path = SHM_DIR) -> Path:
    """Return the path of the ring called name."""
    return directory / f"{NAME_PREFIX}{name}{NAME_SUFFIX}"


def _check_room(directory: Path, needed: int) -> None:
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise RingError(
            f"{directory} has {format_bytes(free)} ({free} bytes) free, the ring needs "
            f"{format_bytes(needed)} ({needed} bytes): lower shared_memory_size, or give the "
            f"container a larger {directory} (docker --shm-size, Kubernetes emptyDir in Memory)"
        )


class RingMapping:
    """The mapped ring: addresses for those who move bytes.

    Owner: whoever attached or reserved it; close() is idempotent. Arrays and
    addresses taken from it must not be used after close().
    """

    def __init__(self, header: RingHeader, mapped: mmap.mmap) -> None:
        self.header = header
        self._mapped = mapped
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapped, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.num_bytes = len(mapped)

    @property
    def data(self) -> NDArray[np.uint8]:
        """uint8 [file bytes], header included."""
        if self._bytes is None:
            raise RingError("the ring mapping is closed")
        return self._bytes

    def read_addresses(self, slots: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return int64 [n] host addresses of read slots."""
        return self._addresses(slots, self.header.read_offset(0))

    def write_addresses(self, slots: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return int64 [n] host addresses of write slots."""
        return self._addresses(slots, self.header.write_offset(0))

    def _addresses(self, slots: NDArray[np.uint32], base_offset: int) -> NDArray[np.int64]:
        if len(slots) and int(slots.max()) >= self.header.num_slots:
            raise RingError(
                f"ring slot {int(slots.max())} is outside the ring's {self.header.num_slots}"
            )
        stride = np.int64(self.header.slot_bytes)
        return slots.astype(np.int64) * stride + (self.address + base_offset)

    def close(self) -> None:
        """Unmap. Whoever still holds `data` keeps the memory alive, not this object."""
        self._bytes = None
        try:
            self._mapped.close()
        except BufferError:
            # An array over the mapping is still referenced somewhere; the kernel frees
            # the memory when that reference goes.
            return


class RingFile:
    """The gateway's side of a ring: reserve, divide, publish, withdraw.

    Args:
        name: makes the path /dev/shm/adp_kv-<name>.ring.
        shared_memory_size: bytes of slots, both directions.

    Raises:
        RingError: /dev/shm is missing or has too little room.
    """

    def __init__(self, name: str, shared_memory_size: int, directory: Path = SHM_DIR) -> None:
        self.path = ring_path(name, directory)
        self.shared_memory_size = shared_memory_size
        self.generation = secrets.randbits(63) | 1
        self.mapping: RingMapping | None = None
        self._published = False
        num_bytes = HEADER_BYTES + align_up(shared_memory_size, PAGE_BYTES)
        if not directory.is_dir():
            raise RingError(f"{directory} does not exist: mount a tmpfs there")
        _check_room(directory, num_bytes)
        try:
            self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RingError(f"can't make a file in {directory}: {error.strerror}") from error
        try:
            # Reserves the pages now: a full tmpfs shows here and not as SIGBUS in a copy.
            os.posix_fallocate(self._fd, 0, num_bytes)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            _check_room(directory, num_bytes)
            raise RingError(f"can't reserve {num_bytes} bytes in {directory}: {error}") from error

    def divide(self, io_size: int) -> RingMapping:
        """Cut the ring into slots for objects of io_size bytes and map it.

        Raises:
            RingError: No slot fits.
        """
        header = divide(self.shared_memory_size, io_size, self.generation)
        os.pwrite(self._fd, header.pack(), 0)
        self.mapping = RingMapping(header, mmap.mmap(self._fd, header.file_bytes))
        return self.mapping

    def publish(self) -> None:
        """Give the file its name.

        Raises:
            RingError: A living gateway uses the name.
        """
        sweep(self.path)
        try:
            # src_dir_fd makes os.link follow the link in /proc (linkat, AT_SYMLINK_FOLLOW);
            # an absolute source ignores the folder itself.
            os.link(f"/proc/self/fd/{self._fd}", self.path, src_dir_fd=self._fd)
        except FileExistsError as error:
            raise RingError(
                f"{self.path} belongs to a running gateway: set another ring_name or port"
            ) from error
        self._published = True

    def withdraw(self) -> None:
        """Take the name away; mappings stay valid."""
        if self._published:
            if _is_at(self._fd, self.path):  # else somebody removed it, and it may be a successor's
                self.path.unlink(missing_ok=True)
            self._published = False

    def close(self) -> None:
        """Withdraw, unmap and free the memory as soon as no rank maps it; idempotent."""
        self.withdraw()
        if self.mapping is not None:
            self.mapping.close()
            self.mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _is_at(fd: int, path: Path) -> bool:
    """Return whether path names the open file."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def sweep(path: Path) -> bool:
    """Remove a ring file that no living gateway holds; return whether one was removed.

    Whoever holds the lock of the file at path alone may remove it, so that it can't be
    replaced between the look and the removal.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(fd, path):
            return False
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def attach(path: str | Path, generation: int) -> RingMapping:
    """Map the ring that the gateway named.

    Args:
        path: where the gateway said it is.
        generation: which ring the gateway meant.

    Raises:
        RingError: It is absent (the engine sees another /dev/shm), another user's,
            too small, damaged, or of another generation.
    """
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise RingError(
            f"can't open the ring {path}: {error.strerror}; the engine and the gateway must share "
            f"one {path.parent} and run as the same user"
        ) from error
    try:
        stat = os.fstat(fd)
        if stat.st_uid != os.geteuid():
            raise RingError(f"{path} belongs to uid {stat.st_uid}, not to this process's user")
        if stat.st_mode & 0o077:
            raise RingError(f"{path} can be opened by other users: not a ring of this release")
        header = RingHeader.unpack(os.pread(fd, HEADER_BYTES, 0))
        if header.generation != generation:
            raise RingError(
                f"{path} is generation {header.generation:x}, the gateway speaks of "
                f"{generation:x}: a stale file; restart the gateway and the engine"
            )
        if stat.st_size < header.file_bytes:
            raise RingError(
                f"{path} has {stat.st_size} bytes, its header needs {header.file_bytes}"
            )
        return RingMapping(header, mmap.mmap(fd, header.file_bytes))
    except (OSError, ValueError) as error:
        raise RingError(f"can't map the ring {path}: {error}") from error
    finally:
        os.close(fd)

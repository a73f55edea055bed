"""An io_uring whose queues are numpy views: entries are filled and reaped by the column.

    append(rows) ──► submission queue ──enter()──► kernel ──► completion queue ──► reap()

Byte map. Submission and completion entries are SQE (64 bytes) and CQE (16 bytes) as in
<linux/io_uring.h>; the rings' indices are uint32 that wrap. A wide ring has WIDE_SQE (128
bytes: room for the command of a driver) and WIDE_CQE (32 bytes: 64-bit results).

Memory order. The kernel reads the submission tail after the entries and writes the
completion tail after the entries; x86-64 keeps stores in order among stores and loads
among loads, so plain numpy accesses suffice. Elsewhere they would need barriers, so
`probe` refuses other machines and callers use threads there.

Threads. Everything but `probe` is called by the one thread that made the ring
(SINGLE_ISSUER with DEFER_TASKRUN: completions run inside enter()).
Failure scope. OSError from the constructor: no io_uring here; from register_buffers:
go on without; from enter: the ring is lost. What an entry met is its CQE's res, -errno.
It must not know slabs, keys or batches.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.units import GiB

OP_NOP: Final = 0
OP_READ_FIXED: Final = 4
OP_WRITE_FIXED: Final = 5
OP_READ: Final = 22
OP_WRITE: Final = 23
OP_URING_CMD: Final = 46
"""A command to the file's driver; the code of the command takes the place of `offset`."""

MAX_BUFFER_BYTES: Final = GiB
"""The kernel's limit for one registered buffer."""

SQE: Final = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u4"),
        ("op_flags", "<u4"),
        ("user_data", "<u8"),
        ("buffer", "<u2"),
        ("personality", "<u2"),
        ("splice_fd", "<i4"),
        ("address3", "<u8"),
        ("pad", "<u8"),
    ]
)
PAYLOAD_BYTES: Final = 80
WIDE_SQE: Final = np.dtype(
    [(name, SQE[name]) for name in SQE.names or () if name not in ("address3", "pad")]
    + [("payload", "u1", (PAYLOAD_BYTES,))]
)
CQE: Final = np.dtype([("user_data", "<u8"), ("res", "<i4"), ("flags", "<u4")])
WIDE_CQE: Final = np.dtype([*((n, CQE[n]) for n in CQE.names or ()), ("extra", "<u8", (2,))])

EntryArray: TypeAlias = NDArray[np.void]
"""SQE or WIDE_SQE [n]."""

CompletionArray: TypeAlias = NDArray[np.void]
"""CQE or WIDE_CQE [n]."""

_SYS_SETUP: Final = 425
_SYS_ENTER: Final = 426
_SYS_REGISTER: Final = 427
_SETUP_COOP_TASKRUN: Final = 1 << 8
_SETUP_SQE128: Final = 1 << 10
_SETUP_CQE32: Final = 1 << 11
_SETUP_SINGLE_ISSUER: Final = 1 << 12
_SETUP_DEFER_TASKRUN: Final = 1 << 13
_FEATURE_SINGLE_MMAP: Final = 1 << 0
_ENTER_GETEVENTS: Final = 1
_REGISTER_BUFFERS: Final = 0
_UNREGISTER_BUFFERS: Final = 1
_SQES_OFFSET: Final = 0x10000000
_U32: Final = np.dtype("<u4")
_WRAP: Final = 0xFFFFFFFF

# Older kernels know fewer of these; each step down costs a little CPU, nothing else.
_SETUP_FLAGS: Final = (_SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN, _SETUP_COOP_TASKRUN, 0)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_syscall: Final = _libc.syscall
_syscall.restype = ctypes.c_long

Column: TypeAlias = NDArray[Any] | int
"""One value for all rows, or one a row."""


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _setup(entries: int, format_flags: int) -> tuple[int, list[int]]:
    """Return the ring's descriptor and io_uring_params as 30 words."""
    for flags in _SETUP_FLAGS:
        params = (ctypes.c_uint32 * 30)()
        params[2] = flags | format_flags
        try:
            descriptor = _check(_syscall(_SYS_SETUP, entries, ctypes.byref(params)))
        except OSError as error:
            if error.errno != errno.EINVAL or flags == 0:
                raise
            continue
        return descriptor, list(params)
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class URing:
    """One ring (see the module's contract)."""

    def __init__(self, entries: int, *, wide: bool = False) -> None:
        """Set up a ring of `entries` rows, rounded up to a power of two.

        Args:
            entries: rows.
            wide: for commands of drivers (Linux 5.19).

        Raises:
            OSError: ENOSYS (kernel without it), EPERM (sysctl or seccomp forbids it),
                ENOMEM (RLIMIT_MEMLOCK on old kernels), ENOTSUP (not x86-64, too old) or
                EINVAL (too old for a wide one).
        """
        if platform.machine() not in ("x86_64", "AMD64"):
            raise OSError(errno.ENOTSUP, "io_uring from numpy needs x86-64's memory order")
        self._sqe, self._cqe = (WIDE_SQE, WIDE_CQE) if wide else (SQE, CQE)
        self._fd, params = _setup(entries, _SETUP_SQE128 | _SETUP_CQE32 if wide else 0)
        try:
            self._map(params)
        except BaseException:
            os.close(self._fd)
            raise
        self.in_flight = 0
        self._unsubmitted = 0
        self._registered = False

    def _map(self, params: list[int]) -> None:
        if not params[5] & _FEATURE_SINGLE_MMAP:
            raise OSError(errno.ENOTSUP, "io_uring here is older than Linux 5.4")
        num_sqes, num_cqes = params[0], params[1]
        sq, cq = params[10:20], params[20:30]
        size = max(sq[6] + num_sqes * _U32.itemsize, cq[5] + num_cqes * self._cqe.itemsize)
        kind, access = mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        rings = mmap.mmap(self._fd, size, kind, access)
        entries = mmap.mmap(
            self._fd, num_sqes * self._sqe.itemsize, kind, access, offset=_SQES_OFFSET
        )

        def words(offset: int, count: int = 1) -> NDArray[np.uint32]:
            return np.frombuffer(rings, _U32, count, offset)

        self._sq_tail = words(sq[1])
        self._cq_head, self._cq_tail = words(cq[0]), words(cq[1])
        words(sq[6], num_sqes)[:] = np.arange(num_sqes, dtype=_U32)
        self._sqes: NDArray[np.void] = np.frombuffer(entries, self._sqe, num_sqes)
        self._cqes: NDArray[np.void] = np.frombuffer(rings, self._cqe, num_cqes, cq[5])

    @property
    def entries(self) -> int:
        """Rows of the submission queue; at most this many may be in flight."""
        return self._sqes.size

    @property
    def not_started(self) -> NDArray[np.uint64]:
        """The user_data of entries that were queued, but that no enter() has started: [n]."""
        places = int(self._sq_tail[0]) - np.arange(1, self._unsubmitted + 1)
        names: NDArray[np.uint64] = self._sqes["user_data"][places & (self.entries - 1)]
        return names

    def register_buffers(self, buffers: Sequence[tuple[int, int]]) -> None:
        """Pin memory, so that *_FIXED operations skip the pinning of each.

        Nothing may be in flight. Replaces what was registered.

        Args:
            buffers: (address, bytes) of each, at most MAX_BUFFER_BYTES; row i is buffer i.

        Raises:
            OSError: ENOMEM (RLIMIT_MEMLOCK), EFAULT, ...; nothing is registered then.
        """
        self.unregister_buffers()
        iovecs = np.array(buffers, dtype=np.uint64).reshape(-1, 2)
        _check(
            _syscall(
                _SYS_REGISTER,
                self._fd,
                _REGISTER_BUFFERS,
                ctypes.c_void_p(iovecs.ctypes.data),
                len(iovecs),
            )
        )
        self._registered = True

    def unregister_buffers(self) -> None:
        """Unpin what was registered; nothing may be in flight."""
        if self._registered:
            _check(_syscall(_SYS_REGISTER, self._fd, _UNREGISTER_BUFFERS, None, 0))
            self._registered = False

    def append(self, rows: EntryArray) -> None:
        """Queue n entries that transfers() or commands() made; they start at the next enter().

        Raises:
            ValueError: in_flight + n would pass `entries`; nothing was queued.
        """
        n = len(rows)
        if self.in_flight + n > self.entries:
            raise ValueError(f"{n} entries on top of {self.in_flight} pass {self.entries}")
        tail = int(self._sq_tail[0])
        # Whole entries, zeros included: the queue's rows are reused.
        start = tail & (self.entries - 1)
        head = self.entries - start
        self._sqes[start : start + n] = rows[:head]
        if n > head:
            self._sqes[: n - head] = rows[head:]
        self._sq_tail[0] = (tail + n) & _WRAP
        self.in_flight += n
        self._unsubmitted += n

    def transfers(
        self,
        opcode: Column,
        fd: Column,
        offsets: NDArray[np.uint64],
        addresses: NDArray[np.uint64],
        lengths: Column,
        user_data: NDArray[np.uint64],
        buffers: Column = 0,
    ) -> EntryArray:
        """Return n entries.

        Args:
            opcode: OP_* of all or of each row.
            fd: file descriptor of all or of each row.
            offsets: uint64 [n], bytes into the file.
            addresses: uint64 [n], host memory.
            lengths: bytes, of all or of each row.
            user_data: uint64 [n], handed back in the completion.
            buffers: registered buffer that holds the memory, for *_FIXED rows.
        """
        rows = np.zeros(len(user_data), dtype=self._sqe)
        rows["opcode"] = opcode
        rows["fd"] = fd
        rows["offset"] = offsets
        rows["address"] = addresses
        rows["length"] = lengths
        rows["user_data"] = user_data
        rows["buffer"] = buffers
        return rows

    def commands(
        self,
        code: int,
        fds: NDArray[np.int32],
        payloads: NDArray[np.uint8],
        user_data: NDArray[np.uint64],
    ) -> EntryArray:
        """Return n entries with commands to the drivers of files; wide rings only.

        Args:
            code: the driver's number of the command.
            fds: int32 [n].
            payloads: uint8 [n, <= PAYLOAD_BYTES], the command itself.
            user_data: uint64 [n], handed back in the completion.
        """
        rows = np.zeros(len(user_data), dtype=self._sqe)
        rows["opcode"] = OP_URING_CMD
        rows["fd"] = fds
        rows["offset"] = code
        rows["payload"][:, : payloads.shape[1]] = payloads
        rows["user_data"] = user_data
        return rows

    def enter(self, min_complete: int) -> None:
        """Start what was queued and wait for `min_complete` completions (GIL released).

        Raises:
            OSError: The kernel refused; the ring should be given up.
        """
        while True:
            result = _syscall(
                _SYS_ENTER, self._fd, self._unsubmitted, min_complete, _ENTER_GETEVENTS, None, 0
            )
            if result >= 0:
                self._unsubmitted -= result
                if self._unsubmitted == 0:
                    return
            elif ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                _check(result)

    def reap(self) -> CompletionArray:
        """Return the completions that are there, a copy; n >= 0."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        n = (tail - head) & _WRAP
        start = head & (self._cqes.size - 1)
        first = self._cqes[start : start + n]
        if len(first) == n:
            taken = first.copy()
        else:
            taken = np.concatenate([first, self._cqes[: n - len(first)]])
        self._cq_head[0] = tail
        self.in_flight -= n
        return taken

    def close(self) -> None:
        """Give the ring back; nothing may be in flight. The mappings go with the object."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def probe() -> str | None:
    """Return None if io_uring works here, otherwise why it does not."""
    try:
        ring = URing(4)
    except OSError as error:
        return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
    try:
        one = np.ones(1, dtype=np.uint64)
        ring.append(ring.transfers(OP_NOP, -1, one, one, 0, one))
        ring.enter(1)
        done = ring.reap()
    except OSError as error:
        return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
    finally:
        ring.close()
    return None if len(done) == 1 and int(done["res"][0]) == 0 else "NOP did not complete"

"""A key-value device in memory that decodes the very commands the card sends.

    NvmeKvCard ─► executor ─► SoftHost.ioctl / SoftRing.enter ─► SoftDevice.execute(72 bytes)

SoftRing is the real ring with a kernel of Python behind it: entries are packed and reaped
by the code that serves Linux. The device keeps to the rules of its dialect (stricter than
a real one: what it does not expect is an error), and to the kernel's about memory: too
long a transfer is EINVAL, and pieces with a gap within a page are counted as bounced,
since the kernel would copy them.
"""

import ctypes
import errno
import itertools
import os
import random
import select
import struct
import threading
import time

import numpy as np

from gateway.cards.nvme.host import (
    ADMIN_COMMAND,
    GET_NAMESPACE_ID,
    IO_COMMAND_VEC,
    URING_COMMAND_VEC,
    Host,
    QueueLimits,
)
from gateway.cards.uring import OP_READ, OP_URING_CMD, WIDE_CQE, WIDE_SQE, URing

PAGE = 4096
STORE, RETRIEVE, LIST, DELETE, EXIST = 0x01, 0x02, 0x06, 0x10, 0x14
NO_RETRY = 0x4000
COMMAND = struct.Struct("<BBHIIIQQII6III")


class RefusedError(Exception):
    """Ends a command with a result."""


class SoftDevice:
    """One namespace.

    Attributes:
        dialect: "standard" or "block".
        values: what is stored, by key.
        commands: (opcode, key, option) in the order of execution.
        bounced: commands whose memory the kernel would have copied.
        faults: (opcode, result, count) lists; a result is given instead of running.
        before: called with (opcode, key) before a command runs, no lock held.
        lies: a RETRIEVE answers success and moves nothing.
        refuses_short_buffers: a RETRIEVE of a longer value is an error instead of its start.
    """

    value_max = 512 * 1024
    key_max = 16
    max_transfer = 512 * 1024
    max_segments = 127
    slots = 1 << 20
    nsid = 7
    is_kv = True
    fails_absent_delete = False
    delay_s = 0.0
    before = None
    lies = False
    refuses_short_buffers = False

    def __init__(self, dialect="standard", **changes):
        self.dialect = dialect
        self.values, self.commands, self.faults = {}, [], []
        self.bounced = 0
        self._roomy = set()
        self._lock = threading.Lock()
        for name, value in changes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def fail(self, opcode, result, count=1):
        self.faults.append([opcode, result, count])

    def execute(self, raw):
        """Run a command of 72 bytes; return (result, completion value)."""
        (opcode, flags, _, nsid, cdw2, cdw3, _, address, _, count, *rest) = COMMAND.unpack(raw)
        cdw10, cdw11, cdw12, _, cdw14, cdw15, timeout_ms, _ = rest
        assert timeout_ms > 0
        assert flags == 0
        key = struct.pack("<IIII", cdw2, cdw3, cdw14, cdw15)
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.before is not None:
            self.before(opcode, key)
        with self._lock:
            self.commands.append((opcode, key, cdw11 >> 8))
            try:
                self._injected(opcode)
                pieces = _pieces(address, count)
                self._kernel_check(pieces)
                _require(nsid == self.nsid, 0x0B)
                if not self.is_kv:  # blocks that go far enough
                    _require(opcode in (STORE, RETRIEVE), 0x01)
                    return 0, 0
                _require(opcode == LIST or 1 <= cdw11 & 0xFF <= self.key_max, 0x86)
                if self.dialect == "block":
                    _require(opcode in (STORE, RETRIEVE, DELETE), 0x01)
                    _require(cdw14 >> 24 == 1, 0x02)
                    _require(not count or _whole_blocks(cdw10, cdw12, pieces), 0x02)
                    _require(opcode != STORE or cdw11 >> 8 == 2, 0x02)
                return self._run(opcode, key[: cdw11 & 0xFF], cdw10, cdw11 >> 8, pieces)
            except RefusedError as refused:
                return refused.args[0], 0

    def _injected(self, opcode):
        for fault in self.faults:
            if fault[0] == opcode and fault[2] > 0:
                fault[2] -= 1
                raise RefusedError(fault[1])

    def _kernel_check(self, pieces):
        pages = sum((a + n - 1) // PAGE - a // PAGE + 1 for a, n in pieces)
        if sum(n for _, n in pieces) > self.max_transfer or pages > self.max_segments:
            raise RefusedError(-errno.EINVAL)
        gaps = [(a | (b + n)) % PAGE for (b, n), (a, _) in itertools.pairwise(pieces)]
        if any(gaps) or any((a | n) % 8 for a, n in pieces):
            self.bounced += 1

    def _run(self, opcode, key, size, option, pieces):
        runs = {
            STORE: lambda: self._store(key, size, option, pieces),
            RETRIEVE: lambda: self._retrieve(key, size, pieces),
            EXIST: lambda: 0 if key in self.values else 0x87,
            DELETE: lambda: self._delete(key),
            LIST: lambda: self._list(key, size, pieces),
        }
        _require(opcode in runs, 0x01)
        result = runs[opcode]()
        reports = opcode == RETRIEVE and result == 0
        return result, len(self.values[key]) if reports else 0

    def _retrieve(self, key, size, pieces):
        if key not in self.values:
            return 0x87
        _require(not self.refuses_short_buffers or len(self.values[key]) <= size, 0x85)
        if not self.lies:
            _scatter(pieces, self.values[key][:size])
        return 0

    def _delete(self, key):
        self._roomy.discard(key)
        gone = self.values.pop(key, None) is None
        return 0x87 if gone and self.fails_absent_delete else 0

    def _store(self, key, size, option, pieces):
        if size > self.value_max or sum(n for _, n in pieces) < size:
            return 0x85 | NO_RETRY
        if option & 2 and key in self.values:
            return 0x89
        if option & 1 and key not in self.values:
            return 0x87
        value = b"".join(ctypes.string_at(a, n) for a, n in pieces)[:size]
        if _takes_room(value):
            if len(self._roomy - {key}) >= self.slots:
                return 0x81
            self._roomy.add(key)
        else:
            self._roomy.discard(key)
        self.values[key] = value
        return 0

    def _list(self, first, size, pieces):
        out, count = b"", 0
        for key in sorted(self.values):
            if key < first:
                continue
            entry = struct.pack("<H", len(key)) + key
            entry += b"\0" * (-len(entry) % 4)
            if 4 + len(out) + len(entry) > size:
                break
            out, count = out + entry, count + 1
        _scatter(pieces, struct.pack("<I", count) + out)
        return 0

    def identify(self, cns, csi):
        """Return a page of Identify data, None where the device refuses."""
        page = bytearray(PAGE)
        if cns == 1:
            page[77] = (self.max_transfer // PAGE).bit_length() - 1
        elif cns == 5 and csi == 1 and self.is_kv and self.dialect == "standard":
            used = sum(len(value) for value in self.values.values())
            struct.pack_into("<QQQ", page, 0, 1 << 30, 0, used)
            struct.pack_into("<HBBII", page, 72, self.key_max, 0, 0, self.value_max, 0)
        else:
            return None
        return bytes(page)

    def damage(self, offset, mask=0x10):
        """Flip bits of every stored value."""
        for key, value in self.values.items():
            changed = bytearray(value)
            changed[offset] ^= mask
            self.values[key] = bytes(changed)


def _require(holds, code):
    if not holds:
        raise RefusedError(code | NO_RETRY)


def _takes_room(value):
    """Return false for a header and zeros: the device compresses, and keeps it beside the key."""
    return any(value[16:])


def _pieces(address, count):
    words = np.frombuffer(ctypes.string_at(address, count * 16), dtype=np.uint64) if count else ()
    return [(int(words[i]), int(words[i + 1])) for i in range(0, len(words), 2)]


def _whole_blocks(cdw10, cdw12, pieces):
    return cdw10 % PAGE == 0 and (cdw12 + 1) * 512 == cdw10 and sum(n for _, n in pieces) == cdw10


def _scatter(pieces, value):
    for address, length in pieces:
        part, value = value[:length], value[length:]
        ctypes.memmove(address, part, len(part))


class SoftHost(Host):
    """Devices by path.

    Attributes:
        refuses_open: errno by path.
        answers: result by ioctl number, instead of running it.
        rings: None works, or an errno that open_ring() raises, or -errno of each command.
        sysfs: whether the queue's limits can be read.
    """

    def __init__(self, devices):
        self.devices = dict(devices)
        self.refuses_open, self.answers = {}, {}
        self.rings = None
        self.sysfs = True
        self.open_fds = {}
        self.made_rings = []
        self._next_fd = 1000

    def open(self, path):
        number = self.refuses_open.get(path, 0 if path in self.devices else errno.ENOENT)
        if number:
            raise OSError(number, os.strerror(number))
        self._next_fd += 1
        self.open_fds[self._next_fd] = self.devices[path]
        return self._next_fd

    def close(self, fd):
        del self.open_fds[fd]

    def ioctl(self, fd, request, argument):
        if request in self.answers:
            return self.answers[request]
        device = self.open_fds[fd]
        if request == GET_NAMESPACE_ID:
            return device.nsid
        raw = ctypes.string_at(argument, 72)
        if request == ADMIN_COMMAND:
            cdw10, cdw11 = struct.unpack_from("<II", raw, 40)
            page = device.identify(cdw10, cdw11 >> 24)
            if page is None:
                return 0x02 | NO_RETRY
            address, _, size = struct.unpack_from("<QII", raw, 24)
            ctypes.memmove(address, page, size)
            return 0
        assert request == IO_COMMAND_VEC
        result, value = device.execute(raw)
        ctypes.memmove(argument + 72, value.to_bytes(8, "little"), 8)
        return result

    def open_ring(self, entries):
        if self.rings is not None and self.rings > 0:
            raise OSError(self.rings, os.strerror(self.rings))
        self.made_rings.append(SoftRing(entries, self))
        return self.made_rings[-1]

    def queue_limits(self, path):
        if not self.sysfs:
            return QueueLimits(None, None)
        device = self.devices[path]
        return QueueLimits(device.max_transfer, device.max_segments)


class SoftRing(URing):
    """A wide ring whose kernel is enter(): entries run in random order."""

    def __init__(self, entries, host):
        size = 1 << (entries - 1).bit_length()
        self._host = host
        self._sqe, self._cqe, self._fd = WIDE_SQE, WIDE_CQE, -1
        self._sqes, self._cqes = np.zeros(size, WIDE_SQE), np.zeros(2 * size, WIDE_CQE)
        self._sq_tail, self._cq_head, self._cq_tail = np.zeros((3, 1), np.uint32)
        self.in_flight = self._unsubmitted = 0
        self._registered = False
        self._head = 0
        self._wake = None
        self._rng = random.Random(0)

    def enter(self, min_complete):
        before = int(self._cq_tail[0]) - int(self._cq_head[0])
        entries = []
        for _ in range(self._unsubmitted):
            entries.append(self._sqes[self._head & (self._sqes.size - 1)].copy())
            self._head += 1
        self._unsubmitted = 0
        self._rng.shuffle(entries)
        for entry in entries:
            if entry["opcode"] == OP_READ:
                self._wake = entry
            else:
                self._command(entry)
        self._poll_wake(0)
        while int(self._cq_tail[0]) - int(self._cq_head[0]) - before < min_complete:
            self._poll_wake(None)

    def _command(self, entry):
        raw = entry.tobytes()
        assert len(raw) == 128
        assert raw[0] == OP_URING_CMD
        assert struct.unpack_from("<I", raw, 8)[0] == URING_COMMAND_VEC
        if self._host.rings is not None:
            self._complete(entry, self._host.rings, 0)
            return
        device = self._host.open_fds[int(entry["fd"])]
        self._complete(entry, *device.execute(raw[48:120]))

    def _poll_wake(self, timeout_s):
        if self._wake is None:
            return
        entry = self._wake
        fd = int(entry["fd"])
        if select.select([fd], [], [], timeout_s)[0]:
            ctypes.memmove(int(entry["address"]), os.read(fd, 8), 8)
            self._wake = None
            self._complete(entry, 8, 0)

    def _complete(self, entry, result, value):
        place = int(self._cq_tail[0]) & (self._cqes.size - 1)
        self._cqes[place] = (entry["user_data"], result, 0, (value, 0))
        self._cq_tail[0] += 1

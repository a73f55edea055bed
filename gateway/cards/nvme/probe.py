"""Opening a namespace: is it one of key-values, may we use it, and what does it take.

    open ─► namespace id ─► Identify (CNS 05h, CSI 01h) ─► a harmless command ─► limits

The longest value is the least of: the device's value maximum (Identify), the dialect's
limit, the longest transfer of the kernel's queue (MDTS), and a page less than its segments
hold; less the 16-byte header, rounded down to pages.

Threads: the caller's; everything here blocks.
Failure scope. CardError that names the device and the remedy; nothing stays open then.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.units import PAGE_BYTES, KiB, MiB
from adp_kv.wire.keys import KEY_BYTES, KeyArray
from gateway.cards.nvme.commands import COMMAND, Buffers, CommandArray, CommandBuilder, Dialect
from gateway.cards.nvme.frames import HEADER_BYTES, Frame
from gateway.cards.nvme.host import ADMIN_COMMAND, GET_NAMESPACE_ID, IO_COMMAND_VEC, Host
from gateway.cards.nvme.status import Code, codes, describe

_logger: Final = logging.getLogger(__name__)

_IDENTIFY: Final = 0x06
_CNS_NAMESPACE: Final = 0x05
_CNS_CONTROLLER: Final = 0x01
_CSI_SHIFT: Final = 24
_CSI_KEY_VALUE: Final = 1
_MDTS_OFFSET: Final = 77
_MAX_MDTS: Final = 20
_UNLIMITED: Final = 64 * MiB
_SAFE_TRANSFER: Final = 128 * KiB
_LIST_BYTES: Final = 64 * KiB
_MIN_LISTED: Final = 2  # the key that a page starts with is the last one of the page before
_ARGUMENT_BYTES: Final = COMMAND.itemsize + 8

_OPEN_HINTS: Final = {
    errno.ENOENT: "no such node; a key-value namespace has a /dev/ngXnY node from Linux 6.0 on, "
    "and only where its controller implements Identify CNS 08h (older kernels log 'unknown csi 1')",
    errno.EACCES: "run the gateway as a user who may open it, with CAP_SYS_ADMIN",
    errno.EPERM: "give the gateway CAP_SYS_ADMIN",
    errno.EBUSY: "another program has the device; a namespace serves one",
}


@dataclass(frozen=True, slots=True)
class Namespace:
    """An open namespace.

    Attributes:
        path: as in the settings.
        fd: descriptor.
        nsid: namespace id.
        max_value_bytes: longest value, header not counted; a multiple of a page.
        size_bytes: of the namespace, 0 where unknown.
        used_bytes: of it, at open.
    """

    path: str
    fd: int
    nsid: int
    max_value_bytes: int
    size_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class _Identity:
    key_max: int
    value_max: int
    size_bytes: int
    used_bytes: int


def open_namespace(host: Host, path: str, builder: CommandBuilder) -> Namespace:
    """Open and examine a namespace.

    Raises:
        CardError: It can't serve; the message says why.
    """
    try:
        fd = host.open(path)
    except OSError as error:
        hint = _OPEN_HINTS.get(error.errno or 0, "")
        raise CardError(f"devices: {path}: {error.strerror}; {hint}".rstrip("; ")) from error
    try:
        return _examine(host, path, fd, builder)
    except BaseException:
        host.close(fd)
        raise


def _examine(host: Host, path: str, fd: int, builder: CommandBuilder) -> Namespace:
    nsid = host.ioctl(fd, GET_NAMESPACE_ID, 0)
    if nsid < 0:
        raise CardError(
            f"devices: {path}: {errno.errorcode.get(-nsid, nsid)}: this is no NVMe namespace; "
            "name a /dev/ngXnY node"
        )
    dialect = builder.dialect
    identity = _identify(host, path, fd, nsid, dialect)
    if identity.key_max < KEY_BYTES:
        raise CardError(
            f"devices: {path}: keys of at most {identity.key_max} bytes, {KEY_BYTES} are needed"
        )
    _try_command(host, path, fd, nsid, builder)
    limit = _limit(host, path, fd, dialect, identity)
    if limit < PAGE_BYTES:
        raise CardError(f"devices: {path}: values of at most {limit} bytes are too short to use")
    return Namespace(path, fd, nsid, limit, identity.size_bytes, identity.used_bytes)


def _limit(host: Host, path: str, fd: int, dialect: Dialect, identity: _Identity) -> int:
    queue = host.queue_limits(path)
    transfer = queue.max_transfer_bytes or _mdts(host, fd)
    if transfer is None:
        transfer = _SAFE_TRANSFER
        _logger.warning(
            "%s: neither sysfs nor Identify tell the longest transfer; taking %d bytes",
            path,
            transfer,
        )
    limits = [min(identity.value_max, transfer) - HEADER_BYTES]
    if dialect.max_transfer_bytes:
        limits.append(dialect.max_transfer_bytes - HEADER_BYTES)
    if queue.max_segments:
        # Header and padding take a segment each, the value one a page at worst.
        limits.append((queue.max_segments - 2) * PAGE_BYTES)
    longest = min(limits)
    return longest - longest % PAGE_BYTES


def read_usage(host: Host, namespace: Namespace) -> int:
    """Return the bytes in use, or what was known before where the device does not say."""
    page, _ = _run_identify(host, namespace.fd, namespace.nsid, _CNS_NAMESPACE)
    return namespace.used_bytes if page is None else int(page[16:24].view("<u8")[0])


def _identify(host: Host, path: str, fd: int, nsid: int, dialect: Dialect) -> _Identity:
    page, result = _run_identify(host, fd, nsid, _CNS_NAMESPACE)
    if page is not None:
        value_max = int(page[76:80].view("<u4")[0])
        if value_max > 0:
            return _Identity(
                key_max=int(page[72:74].view("<u2")[0]),
                value_max=value_max,
                size_bytes=int(page[0:8].view("<u8")[0]),
                used_bytes=int(page[16:24].view("<u8")[0]),
            )
    if result in (-errno.EACCES, -errno.EPERM):
        raise CardError(f"devices: {path}: Identify is not permitted: needs CAP_SYS_ADMIN")
    if dialect.has_identify:
        why = "no value formats" if result == 0 else describe(result)
        raise CardError(
            f"devices: {path}: no key-value namespace (Identify CNS 05h, CSI 01h: {why}); "
            "for a card that takes KV commands on a block namespace set dialect=block"
        )
    return _Identity(KEY_BYTES, dialect.max_transfer_bytes or _SAFE_TRANSFER, 0, 0)


def _mdts(host: Host, fd: int) -> int | None:
    page, _ = _run_identify(host, fd, 0, _CNS_CONTROLLER)
    shift = int(page[_MDTS_OFFSET]) if page is not None else 0
    if page is None:
        return None
    return PAGE_BYTES << shift if 0 < shift <= _MAX_MDTS else _UNLIMITED


def _run_identify(host: Host, fd: int, nsid: int, cns: int) -> tuple[NDArray[np.uint8] | None, int]:
    page: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), dtype=np.uint8)
    command = np.zeros(1, dtype=COMMAND)
    command["opcode"] = _IDENTIFY
    command["nsid"] = nsid
    command["address"] = page.ctypes.data
    command["vectors"] = PAGE_BYTES  # not vectored: this is the buffer's size
    command["cdw10"] = cns
    if cns == _CNS_NAMESPACE:
        command["cdw11"] = _CSI_KEY_VALUE << _CSI_SHIFT
    result = _call(host, fd, ADMIN_COMMAND, command)
    return (page if result == 0 else None), result


def _call(host: Host, fd: int, request: int, command: CommandArray) -> int:
    argument = ctypes.create_string_buffer(command.tobytes(), _ARGUMENT_BYTES)
    return host.ioctl(fd, request, ctypes.addressof(argument))


def harmless_commands(
    nsids: NDArray[np.uint32], builder: CommandBuilder, frame: Frame
) -> CommandArray:
    """Return one command a namespace that changes nothing: does a key exist."""
    keys = np.zeros((len(nsids), 2), dtype=np.uint64)
    if builder.dialect.has_exist:
        return builder.exist(nsids, keys)
    rows = np.arange(len(nsids))
    empty = np.zeros(len(nsids), dtype=np.uint32)
    transfers = builder.transfer_sizes(empty + np.uint32(HEADER_BYTES))
    where = np.zeros(len(nsids), dtype=np.uint64)
    return builder.retrieve(nsids, keys, frame.aim(rows, where, empty, transfers, storing=False))


def _try_command(host: Host, path: str, fd: int, nsid: int, builder: CommandBuilder) -> None:
    frame = Frame(1)
    command = harmless_commands(np.array([nsid], dtype=np.uint32), builder, frame)
    result = _call(host, fd, IO_COMMAND_VEC, command)
    code = int(codes(np.array([result], dtype=np.int32))[0])
    if code == Code.KEY_ABSENT or (code == 0 and builder.dialect.has_exist):
        return
    # An ordinary SSD takes a RETRIEVE for a read of blocks: only a header of ours proves better.
    if code == 0 and frame.is_whole(np.zeros(1, dtype=np.int64)).all():
        return
    hints = {
        -errno.EACCES: "needs CAP_SYS_ADMIN (before Linux 6.2 always)",
        -errno.EPERM: "needs CAP_SYS_ADMIN (before Linux 6.2 always)",
        -errno.ENOTTY: "vectored passthrough needs Linux 5.18",
        int(Code.INVALID_OPCODE): f"the device does not know the {builder.dialect.name} dialect",
        int(Code.INVALID_FIELD): f"the device does not know the {builder.dialect.name} dialect",
    }
    hint = hints.get(code, "this is no key-value device")
    answer = "it answers a read of blocks" if code == 0 else describe(result)
    raise CardError(f"devices: {path}: {answer}: {hint}")


def count_keys(
    host: Host, namespace: Namespace, builder: CommandBuilder, deadline: float
) -> tuple[int, bool]:
    """Return how many keys a namespace has, and whether that is all of them.

    Args:
        host: of the device.
        namespace: open.
        builder: of commands.
        deadline: on time.monotonic(), after which it stops with what it has.
    """
    buffer: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, _LIST_BYTES), dtype=np.uint8)
    vector = np.array([[buffer.ctypes.data, _LIST_BYTES]], dtype=np.uint64)
    data = Buffers(
        np.array([vector.ctypes.data], dtype=np.uint64),
        np.ones(1, dtype=np.uint32),
        np.array([_LIST_BYTES], dtype=np.uint32),
    )
    total, first = 0, None
    while time.monotonic() < deadline:
        buffer_words = buffer[:4].view("<u4")
        buffer_words[0] = 0
        result = _call(
            host,
            namespace.fd,
            IO_COMMAND_VEC,
            builder.list_from(namespace.nsid, first, data),
        )
        if result != 0:
            _logger.info("%s: keys can't be listed: %s", namespace.path, describe(result))
            return total, False
        listed, last = _listed(buffer)
        total += listed - (first is not None and listed > 0)
        if listed < _MIN_LISTED or last is None:
            return total, True
        first = last
    return total, False


def _listed(buffer: NDArray[np.uint8]) -> tuple[int, KeyArray | None]:
    """Return how many keys a page lists, and the last of 16 bytes, None where that is no key.

    Byte map: u32 number of keys, then each a u16 length and the key, padded to 4 bytes.
    """
    count = int(buffer[:4].view("<u4")[0])
    offset = 4
    last: KeyArray | None = None
    for seen in range(count):
        if offset + 2 > buffer.size:
            return seen, last
        length = int(buffer[offset]) | int(buffer[offset + 1]) << 8
        key = buffer[offset + 2 : offset + 2 + length]
        last = key.copy().view("<u8").reshape(1, 2) if length == KEY_BYTES else None
        offset += (2 + length + 3) & ~3
    return count, last

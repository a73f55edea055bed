"""Opening slab files for direct I/O, and what alignment that needs.

Failure scope. OSError is the caller's to word; a file system that refuses O_DIRECT is
served through the page cache, with one log line a file.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import struct
from pathlib import Path
from typing import Final

from adp_kv.units import PAGE_BYTES

SECTOR_BYTES: Final = 512

_logger: Final = logging.getLogger(__name__)
_libc: Final = ctypes.CDLL(None, use_errno=True)

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_BYTES: Final = 256
_DIO_ALIGN_OFFSET: Final = 152  # u32 memory alignment, u32 offset alignment
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a slab for O_DIRECT, or buffered where that is refused.

    Args:
        path: a file or block device.
        flags: O_RDWR and the like.

    Returns:
        The descriptor, and whether its I/O is direct.

    Raises:
        OSError: It can't be opened at all.
    """
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    _logger.warning("%s: no O_DIRECT on this file system, using the page cache", path)
    return os.open(path, flags | os.O_CLOEXEC, 0o600), False


def alignment_of(path: Path) -> int:
    """Return the alignment, 512 or 4096, that direct I/O on a slab at `path` needs.

    Asks a file that is there; otherwise tries on an unnamed file in the nearest directory
    that is there, so nothing is left behind. What can't be found out is 4096.
    """
    for place in (path, *path.parents):
        if place.exists():
            break
    else:
        return PAGE_BYTES
    flags = os.O_RDWR | os.O_TMPFILE if place.is_dir() else os.O_RDONLY
    try:
        descriptor = os.open(place, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return PAGE_BYTES
    try:
        if place.is_dir():
            os.ftruncate(descriptor, PAGE_BYTES)
        return _asked(descriptor) or _tried(descriptor)
    except OSError:
        return PAGE_BYTES
    finally:
        os.close(descriptor)


def _asked(descriptor: int) -> int:
    """Return what statx says, 0 where kernel or file system do not say (before 6.1)."""
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return 0
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return 0
    if not struct.unpack_from("=I", answer)[0] & _STATX_DIOALIGN:
        return 0
    needed = max(struct.unpack_from("=II", answer, _DIO_ALIGN_OFFSET))
    if needed == 0:
        return 0
    return SECTOR_BYTES if needed <= SECTOR_BYTES else PAGE_BYTES


def _tried(descriptor: int) -> int:
    page = mmap.mmap(-1, PAGE_BYTES)
    with page, memoryview(page) as view, view[SECTOR_BYTES : 2 * SECTOR_BYTES] as sector:
        try:
            # Both memory and offset are off by a sector.
            os.preadv(descriptor, [sector], SECTOR_BYTES)
        except OSError:
            return PAGE_BYTES
    return SECTOR_BYTES

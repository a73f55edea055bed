"""What an NVMe completion means for an entry.

A result below 0 is -errno of the kernel; above 0 it is the completion's status field
(bits 7:0 code, 10:8 type, 14 "do not retry").

Threads: pure functions.
"""

from __future__ import annotations

import errno
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.cards.base import Status, StatusArray


class Code(IntEnum):
    """Status types and codes (type << 8 | code) that mean something here."""

    INVALID_OPCODE = 0x01
    INVALID_FIELD = 0x02
    INVALID_NAMESPACE = 0x0B
    CAPACITY_EXCEEDED = 0x81
    INVALID_VALUE_SIZE = 0x85
    INVALID_KEY_SIZE = 0x86
    KEY_ABSENT = 0x87
    UNRECOVERED = 0x88
    KEY_EXISTS = 0x89
    UNRECOVERED_READ = 0x281


_CODE_MASK: Final = 0x7FF
_STATUS: Final = MappingProxyType(
    {
        0: Status.OK,
        Code.CAPACITY_EXCEEDED: Status.NO_SPACE,
        Code.INVALID_VALUE_SIZE: Status.TOO_LARGE,
        Code.KEY_ABSENT: Status.ABSENT,
        # The device knows the key and has lost the value.
        Code.UNRECOVERED: Status.CORRUPT,
        Code.UNRECOVERED_READ: Status.CORRUPT,
        -errno.ENOSPC: Status.NO_SPACE,
    }
)


def codes(results: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return results without the bits that say how to retry: int32 [n]."""
    return np.where(results > 0, results & _CODE_MASK, results).astype(np.int32)


def entry_status(results: NDArray[np.int32], *, reading: bool) -> StatusArray:
    """Return the status of each entry: uint8 [n]; what has no better name is IO_ERROR.

    Args:
        results: int32 [n], of commands.
        reading: a value that the device lost, or that does not fit the buffer of its expected
            length, is CORRUPT, not a failure of the command.
    """
    found = codes(results)
    status = np.full(len(found), Status.IO_ERROR, dtype=np.uint8)
    for code in np.unique(found).tolist():
        meaning = _STATUS.get(code, Status.IO_ERROR)
        if meaning is Status.CORRUPT and not reading:
            meaning = Status.IO_ERROR
        elif meaning is Status.TOO_LARGE and reading:
            meaning = Status.CORRUPT
        status[found == code] = meaning
    return status


def describe(result: int) -> str:
    """Return words for a result that is not OK."""
    if result < 0:
        return errno.errorcode.get(-result, str(-result))
    code = result & _CODE_MASK
    name = f" ({Code(code).name})" if code in set(Code) else ""
    return f"NVMe status {code:#x}{name}"

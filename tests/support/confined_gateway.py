"""A gateway that may open sockets of some address families only, as systemd confines one.

Run as `python -m tests.support.confined_gateway`; arguments as for `python -m gateway`. The
environment names the families as RestrictAddressFamilies= does; others get what systemd's filter
gives them, EAFNOSUPPORT.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

FAMILIES = "ADP_TEST_FAMILIES"
_SOCKET = {"x86_64": 41, "aarch64": 198}
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06  # of the classic BPF
_NUMBER, _FIRST_ARGUMENT = 0, 16  # where seccomp_data has them
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SET_SECCOMP, _FILTER, _NO_NEW_PRIVS = 22, 2, 38


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _filter(families: list[int]) -> bytes:
    count = len(families)
    code = [(_LOAD, 0, 0, _NUMBER), (_EQUALS, 0, count + 2, _SOCKET[platform.machine()])]
    code.append((_LOAD, 0, 0, _FIRST_ARGUMENT))
    code += [(_EQUALS, count - i, 0, family) for i, family in enumerate(families)]
    code += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *one) for one in code)


def confine(names: str) -> None:
    """Refuse this process, for good, sockets of families that are not named."""
    code = _filter([int(getattr(socket, name)) for name in names.split()])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    confine(os.environ[FAMILIES])
    from gateway.__main__ import main

    sys.exit(main())

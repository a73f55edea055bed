"""Copies between memory and the ring that bypass the processor's caches.

glibc's memmove does so only for copies larger than a share of the last-level cache, tens of
MiB on a server. Below that every store first reads the line that it overwrites: three
trips to memory instead of two, and half the speed. The threshold can only be given
when a process starts, so a gateway whose card copies starts once more with it.
"""

from __future__ import annotations

import os
import platform
import sys

_NAME = "glibc.cpu.x86_non_temporal_threshold"
_THRESHOLD = 0x80000
_CARDS = ("memory",)
"""Cards that copy; the others let the kernel or the device move the bytes."""


def restart_for_copies(card: str) -> None:
    """Replace this process by itself with streaming copies, where that is of use.

    Returns if the card does not copy, if glibc has no such setting here, or if it is set.
    The process keeps its number and whatever it inherited.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")  # noqa: TID251  libc's, not a setting of ours
    is_there = platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
    if card not in _CARDS or not is_there or _NAME in given:
        return
    tunables = ":".join(filter(None, (given, f"{_NAME}={_THRESHOLD:#x}")))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(  # noqa: S606  no shell, and the very program that runs
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        os.environ | {"GLIBC_TUNABLES": tunables},  # noqa: TID251
    )

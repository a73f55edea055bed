"""Making a slab card empty, and what must never be made empty by mistake.

Threads. The main one, before a card is open.
Failure scope. CardError before anything was changed; the message names what is in the way.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Final

from adp_kv.errors import CardError
from adp_kv.units import PAGE_BYTES, MiB

DATA_OFFSET: Final = MiB
"""Bytes at the start of a slab that hold no values: its header, and where labels would be."""

SLAB_MAGIC: Final = int.from_bytes(b"adpkvslb", "little")

_OWN_NAMES: Final = re.compile(r"card\.json(\.tmp)?|lock|slab-\d{4}\.(data|journal|tmp)")
_LABELS: Final = (
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (65600, b"_BHRfS_M", "a Btrfs file system"),
    (3, b"NTFS", "an NTFS file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT", "a FAT file system"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (536, b"LVM2 001", "an LVM physical volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (4086, b"SWAPSPACE2", "swap space"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (510, b"\x55\xaa", "a partition table or boot sector"),
)
_REMEDY: Final = "if it may go, run `adp-gateway card format --force` with the same options"


def content_of(device: Path) -> str:
    """Return what a device seems to hold, "" if nothing: its first and last MiB are zeros.

    Raises:
        OSError: It can't be read.
    """
    with device.open("rb", buffering=0) as file:
        start = _read(file.fileno(), 0)
        size = file.seek(0, os.SEEK_END)
        end = _read(file.fileno(), max(0, size - DATA_OFFSET)) if size > 2 * DATA_OFFSET else b""
    for offset, label, name in _LABELS:
        if start[offset : offset + len(label)] == label:
            return name
    if start.count(0) != len(start):
        return "data that is not a slab"
    return "" if end.count(0) == len(end) else "data at its end, perhaps a RAID or GPT label"


def _read(descriptor: int, offset: int) -> bytes:
    pieces = b""
    while len(pieces) < DATA_OFFSET:
        piece = os.pread(descriptor, DATA_OFFSET - len(pieces), offset + len(pieces))
        if not piece:
            break
        pieces += piece
    return pieces


def is_slab(device: Path) -> bool:
    """Return whether a device or file begins like a slab of ours."""
    with device.open("rb", buffering=0) as file:
        return int.from_bytes(file.read(8), "little") == SLAB_MAGIC


def check_device_is_free(device: Path) -> None:
    """Refuse a device that holds anything but zeros; another server may have a slab there.

    Raises:
        CardError: It names what is there.
    """
    content = "the slab of a card with another path" if is_slab(device) else content_of(device)
    if content:
        raise CardError(f"devices: {device} holds {content}; {_REMEDY}")


def check_may_format(path: Path, devices: tuple[str, ...], *, force: bool) -> None:
    """Refuse to make a card empty that holds something, unless `force`.

    Raises:
        CardError: Without force: a card, a file system or foreign files are there. With it
            too: a device is mounted or in use, or the directory holds files of others.
    """
    if (path / "card.json").exists() and not force:
        raise CardError(f"path {path}: holds a card; add --force to delete what it stores")
    foreign = _foreign_files(path)
    if foreign:
        raise CardError(
            f"path {path}: holds {foreign[0]}, which is no file of a card; name a directory that "
            "is empty or a card's"
        )
    for name in devices:
        device = Path(name)
        _check_unused(device)
        if not force:
            check_device_is_free(device)


def _foreign_files(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(f.name for f in path.iterdir() if not _OWN_NAMES.fullmatch(f.name))


def _check_unused(device: Path) -> None:
    """Refuse what is no block device, and one the kernel uses: mounted, in a RAID, swap."""
    try:
        if not stat.S_ISBLK(device.stat().st_mode):
            raise CardError(f"devices: {device} is no block device; leave devices empty for files")
        os.close(os.open(device, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise CardError(
                f"devices: {device} is mounted or otherwise in use; not even --force formats it"
            ) from error
        raise CardError(f"devices: {device}: {error.strerror}") from error


def erase(path: Path, devices: tuple[str, ...]) -> None:
    """Delete a card's own files, card.json first, and the start of its devices.

    Raises:
        OSError: The file system or a device refused.
    """
    (path / "card.json").unlink(missing_ok=True)
    for entry in path.iterdir() if path.is_dir() else ():
        if _OWN_NAMES.fullmatch(entry.name) and entry.name != "lock":
            entry.unlink()
    for name in devices:
        with Path(name).open("r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            for offset in {0, max(0, size - DATA_OFFSET)}:
                _write_zeros(file.fileno(), offset, min(DATA_OFFSET, size))
            os.fsync(file.fileno())


def _write_zeros(descriptor: int, offset: int, count: int) -> None:
    for start in range(offset, offset + count, PAGE_BYTES):
        os.pwrite(descriptor, bytes(min(PAGE_BYTES, offset + count - start)), start)

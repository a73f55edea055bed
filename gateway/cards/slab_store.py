"""What a slab card keeps on disk: its directory, locks, slabs and journals.

    <path>/card.json            what the card is; written last when it is made
    <path>/lock                 flock of the one process that has it open
    <path>/slab-0000.data       values of database 0, or a block device named by `devices`
    <path>/slab-0000.journal    what is in them (gateway.cards.journal)

Byte map of a slab: a 4096-byte header (magic, format version, card id, database, as u64),
zeros up to DATA_OFFSET, then num_slots slots of slot_bytes. A slot holds a value and
whatever pads it to the alignment.

The flock of each slab is held by the very descriptor its I/O goes through: the kernel
lets it go only when the last write a killed process had in flight has ended, so that
none can land in a slot the next process has given out.

Threads. open_store() and close() on the main thread; the rest as each part says.
Failure scope. CardError from open_store(), which then holds and has changed nothing of a
card that it refuses.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.units import PAGE_BYTES, MiB, format_bytes
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Status
from gateway.cards.direct_io import open_direct
from gateway.cards.index import Locations
from gateway.cards.journal import Journal, JournalIdentity, Kind, sync_directory
from gateway.cards.slots import SlotTable

_logger: Final = logging.getLogger(__name__)

DATA_OFFSET: Final = MiB
_FORMAT_VERSION: Final = 1
_MAGIC: Final = int.from_bytes(b"adpkvslb", "little")
_HEADER_WORDS: Final = 4
_LOCK_POLL_S: Final = 0.02
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_BUSY: Final = (errno.EWOULDBLOCK, errno.EACCES)


class CardFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of card.json.

    Attributes:
        card_id: random, in slab headers and journal records.
        slot_bytes: bytes of a slot.
        num_databases: slabs.
        num_slots: slots of each slab.
        on_devices: the slabs are block devices.
        kind: always "adp_kv slab card".
        format_version: of the directory.
    """

    card_id: int
    slot_bytes: int
    num_databases: int
    num_slots: int
    on_devices: bool
    kind: Literal["adp_kv slab card"] = "adp_kv slab card"
    format_version: int = _FORMAT_VERSION


@dataclass(slots=True)
class Database:
    """One key space; `table.lock` guards table, journal appends and dirty_bytes.

    Attributes:
        fd: the slab.
        journal: of the slab.
        table: which key is in which slot.
        dirty_bytes: written since the last sync.
        journal_failures: appends the file system refused.
    """

    fd: int
    journal: Journal
    table: SlotTable
    dirty_bytes: int = 0
    journal_failures: int = 0

    def sync(self) -> None:
        """Wait until the device has what was written before this call."""
        with self.table.lock:
            dirty, self.dirty_bytes = self.dirty_bytes, 0
        if dirty:
            os.fdatasync(self.fd)
            self.journal.sync()

    def record(
        self,
        kind: Kind,
        keys: KeyArray,
        slots: Locations,
        lengths: NDArray[np.uint32] | None = None,
        checksums: NDArray[np.uint64] | None = None,
    ) -> Status:
        """Append to the journal, table.lock held.

        Returns:
            OK; NO_SPACE or IO_ERROR where the file system refused and nothing was appended.
        """
        if lengths is None or checksums is None:
            lengths, checksums = np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint64)
        try:
            self.journal.append(kind, keys, slots, lengths, checksums)
        except OSError as error:
            self.journal_failures += 1
            _logger.warning("journal: %s", error)
            return Status.NO_SPACE if error.errno in _FULL else Status.IO_ERROR
        self.dirty_bytes += len(keys)  # a sync is due, however little it is
        return Status.OK

    def put(
        self,
        keys: KeyArray,
        slots: Locations,
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
    ) -> Status:
        """Journal, then index values whose bytes are in their slots, table.lock held.

        Returns:
            As record(); where it is not OK the slots are free again.
        """
        status = self.record(Kind.PUT, keys, slots, lengths, checksums)
        if status is Status.OK:
            self.table.put(keys, slots, lengths, checksums)
        else:
            self.table.give_back(slots)
        return status

    def drop(self, keys: KeyArray, slots: Locations) -> None:
        """Delete keys that still are at `slots`, table.lock held.

        A refused record changes nothing here: replay finds the value as corrupt as it is.
        """
        removed = self.table.delete(keys, slots)
        self.record(Kind.DELETE, keys[removed], slots[removed])


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """What to open.

    Attributes:
        path: the card's directory.
        devices: block devices, one a database; empty for files under `path`.
        slot_bytes: bytes of a slot.
        num_databases: slabs.
        num_slots: slots of each slab.
        lock_wait_s: how long to wait for a process that is going.
    """

    path: Path
    devices: tuple[str, ...]
    slot_bytes: int
    num_databases: int
    num_slots: int
    lock_wait_s: float

    def slab(self, database: int) -> Path:
        """Return where a database's values are."""
        if self.devices:
            return Path(self.devices[database])
        return self.path / f"slab-{database:04d}.data"

    def journal(self, database: int) -> Path:
        """Return where a database's journal is."""
        return self.path / f"slab-{database:04d}.journal"

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab."""
        return DATA_OFFSET + self.num_slots * self.slot_bytes


class Store:
    """An open store: databases and the locks that keep others out."""

    def __init__(self, lock_fd: int) -> None:
        """Own `lock_fd`; open_store() adds the databases."""
        self._lock_fd = lock_fd
        self.databases: list[Database] = []

    def close(self) -> None:
        """Close everything; safe to call twice."""
        for database in self.databases:
            database.journal.close()
            os.close(database.fd)
        self.databases = []
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def open_store(spec: StoreSpec) -> Store:
    """Open a card's directory, making the card if there is none.

    Raises:
        CardError: Another process has it, it was made with other settings, a device holds
            something else, or the file system refused.
    """
    deadline = time.monotonic() + spec.lock_wait_s
    try:
        spec.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_fd = os.open(spec.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CardError(f"path {spec.path}: {error.strerror}; name a directory of yours") from error
    store = Store(lock_fd)
    try:
        _lock(lock_fd, spec.path, deadline)
        facts = _known_facts(spec)
        made = facts or _new_facts(spec)
        for number in range(spec.num_databases):
            store.databases.append(_open_database(spec, made, number, deadline, new=facts is None))
        if facts is None:
            _write_facts(spec.path, made)
    except OSError as error:
        store.close()
        raise CardError(f"path {spec.path}: {error}") from error
    except BaseException:
        store.close()
        raise
    return store


def _lock(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        else:
            return
        if time.monotonic() > deadline:
            raise CardError(
                f"path {path}: another process has this card open; stop that gateway or give "
                "this one a path of its own"
            )
        time.sleep(_LOCK_POLL_S)


def _new_facts(spec: StoreSpec) -> CardFacts:
    return CardFacts(
        card_id=secrets.randbits(63),
        slot_bytes=spec.slot_bytes,
        num_databases=spec.num_databases,
        num_slots=spec.num_slots,
        on_devices=bool(spec.devices),
    )


def _known_facts(spec: StoreSpec) -> CardFacts | None:
    """Return what card.json says, None where it is not there.

    Raises:
        CardError: It can't be read or says otherwise than the settings.
    """
    path = spec.path / "card.json"
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=CardFacts)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CardError(f"{path}: {error}; restore it, or delete the directory") from error
    if facts.format_version != _FORMAT_VERSION:
        raise CardError(
            f"{path}: format {facts.format_version}, this version reads {_FORMAT_VERSION}; start "
            "the version that wrote it, or delete the directory"
        )
    wanted = {
        "slot_bytes": (facts.slot_bytes, spec.slot_bytes),
        "num_databases": (facts.num_databases, spec.num_databases),
        "capacity_bytes (slots a database)": (facts.num_slots, spec.num_slots),
        "devices (used)": (facts.on_devices, bool(spec.devices)),
    }
    for name, (there, asked) in wanted.items():
        if there != asked:
            raise CardError(
                f"{name}: the card in {spec.path} was made with {there}, the settings say "
                f"{asked}; set it back, or delete the directory to start empty"
            )
    return facts


def _write_facts(directory: Path, facts: CardFacts) -> None:
    """Make the card exist: until this rename its files are remains of an attempt."""
    temporary = directory / "card.json.tmp"
    with temporary.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / "card.json")
    sync_directory(directory)


def _open_database(
    spec: StoreSpec, facts: CardFacts, number: int, deadline: float, *, new: bool
) -> Database:
    slab = spec.slab(number)
    create = os.O_CREAT if new and not spec.devices else 0
    descriptor, _ = open_direct(slab, os.O_RDWR | create)
    try:
        _lock(descriptor, slab, deadline)
        if new:
            _make_slab(spec, facts, number, descriptor)
        _check_header(slab, facts, number)
        _check_size(slab, spec.slab_bytes, os.lseek(descriptor, 0, os.SEEK_END))
        if new:
            spec.journal(number).unlink(missing_ok=True)
        identity = JournalIdentity(facts.card_id, number, spec.num_slots, spec.slot_bytes)
        journal = Journal(spec.journal(number), identity)
    except BaseException:
        os.close(descriptor)
        raise
    table = SlotTable(spec.num_slots)
    live = journal.live
    table.restore(
        np.ascontiguousarray(live["key"]),
        live["slot"].astype(np.int64),
        np.ascontiguousarray(live["length"]),
        np.ascontiguousarray(live["checksum"]),
    )
    journal.forget_live()
    return Database(descriptor, journal, table)


def _make_slab(spec: StoreSpec, facts: CardFacts, number: int, descriptor: int) -> None:
    slab = spec.slab(number)
    if stat.S_ISBLK(os.fstat(descriptor).st_mode):
        _check_device_is_empty(slab)
        _check_size(slab, spec.slab_bytes, os.lseek(descriptor, 0, os.SEEK_END))
    elif spec.devices:
        raise CardError(f"devices: {slab} is no block device; name one, or leave devices empty")
    else:
        try:
            os.posix_fallocate(descriptor, 0, spec.slab_bytes)
        except OSError as error:
            # Give the space back: a start that failed should not fill the disk.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            raise CardError(
                f"capacity_bytes: {slab} needs {format_bytes(spec.slab_bytes)}: "
                f"{error.strerror}; lower it or make room"
            ) from error
    words = np.zeros(PAGE_BYTES // 8, dtype=np.uint64)
    words[:_HEADER_WORDS] = (_MAGIC, _FORMAT_VERSION, facts.card_id, number)
    with slab.open("r+b", buffering=0) as file:
        file.write(words.tobytes())
        os.fsync(file.fileno())


def _check_device_is_empty(slab: Path) -> None:
    """Refuse a device whose first MiB holds anything but zeros or a slab of ours."""
    with slab.open("rb", buffering=0) as file:
        start = file.read(DATA_OFFSET)
    ours = len(start) >= PAGE_BYTES and int.from_bytes(start[:8], "little") == _MAGIC
    if not ours and start.count(0) != len(start):
        raise CardError(
            f"devices: {slab} holds data that is not a slab; if it may go, clear it with "
            f"`blkdiscard -z --length {DATA_OFFSET} {slab}` and start again"
        )


def _check_header(slab: Path, facts: CardFacts, number: int) -> None:
    with slab.open("rb", buffering=0) as file:
        start = file.read(8 * _HEADER_WORDS)
    wanted = np.array([_MAGIC, _FORMAT_VERSION, facts.card_id, number], dtype="<u8")
    if start != wanted.tobytes():
        raise CardError(
            f"{slab}: not database {number} of this card; name the card's own slabs in their "
            "order, or delete the directory to start empty"
        )


def _check_size(slab: Path, needed: int, size: int) -> None:
    if size < needed:
        raise CardError(
            f"{slab}: {format_bytes(size)}, but its slots need {format_bytes(needed)}; restore "
            "it, or delete the directory and start with a lower capacity_bytes"
        )

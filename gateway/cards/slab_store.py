"""What a slab card keeps on disk: its directory, locks, slabs and journals.

    <path>/card.json            what the card is; written last when it is made
    <path>/lock                 flock of the one process that has it open
    <path>/slab-0000.data       values of database 0, or a block device named by `devices`
    <path>/slab-0000.journal    what is in them (gateway.cards.journal)

Byte map of a slab: a 4096-byte header (magic, format version, card id, database, as u64),
zeros up to DATA_OFFSET, then num_slots slots of slot_bytes. A slot holds a value and
whatever pads it to the alignment.

At open every group whose commit record is there and whose values are all there is taken
over in the order it had; values of a group without one are what a put left that never
came to its end, and are let go.

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
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from adp_kv.errors import CardError
from adp_kv.units import PAGE_BYTES, format_bytes
from gateway.cards.direct_io import open_direct
from gateway.cards.groups import GroupTable
from gateway.cards.journal import Journal, sync_directory
from gateway.cards.journal_records import JournalIdentity
from gateway.cards.slab_database import Database, restore
from gateway.cards.slab_format import (
    DATA_OFFSET,
    SLAB_MAGIC,
    check_device_is_free,
    check_may_format,
    erase,
)
from gateway.cards.slots import SlotTable

_FORMAT_VERSION: Final = 2
_HEADER_WORDS: Final = 4
_LOCK_POLL_S: Final = 0.02
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


def open_store(spec: StoreSpec, groups: GroupTable) -> Store:
    """Open a card's directory, making the card if there is none.

    Args:
        spec: what to open.
        groups: empty; filled with the groups that are there.

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
            new = facts is None
            store.databases.append(_open_database(spec, made, number, deadline, groups, new=new))
        restore(store.databases, groups)
        if facts is None:
            _write_facts(spec.path, made)
    except OSError as error:
        store.close()
        raise CardError(f"path {spec.path}: {error}") from error
    except BaseException:
        store.close()
        raise
    return store


def format_store(spec: StoreSpec, *, force: bool) -> None:
    """Make an empty card, in the place of what is there if `force` says so.

    Raises:
        CardError: As check_may_format(); another process has the card; no room.
    """
    check_may_format(spec.path, spec.devices, force=force)
    deadline = time.monotonic() + spec.lock_wait_s
    try:
        spec.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_fd = os.open(spec.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(lock_fd, spec.path, deadline)
            erase(spec.path, spec.devices)
        finally:
            os.close(lock_fd)
    except OSError as error:
        raise CardError(f"path {spec.path}: {error}") from error


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
            "the version that wrote it, or `adp-gateway card format --force` to start empty"
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
    spec: StoreSpec,
    facts: CardFacts,
    number: int,
    deadline: float,
    groups: GroupTable,
    *,
    new: bool,
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
    return Database(descriptor, journal, SlotTable(spec.num_slots, groups), groups)


def _make_slab(spec: StoreSpec, facts: CardFacts, number: int, descriptor: int) -> None:
    slab = spec.slab(number)
    if stat.S_ISBLK(os.fstat(descriptor).st_mode):
        check_device_is_free(slab)
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
    words[:_HEADER_WORDS] = (SLAB_MAGIC, _FORMAT_VERSION, facts.card_id, number)
    with slab.open("r+b", buffering=0) as file:
        file.write(words.tobytes())
        os.fsync(file.fileno())


def _check_header(slab: Path, facts: CardFacts, number: int) -> None:
    with slab.open("rb", buffering=0) as file:
        start = file.read(8 * _HEADER_WORDS)
    wanted = np.array([SLAB_MAGIC, _FORMAT_VERSION, facts.card_id, number], dtype="<u8")
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

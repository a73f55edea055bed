"""The journal file of one database: what is in its slots, and since when.

    append ─► file ─► replay at open ─► records in force
                └──── compact: live records and what came meanwhile, renamed over it

Replay takes the records up to the first that is not whole, in sequence and this card's
(`gateway.cards.journal_records`), and cuts the file there. A lost tail forgets values or
brings replaced ones back; as a value's bytes are checked against its record on every
read, that is never wrong bytes.

compact() rewrites a journal in which dead records dominate while it is in use: piece by
piece it asks the owner which records are live and copies those; what was appended
meanwhile is copied as it is. From then on the copy is the journal's shadow: append() writes
to both and sync() waits for both, while the copy is synced and then renamed over the old. So
the new file has on the device what any sync() that ended had there in the old one. A key
that changed after its piece was asked for has a later record, which wins. A kill or a power
loss at any point leaves the old journal or the new one.

Threads. The owner's lock is held around append(); sync() and compact(), which takes that
lock itself, may run beside it, one of each. Nothing waits for the device under that lock.
Failure scope. A failed append leaves the file as it was; if that can't be had the
journal refuses from then on. A compaction that fails, as with a shadow that can't be written
or synced, leaves the journal as it is.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from gateway.cards.journal_records import (
    FORMAT_VERSION,
    MAGIC,
    RECORD,
    JournalIdentity,
    Kind,
    RecordArray,
    good_prefix,
    header_record,
    identity_of,
    in_force,
    is_whole_header,
    seal,
)

_logger: Final = logging.getLogger(__name__)

_PIECE_RECORDS: Final = 4096
_LAST_RECORDS: Final = 1024  # so few are copied with the owner's lock held
_RECORD_BYTES: Final = RECORD.itemsize


class Journal:
    """One open journal (see the module's contract)."""

    def __init__(self, path: Path, identity: JournalIdentity) -> None:
        """Open or create the journal and replay it; `live` has the records in force.

        Args:
            path: the file; its directory exists.
            identity: of the database.

        Raises:
            CardError: It belongs to another card or geometry; nothing was touched.
            OSError: The file system refused.
        """
        self._path = path
        self._identity = identity
        self._broken = False
        self._size = 0
        self._fd_lock = threading.Lock()  # who replaces _fd or _shadow against who waits for them
        self._shadow: _Copy | None = None  # set and closed with the owner's lock and _fd_lock
        self._renames = 0
        self._renames_synced = 0  # of them, those that the directory on the device has
        self.live: RecordArray = np.empty(0, dtype=RECORD)
        self.discarded_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._load()
            # Of a compaction that a kill ended: it would keep its room for good.
            path.with_suffix(".tmp").unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._size

    @property
    def num_records(self) -> int:
        """Records in the file, the header not counted."""
        return self._size // _RECORD_BYTES - 1

    def append(self, records: RecordArray) -> None:
        """Add records, which this seals, with one write: the group commit.

        Raises:
            OSError: ENOSPC, EIO, ...; the file holds none of the records.
        """
        if len(records) == 0:
            return
        if self._broken:
            raise OSError(f"{self._path}: an earlier append could not be undone")
        seal(records, self._identity, self._size // _RECORD_BYTES + 1)
        try:
            _write_all(self._fd, records.tobytes(), self._size)
        except OSError:
            self._undo()
            raise
        self._size += records.nbytes
        shadow = self._shadow
        if shadow is not None:
            try:
                shadow.add(records)
            except OSError:
                self._drop_shadow(shadow)

    def forget_live(self) -> None:
        """Drop `live` once it has been taken over: 64 bytes a value."""
        self.live = np.empty(0, dtype=RECORD)

    def sync(self) -> None:
        """Wait until the device has what was appended before this call."""
        descriptors: list[int] = []
        try:
            with self._fd_lock:
                shadow, renames = self._shadow, self._renames
                descriptors.append(os.dup(self._fd))
                if shadow is not None:
                    descriptors.append(os.dup(shadow.descriptor))
            os.fdatasync(descriptors[0])
            if shadow is not None:
                self._sync_shadow(shadow, descriptors[1])
            # Not noted before it is done: another sync() may end first, and promise as much.
            if renames > self._renames_synced:
                sync_directory(self._path.parent)
                self._renames_synced = renames
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _sync_shadow(self, shadow: _Copy, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError:
            # The kernel says it once, here: the compaction's own fsync need not hear of it.
            if not self._drop_shadow(shadow):
                raise  # it may be the journal by now

    def _drop_shadow(self, shadow: _Copy) -> bool:
        """Let its compaction fail; return whether it was under way still."""
        with self._fd_lock:
            dropped = self._shadow is shadow
            if dropped:
                self._shadow = None
        return dropped

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with self._fd_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def compact(
        self,
        lock: threading.Lock,
        are_live: Callable[[RecordArray], NDArray[np.bool_]],
        pause: Callable[[], bool],
    ) -> bool:
        """Leave the dead records behind.

        Args:
            lock: the owner's.
            are_live: which PUT and COMMIT records are in force now; called with the lock.
            pause: called without the lock between pieces; true gives up.

        Returns:
            Whether there is a new file.
        """
        temporary = self._path.with_suffix(".tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = -1
        try:
            descriptor = os.open(temporary, flags, 0o600)
            copy = _Copy(descriptor, self._identity)
            with lock:
                end = self._size
            if not self._copy_live(copy, end, lock, are_live, pause):
                raise InterruptedError(0, "the card closes")
            position = self._catch_up(copy, end, lock, pause)
            os.fsync(descriptor)
            # What came while that took its time, so that little is left to copy with the lock.
            position = self._catch_up(copy, position, lock, pause)
            old = self._shadow_and_take_over(copy, position, lock, temporary)
        except OSError as error:
            # No room for both, say: the long journal serves as well, only slower to open.
            _logger.warning("%s: not compacted: %s", self._path, error.strerror)
            if descriptor >= 0:
                os.close(descriptor)
            temporary.unlink(missing_ok=True)
            return False
        os.close(old)  # frees a large file, which takes its time
        try:
            self.sync()
        except OSError as error:
            _logger.warning("%s: sync: %s", self._path, error.strerror)
        return True

    def _copy_live(
        self,
        copy: _Copy,
        end: int,
        lock: threading.Lock,
        are_live: Callable[[RecordArray], NDArray[np.bool_]],
        pause: Callable[[], bool],
    ) -> bool:
        for position in range(_RECORD_BYTES, end, _PIECE_RECORDS * _RECORD_BYTES):
            records = _read(self._fd, position, min(_PIECE_RECORDS * _RECORD_BYTES, end - position))
            with lock:
                live = are_live(records)
            copy.add(records[live & (records["kind"] != Kind.DELETE)])
            if pause():
                return False
        return True

    def _catch_up(
        self, copy: _Copy, position: int, lock: threading.Lock, pause: Callable[[], bool]
    ) -> int:
        while True:
            with lock:
                end = self._size
            if end - position <= _LAST_RECORDS * _RECORD_BYTES or pause():
                return position
            end = min(end, position + _PIECE_RECORDS * _RECORD_BYTES)
            copy.add(_read(self._fd, position, end - position))
            position = end

    def _shadow_and_take_over(
        self, copy: _Copy, position: int, lock: threading.Lock, temporary: Path
    ) -> int:
        """Copy the rest, sync the copy and put it in place; return the old file."""
        try:
            with lock:
                copy.add(_read(self._fd, position, self._size - position))
                with self._fd_lock:
                    self._shadow = copy
            os.fsync(copy.descriptor)
            with lock:
                return self._take_over(copy, temporary)
        except BaseException:
            # With the lock: no append is writing to the descriptor that is closed next.
            with lock:
                self._drop_shadow(copy)
            raise

    def _take_over(self, copy: _Copy, temporary: Path) -> int:
        """Put the synced shadow in place, the owner's lock held; return the old file."""
        with self._fd_lock:
            if self._shadow is not copy:
                raise OSError(errno.EIO, "the copy could not be written or synced")
            temporary.replace(self._path)
            old, self._fd = self._fd, copy.descriptor
            self._shadow = None
            self._renames += 1
        self._size = copy.size
        return old

    def has_room(self, num_records: int) -> bool:
        """Return whether the file system could take a journal of so many records, and appends."""
        there = os.fstatvfs(self._fd)
        return there.f_bavail * there.f_frsize >= 2 * num_records * _RECORD_BYTES

    def _load(self) -> None:
        whole, self._size = _read_records(self._fd)
        if len(whole):
            self._check_header(whole[0])
        good = good_prefix(whole, self._identity)
        if good == 0:
            self._start_empty()
            return
        end = good * _RECORD_BYTES
        self.discarded_bytes = self._size - end
        if self.discarded_bytes:
            os.ftruncate(self._fd, end)
        self._size = end
        self.live = in_force(whole[1:good], self._identity.num_slots)

    def _start_empty(self) -> None:
        self.discarded_bytes = self._size
        os.ftruncate(self._fd, 0)
        _write_all(self._fd, header_record(self._identity).tobytes(), 0)
        self._size = _RECORD_BYTES

    def _check_header(self, record: np.void) -> None:
        """Refuse a whole header that is not ours; a damaged one only ends the replay."""
        magic, version = (int(word) for word in record["key"])
        if magic == MAGIC and version == _UNGROUPED_VERSION:
            raise CardError(self._other_format(version))
        if not is_whole_header(record.reshape(1))[0]:
            return
        if int(record["kind"]) != Kind.HEADER or magic != MAGIC:
            raise CardError(f"{self._path}: not a journal; move it away or choose another path")
        if version != FORMAT_VERSION:
            raise CardError(self._other_format(version))
        found = identity_of(record)
        if found != self._identity:
            raise CardError(
                f"{self._path}: belongs to {found}, this card is {self._identity}; put the "
                "card's own file back, or delete the card's directory"
            )

    def _other_format(self, version: int) -> str:
        return (
            f"{self._path}: journal format {version}, this version reads {FORMAT_VERSION}; "
            "start the version that wrote it, or `adp-gateway card format --force` to start empty"
        )

    def _undo(self) -> None:
        # Whole records of a failed append would be replayed: their caller was told "no".
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._broken = True


_UNGROUPED_VERSION: Final = 1


class _Copy:
    """The journal that compact() writes.

    Attributes:
        descriptor: of the file.
        size: its length in bytes.
    """

    def __init__(self, descriptor: int, identity: JournalIdentity) -> None:
        self.descriptor = descriptor
        self.size = _RECORD_BYTES
        self._identity = identity
        _write_all(descriptor, header_record(identity).tobytes(), 0)

    def add(self, records: RecordArray) -> None:
        """Append records, sealed for their place here."""
        if len(records):
            seal(records, self._identity, self.size // _RECORD_BYTES + 1)
            _write_all(self.descriptor, records.tobytes(), self.size)
            self.size += records.nbytes


def sync_directory(path: Path) -> None:
    """Wait until the device has the directory's entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int, position: int, num_bytes: int) -> RecordArray:
    """Return the records in a part of the file that was written by append()."""
    records = np.zeros(num_bytes // _RECORD_BYTES, dtype=RECORD)
    view = records.view(np.uint8).data if len(records) else memoryview(b"")
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], position + done)
        if got == 0:
            raise OSError(0, "the journal became shorter")
        done += got
    return records


def _read_records(descriptor: int) -> tuple[RecordArray, int]:
    """Return the file's records, a torn last one left off, and its length in bytes."""
    size = os.fstat(descriptor).st_size
    return _read(descriptor, 0, size - size % _RECORD_BYTES), size


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written

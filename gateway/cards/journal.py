"""The journal of one database: 64-byte records, each under its own checksum.

Byte map of a record, little-endian:

     0  u64  card_id    random, of the card that wrote it
     8  u64  seq        1, 2, 3, ... within the file
    16  u64  key[2]     HEADER: magic, format version
    32  u64  checksum   of the value;  HEADER: slots of the slab
    40  u64  slot       slots of the slab = none, a zero-length value
    48  u32  length     of the value, bytes;  HEADER: bytes of a slot
    52  u16  database
    54  u16  kind       HEADER (first record alone), PUT, DELETE
    56  u64  xxh64 of bytes 0..55

Replay takes the records up to the first that is not whole, in sequence and this card's,
and cuts the file there. The last record of a key wins. A lost tail forgets values or
brings replaced ones back; as a value's bytes are checked against its record on every
read, that is never wrong bytes.

At open a journal in which dead records dominate is rewritten: a snapshot beside it,
synced, then renamed over it. A kill at any point leaves the old or the new one.

Threads. The owner serialises calls; sync() may run beside append().
Failure scope. A failed append leaves the file as it was; if that can't be had the
journal refuses from then on.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from adp_kv.wire.keys import KeyArray

_logger: Final = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
RECORD: Final = np.dtype(
    [
        ("card_id", "<u8"),
        ("seq", "<u8"),
        ("key", "<u8", (2,)),
        ("checksum", "<u8"),
        ("slot", "<u8"),
        ("length", "<u4"),
        ("database", "<u2"),
        ("kind", "<u2"),
        ("record_checksum", "<u8"),
    ]
)
RecordArray: TypeAlias = NDArray[np.void]
"""RECORD [n]."""

_MAGIC: Final = int.from_bytes(b"adpkvjnl", "little")
_COMPACT_SLACK: Final = 4096  # dead records that are never worth a rewrite


class Kind(IntEnum):
    """What a record says."""

    HEADER = 1
    PUT = 2
    DELETE = 3


@dataclass(frozen=True, slots=True)
class JournalIdentity:
    """What a journal belongs to; a file that says otherwise is refused.

    Attributes:
        card_id: random 64-bit number of the card.
        database: index of the database.
        num_slots: slots of its slab.
        slot_bytes: bytes of a slot.
    """

    card_id: int
    database: int
    num_slots: int
    slot_bytes: int


class Journal:
    """One open journal (see the module's contract)."""

    def __init__(self, path: Path, identity: JournalIdentity) -> None:
        """Open or create the journal, replay it and rewrite it if that is due.

        `live` then holds the PUT records in force.

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
        self.live: RecordArray = np.empty(0, dtype=RECORD)
        self.discarded_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._size

    def append(
        self,
        kind: Kind,
        keys: KeyArray,
        slots: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
    ) -> None:
        """Add one record a key with one write: the group commit.

        Args:
            kind: PUT or DELETE.
            keys: uint64 [n, 2].
            slots: int64 [n].
            lengths: uint32 [n].
            checksums: uint64 [n], of the values.

        Raises:
            OSError: ENOSPC, EIO, ...; the file holds none of the records.
        """
        if len(keys) == 0:
            return
        records = np.zeros(len(keys), dtype=RECORD)
        records["kind"] = kind
        records["key"] = keys
        records["slot"] = slots
        records["length"] = lengths
        records["checksum"] = checksums
        self._write(records)

    def forget_live(self) -> None:
        """Drop `live` once it has been taken over: 64 bytes a value."""
        self.live = np.empty(0, dtype=RECORD)

    def sync(self) -> None:
        """Wait until the device has what was appended."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _load(self) -> None:
        whole, self._size = _read_records(self._fd)
        if len(whole):
            self._check_header(whole[0])
        good = _good_prefix(whole, self._identity)
        if good == 0:
            self._start_empty()
            return
        end = good * RECORD.itemsize
        self.discarded_bytes = self._size - end
        if self.discarded_bytes:
            os.ftruncate(self._fd, end)
        self._size = end
        self._next_seq = good + 1
        self.live = _in_force(whole[1:good], self._identity)
        dead = good - 1 - len(self.live)
        if dead > len(self.live) + _COMPACT_SLACK:
            self._compact()

    def _start_empty(self) -> None:
        self.discarded_bytes = self._size
        os.ftruncate(self._fd, 0)
        self._size = 0
        self._next_seq = 1
        self._write(self._header())

    def _header(self) -> RecordArray:
        header = np.zeros(1, dtype=RECORD)
        header["kind"] = Kind.HEADER
        header["key"] = (_MAGIC, FORMAT_VERSION)
        header["checksum"] = self._identity.num_slots
        header["length"] = self._identity.slot_bytes
        return header

    def _check_header(self, record: np.void) -> None:
        """Refuse a whole header that is not ours; a damaged one only ends the replay."""
        if not _whole(record.reshape(1))[0]:
            return
        magic, version = (int(word) for word in record["key"])
        if int(record["kind"]) != Kind.HEADER or magic != _MAGIC:
            raise CardError(f"{self._path}: not a journal; move it away or choose another path")
        if version != FORMAT_VERSION:
            raise CardError(
                f"{self._path}: journal format {version}, this version reads {FORMAT_VERSION}; "
                "start the version that wrote it, or delete the card's directory"
            )
        found = JournalIdentity(
            int(record["card_id"]),
            int(record["database"]),
            int(record["checksum"]),
            int(record["length"]),
        )
        if found != self._identity:
            raise CardError(
                f"{self._path}: belongs to {found}, this card is {self._identity}; put the "
                "card's own file back, or delete the card's directory"
            )

    def _compact(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        old = self._fd, self._size, self._next_seq
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(temporary, flags, 0o600)
        self._size, self._next_seq = 0, 1
        try:
            self._write(np.concatenate([self._header(), self.live]))
            os.fsync(self._fd)
            temporary.replace(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            # No room for both, say: the long journal serves as well, only slower to open.
            _logger.warning("%s: not compacted: %s", self._path, error.strerror)
            os.close(self._fd)
            self._fd, self._size, self._next_seq = old
            temporary.unlink(missing_ok=True)
        else:
            os.close(old[0])

    def _write(self, records: RecordArray) -> None:
        if self._broken:
            raise OSError(f"{self._path}: an earlier append could not be undone")
        seq = self._next_seq
        records["card_id"] = self._identity.card_id
        records["database"] = self._identity.database
        records["seq"] = np.arange(seq, seq + len(records))
        records["record_checksum"] = record_checksums(records)
        try:
            _write_all(self._fd, records.tobytes(), self._size)
        except OSError:
            self._undo()
            raise
        self._size += records.nbytes
        self._next_seq += len(records)

    def _undo(self) -> None:
        # Whole records of a failed append would be replayed: their caller was told "no".
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._broken = True


def sync_directory(path: Path) -> None:
    """Wait until the device has the directory's entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_checksums(records: RecordArray) -> NDArray[np.uint64]:
    """Return the xxh64 (seed 0) of the first 56 bytes of each record: uint64 [n].

    A column at a time: 1500 records cost about 0.1 ms where a call each costs 0.5.
    """
    words: NDArray[np.uint64] = np.ascontiguousarray(records.view("<u8").reshape(-1, 8).T)
    lanes = [_round(np.full_like(words[0], seed), words[i]) for i, seed in enumerate(_SEEDS)]
    turned = (_rotate(lane, turn) for lane, turn in zip(lanes, (1, 7, 12, 18), strict=True))
    mixed: NDArray[np.uint64] = np.zeros_like(words[0])
    for lane in turned:
        mixed += lane
    for lane in lanes:
        mixed ^= _round(np.zeros_like(lane), lane)
        mixed = mixed * _P1 + _P4
    mixed += np.uint64(56)
    for word in words[4:7]:
        mixed ^= _round(np.zeros_like(word), word)
        mixed = _rotate(mixed, 27) * _P1 + _P4
    mixed ^= mixed >> np.uint64(33)
    mixed *= _P2
    mixed ^= mixed >> np.uint64(29)
    mixed *= _P3
    mixed ^= mixed >> np.uint64(32)
    return mixed


_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_SEEDS: Final = (
    (int(_P1) + int(_P2)) % 2**64,
    int(_P2),
    0,
    -int(_P1) % 2**64,
)


def _rotate(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    turned: NDArray[np.uint64] = (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
    return turned


def _round(lane: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = _rotate(lane + word * _P2, 31) * _P1
    return mixed


def _whole(records: RecordArray) -> NDArray[np.bool_]:
    matches: NDArray[np.bool_] = records["record_checksum"] == record_checksums(records)
    return matches


def _read_records(descriptor: int) -> tuple[RecordArray, int]:
    """Return the file's records, a torn last one left off, and its length in bytes."""
    size = os.fstat(descriptor).st_size
    records = np.zeros(size // RECORD.itemsize, dtype=RECORD)
    view = records.view(np.uint8).data if len(records) else memoryview(b"")
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], done)
        if got == 0:
            break
        done += got
    return records[: done // RECORD.itemsize], size


def _good_prefix(records: RecordArray, identity: JournalIdentity) -> int:
    """Return how many records from the first on can be believed."""
    good = _whole(records)
    good &= records["seq"] == np.arange(1, len(records) + 1, dtype=np.uint64)
    good &= records["card_id"] == np.uint64(identity.card_id)
    good &= records["database"] == identity.database
    good &= records["slot"] <= identity.num_slots
    good &= (records["length"] <= identity.slot_bytes) | (records["kind"] == Kind.HEADER)
    return len(good) if good.all() else int(np.argmin(good))


def _in_force(records: RecordArray, identity: JournalIdentity) -> RecordArray:
    """Return the PUT records that no later record of their key replaces."""
    keys = np.ascontiguousarray(records["key"])
    order = np.lexsort((records["seq"], keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    last = np.ones(len(records), dtype=np.bool_)
    last[:-1] = (ordered[1:] != ordered[:-1]).any(axis=1)
    chosen = np.sort(order[last])
    live = records[chosen]
    live = live[live["kind"] == Kind.PUT]
    # A delete whose append failed leaves its PUT behind; whoever took the slot later has it.
    newest_first = live[::-1]
    _, first = np.unique(newest_first["slot"], return_index=True)
    sole = np.zeros(len(live), dtype=np.bool_)
    sole[first] = True
    sole |= newest_first["slot"] == identity.num_slots
    in_force: RecordArray = newest_first[sole][::-1]
    return in_force


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written

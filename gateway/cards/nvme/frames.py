"""The 16-byte header of every stored value, and how it joins the value without a copy.

    stored value = header (16 bytes) || value

Byte map of a header, little-endian:

     0  u64  xxh3_64 of the value, seeded with its key
     8  u32  value bytes
    12  u8   key byte 11 (the block dialect does not send it to the device)
    13  u8   format version
    14  u16  magic

One command moves up to three pieces of memory: the header, which ends at the end of a
page of a frame; the value, which starts at a page of the ring; and, where the dialect
moves whole pages, a page's worth of padding. Between the pieces there is no gap within a
page, so the kernel hands all of it to the device as it is (NVMe PRP lists allow just
that); memory behind the value is not touched.

Threads. A frame belongs to one part of a batch at a time; the pool has its lock.
It must not know commands or devices.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.units import PAGE_BYTES
from adp_kv.wire.keys import KeyArray
from gateway.cards.batches import value_checksums
from gateway.cards.nvme.commands import Buffers, displaced_key_bytes

HEADER: Final = np.dtype(
    [
        ("checksum", "<u8"),
        ("length", "<u4"),
        ("key_byte", "u1"),
        ("version", "u1"),
        ("magic", "<u2"),
    ]
)
HEADER_BYTES: Final = HEADER.itemsize
_MAGIC: Final = int.from_bytes(b"kv", "little")
_VERSION: Final = 1
_PIECES: Final = 3
_PAGE_MASK: Final = np.uint32(PAGE_BYTES - 1)


class Frame:
    """Headers and iovecs of up to `rows` commands.

    Attributes:
        headers: HEADER [rows], each at the end of a page.
    """

    def __init__(self, rows: int) -> None:
        """Map the memory: a page a row, one of zeros to store and one to read padding into."""
        self._map = mmap.mmap(-1, (rows + 2) * PAGE_BYTES)
        self.headers: NDArray[np.void] = np.ndarray(
            (rows,), HEADER, self._map, offset=PAGE_BYTES - HEADER_BYTES, strides=(PAGE_BYTES,)
        )
        self._vectors: NDArray[np.uint64] = np.zeros((rows, _PIECES, 2), dtype=np.uint64)
        base = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        self._header_addresses = np.arange(rows, dtype=np.uint64) * np.uint64(
            PAGE_BYTES
        ) + np.uint64(base + PAGE_BYTES - HEADER_BYTES)
        self._zeros = base + rows * PAGE_BYTES
        self._scratch = self._zeros + PAGE_BYTES

    def aim(
        self,
        rows: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        transfers: NDArray[np.uint32],
        *,
        storing: bool,
    ) -> Buffers:
        """Lay header, value and padding of commands out.

        Args:
            rows: int64 [n], of this frame.
            addresses: uint64 [n], of values, page-aligned where not empty.
            lengths: uint32 [n], of values.
            transfers: uint32 [n], >= HEADER_BYTES + lengths; what is moved.
            storing: padding is zeros; otherwise it goes where nobody looks.
        """
        behind = transfers - np.uint32(HEADER_BYTES)
        whole_pages = (lengths + _PAGE_MASK) & ~_PAGE_MASK
        in_value = np.minimum(behind, whole_pages)
        padding = behind - in_value
        pad_address = self._zeros if storing else self._scratch
        pieces = self._vectors[rows]
        pieces[:, 0, 0] = self._header_addresses[rows]
        pieces[:, 0, 1] = HEADER_BYTES
        empty = in_value == 0
        pieces[:, 1, 0] = np.where(empty, np.uint64(pad_address), addresses)
        pieces[:, 1, 1] = np.where(empty, padding, in_value)
        pieces[:, 2, 0] = pad_address
        pieces[:, 2, 1] = padding
        self._vectors[rows] = pieces
        counts = 1 + (in_value > 0).astype(np.uint32) + (padding > 0)
        stride = np.uint64(_PIECES * 2 * 8)
        vectors = np.uint64(self._vectors.ctypes.data) + rows.astype(np.uint64) * stride
        return Buffers(vectors, counts.astype(np.uint32), lengths + np.uint32(HEADER_BYTES))

    def seal(
        self,
        rows: NDArray[np.int64],
        keys: KeyArray,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> None:
        """Fill the headers of values about to be stored."""
        headers = np.zeros(len(rows), dtype=HEADER)
        headers["checksum"] = _checksums(keys, addresses, lengths)
        headers["length"] = lengths
        headers["key_byte"] = displaced_key_bytes(keys)
        headers["version"] = _VERSION
        headers["magic"] = _MAGIC
        self.headers[rows] = headers

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Forget headers, so that one the device never sent is not mistaken for an answer."""
        self.headers[rows] = np.zeros(len(rows), dtype=HEADER)

    def is_whole(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which headers are of this format: bool [n]."""
        headers = self.headers[rows]
        whole: NDArray[np.bool_] = (headers["magic"] == _MAGIC) & (headers["version"] == _VERSION)
        return whole

    def is_ours(self, rows: NDArray[np.int64], keys: KeyArray) -> NDArray[np.bool_]:
        """Return which headers are whole and belong to keys, as far as they tell: bool [n]."""
        same: NDArray[np.bool_] = self.headers[rows]["key_byte"] == displaced_key_bytes(keys)
        return self.is_whole(rows) & same

    def matches(
        self,
        rows: NDArray[np.int64],
        keys: KeyArray,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        """Return which values in memory are exactly those their headers speak of: bool [n]."""
        headers = self.headers[rows]
        same: NDArray[np.bool_] = self.is_ours(rows, keys) & (headers["length"] == lengths)
        check = np.flatnonzero(same)
        found = _checksums(keys[check], addresses[check], lengths[check])
        same[check] = found == headers["checksum"][check]
        return same


def _checksums(
    keys: KeyArray, addresses: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    # Not seeded with the database: a namespace keeps its values wherever it is listed.
    return value_checksums(keys, np.zeros(len(keys), dtype=np.uint16), addresses, lengths)


class FramePool:
    """A bounded number of frames, and those that wait for one in order."""

    def __init__(self, num_frames: int, rows: int) -> None:
        """Make the frames."""
        self._lock = threading.Lock()
        self._free = [Frame(rows) for _ in range(num_frames)]
        self._waiting: deque[Callable[[Frame | None], None]] = deque()

    def take(self, use: Callable[[Frame | None], None]) -> None:
        """Call use(frame) now or on the thread that gives one back; use(None) if abandoned."""
        with self._lock:
            if not self._free:
                self._waiting.append(use)
                return
            frame = self._free.pop()
        use(frame)

    def give_back(self, frame: Frame) -> None:
        """End the use of a frame; no command points into it any more."""
        with self._lock:
            if not self._waiting:
                self._free.append(frame)
                return
            use = self._waiting.popleft()
        use(frame)

    def abandon(self) -> None:
        """Call use(None) for all that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for use in waiting:
            use(None)

"""Byte map of the ring file's first page.

    offset  size  field
         0     8  magic "ADPKVRNG"
         8     4  version (uint32)
        12     4  state: 0 undivided, 1 divided
        16     8  generation: random per ring file, never 0
        24     8  shared_memory_size: bytes of slots that were asked for
        32     8  io_size: bytes of the largest object
        40     8  slot_bytes: io_size rounded up to 4096, the distance between slots
        48     4  num_read_slots (= max_parallel_ios)
        52     4  num_write_slots (= max_parallel_ios)
        56     8  CRC-32 of bytes 0..55 (uint64)
      4096     -  read slots, then write slots

All integers little-endian. Only the gateway writes this page, once before the file
becomes visible to ranks; everyone else compares it with what the gateway told them.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from adp_kv.errors import RingError
from adp_kv.units import PAGE_BYTES, align_up

MAGIC = b"ADPKVRNG"
VERSION = 1
HEADER_BYTES = PAGE_BYTES
_FIELDS = struct.Struct("<8sIIQQQQII")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The ring's geometry; num_slots counts one direction.

    Attributes:
        generation: random, non-zero; tells one ring file from another of the same name.
        shared_memory_size: bytes for slots, both directions.
        io_size: bytes of the largest object.
    """

    generation: int
    shared_memory_size: int
    io_size: int

    @property
    def slot_bytes(self) -> int:
        """Distance between two slots; a multiple of 4096."""
        return align_up(self.io_size, PAGE_BYTES)

    @property
    def num_slots(self) -> int:
        """Slots of one direction: (shared_memory_size / 2) / io_size, slots page-aligned."""
        return (self.shared_memory_size // 2) // self.slot_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the ring file."""
        return HEADER_BYTES + align_up(self.shared_memory_size, PAGE_BYTES)

    def read_offset(self, slot: int) -> int:
        """Byte offset of a read slot in the file."""
        return HEADER_BYTES + slot * self.slot_bytes

    def write_offset(self, slot: int) -> int:
        """Byte offset of a write slot in the file."""
        return HEADER_BYTES + (self.num_slots + slot) * self.slot_bytes

    def pack(self) -> bytes:
        """Return the header page's leading bytes."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            1,
            self.generation,
            self.shared_memory_size,
            self.io_size,
            self.slot_bytes,
            self.num_slots,
            self.num_slots,
        )
        return fields + _CHECK.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, page: bytes) -> RingHeader:
        """Read a header page.

        Raises:
            RingError: It is no ring, of another version, or damaged.
        """
        if len(page) < _FIELDS.size + _CHECK.size or page[:8] != MAGIC:
            raise RingError("not a ring file: wrong magic; is another program using this name?")
        fields = page[: _FIELDS.size]
        _, version, state, generation, size, io_size, *_ = _FIELDS.unpack(fields)
        if version != VERSION:
            raise RingError(
                f"ring version {version}, this side speaks {VERSION}: "
                "run the same adp-kv release in the gateway and in the engine"
            )
        (check,) = _CHECK.unpack_from(page, _FIELDS.size)
        if state != 1 or check != zlib.crc32(fields):
            raise RingError("ring header is damaged or unfinished: restart the gateway")
        return cls(generation=generation, shared_memory_size=size, io_size=io_size)


def divide(shared_memory_size: int, io_size: int, generation: int) -> RingHeader:
    """Return the header of a ring for objects of io_size bytes.

    Raises:
        RingError: Not even one slot a direction fits; names the size needed.
    """
    header = RingHeader(generation, shared_memory_size, io_size)
    if io_size < 1 or header.num_slots < 1:
        raise RingError(
            f"shared_memory_size = {shared_memory_size} bytes holds no slot of "
            f"{header.slot_bytes} bytes in each direction; set it to at least "
            f"{2 * header.slot_bytes} (many times that for speed)"
        )
    return header

"""The header in front of a value on a store that is not ours alone.

    stored value = header (16 bytes) || value

Byte map, little-endian: u64 xxh3_64 of the value seeded with its key, u32 value bytes, u16
format version, u16 magic. So another program's value, a cut one or that of another key is
CORRUPT and never wrong bytes.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

VERSION: Final = 1
MAGIC: Final = int.from_bytes(b"kv", "little")

HEADER: Final = struct.Struct("<QIHH")
"""checksum, length, version, magic."""

HEADERS: Final = np.dtype(
    [("checksum", "<u8"), ("length", "<u4"), ("version", "<u2"), ("magic", "<u2")]
)
"""The same for many at once."""

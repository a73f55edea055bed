"""The ring's first page: what is packed comes back, and nothing else is believed."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_kv.errors import RingError
from adp_kv.ring.header import HEADER_BYTES, MAGIC, RingHeader, divide

HEADER = RingHeader(generation=0x1122334455667788, shared_memory_size=1 << 20, io_size=5000)
VECTOR = (
    b"ADPKVRNG\x01\x00\x00\x00\x01\x00\x00\x00\x88wfUD3\x22\x11\x00\x00\x10\x00\x00\x00\x00\x00"
    b"\x88\x13\x00\x00\x00\x00\x00\x00\x00 \x00\x00\x00\x00\x00\x00@\x00\x00\x00@\x00\x00\x00"
)


@given(st.integers(1, 2**64 - 1), st.integers(8192, 1 << 43), st.integers(1, 4096))
def test_header_comes_back(generation, size, io_size):
    header = RingHeader(generation, size, io_size)
    assert RingHeader.unpack(header.pack().ljust(HEADER_BYTES, b"\0")) == header


def test_header_bytes_are_as_documented():
    packed = HEADER.pack()
    assert packed == VECTOR + struct.pack("<Q", zlib.crc32(VECTOR))


@pytest.mark.parametrize("byte", range(64))
def test_damaged_byte_is_refused(byte):
    page = bytearray(HEADER.pack())
    page[byte] ^= 0x10
    with pytest.raises(RingError):
        RingHeader.unpack(bytes(page))


@pytest.mark.parametrize("length", [0, 7, 8, 55, 63])
def test_short_page_is_refused(length):
    with pytest.raises(RingError, match="magic"):
        RingHeader.unpack(HEADER.pack()[:length])


def test_other_version_names_both():
    fields = bytearray(VECTOR)
    fields[8] = 9
    page = bytes(fields) + struct.pack("<Q", zlib.crc32(fields))
    with pytest.raises(RingError, match=r"version 9.* speaks 1"):
        RingHeader.unpack(page)


def test_undivided_ring_is_refused():
    fields = bytearray(VECTOR)
    fields[12] = 0
    page = bytes(fields) + struct.pack("<Q", zlib.crc32(fields))
    with pytest.raises(RingError, match="unfinished"):
        RingHeader.unpack(page)
    assert page[:8] == MAGIC


@given(st.integers(8192, 1 << 40), st.integers(1, 1 << 30))
def test_slots_are_apart_and_inside(size, io_size):
    header = RingHeader(1, size, io_size)
    n = header.num_slots
    assert n == (size // 2) // header.slot_bytes
    assert header.slot_bytes % 4096 == 0 <= header.slot_bytes - io_size < 4096
    if n:
        assert header.read_offset(0) == HEADER_BYTES
        assert header.read_offset(n) == header.write_offset(0)
        assert header.write_offset(n - 1) + header.slot_bytes <= header.file_bytes


@pytest.mark.parametrize(("size", "io_size"), [(8191, 4096), (8192, 4097), (1 << 20, 0)])
def test_no_slot_names_the_size_needed(size, io_size):
    with pytest.raises(RingError, match="set it to at least"):
        divide(size, io_size, 1)
    assert divide(8192, 4096, 1).num_slots == 1

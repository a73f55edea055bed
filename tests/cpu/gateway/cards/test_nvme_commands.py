"""The 72 bytes of a command, and what the software device makes of them."""

import ctypes
import struct

import numpy as np
import pytest

from gateway.cards.base import Status
from gateway.cards.nvme.commands import (
    COMMAND,
    DIALECTS,
    ONLY_IF_ABSENT,
    Buffers,
    CommandBuilder,
    displaced_key_bytes,
)
from gateway.cards.nvme.status import describe, entry_status
from tests.support.nvme_device import SoftDevice

KEY = bytes(range(0xA0, 0xB0))
KEYS = np.frombuffer(KEY, "<u8").reshape(1, 2).copy()
NSID = np.array([7], np.uint32)


class Memory:
    """Buffers of one command, in the pieces given."""

    def __init__(self, *pieces, num_bytes=None):
        self.pieces = [ctypes.create_string_buffer(p, len(p)) for p in pieces]
        self.vector = np.array(
            [[ctypes.addressof(p), len(p)] for p in self.pieces], np.uint64
        ).reshape(-1, 2)
        total = sum(len(p) for p in pieces) if num_bytes is None else num_bytes
        self.buffers = Buffers(
            np.array([self.vector.ctypes.data], np.uint64),
            np.array([len(pieces)], np.uint32),
            np.array([total], np.uint32),
        )

    @property
    def content(self):
        return b"".join(p.raw for p in self.pieces)


def builder(dialect="standard"):
    return CommandBuilder(DIALECTS[dialect], 30_000)


def words(command):
    raw = command.tobytes()
    assert len(raw) == COMMAND.itemsize == 72
    return {
        "opcode": raw[0],
        "nsid": struct.unpack_from("<I", raw, 4)[0],
        "key": raw[8:16] + raw[56:64],
        "address": struct.unpack_from("<Q", raw, 24)[0],
        "vectors": struct.unpack_from("<I", raw, 36)[0],
        "cdw10": struct.unpack_from("<I", raw, 40)[0],
        "cdw11": struct.unpack_from("<I", raw, 44)[0],
        "cdw12": struct.unpack_from("<I", raw, 48)[0],
        "timeout": struct.unpack_from("<I", raw, 64)[0],
    }


def test_standard_store_has_the_specified_layout():
    memory = Memory(b"x" * 16, b"y" * 84)
    found = words(builder().store(NSID, KEYS, memory.buffers, ONLY_IF_ABSENT))
    assert found == {
        "opcode": 0x01,
        "nsid": 7,
        "key": KEY,
        "address": memory.vector.ctypes.data,
        "vectors": 2,
        "cdw10": 100,
        "cdw11": 2 << 8 | 16,
        "cdw12": 0,
        "timeout": 30_000,
    }


def test_block_store_has_the_dialects_layout():
    memory = Memory(b"x" * 8192, num_bytes=5000)
    found = words(builder("block").store(NSID, KEYS, memory.buffers, ONLY_IF_ABSENT))
    assert found["key"] == KEY[:11] + b"\x01" + KEY[12:]
    assert (found["cdw10"], found["cdw12"]) == (8192, 15)
    assert found["cdw11"] == 2 << 8 | 16
    assert displaced_key_bytes(KEYS).tolist() == [KEY[11]]


@pytest.mark.parametrize(
    ("make", "opcode"),
    [
        pytest.param(lambda b: b.exist(NSID, KEYS), 0x14, id="exist"),
        pytest.param(lambda b: b.delete(NSID, KEYS), 0x10, id="delete"),
    ],
)
def test_command_without_data_names_the_key(make, opcode):
    found = words(make(builder()))
    assert (found["opcode"], found["key"], found["cdw11"]) == (opcode, KEY, 16)
    assert found["address"] == found["vectors"] == found["cdw10"] == 0


def test_retrieve_and_list_name_the_buffer():
    memory = Memory(b"x" * 64)
    found = words(builder().retrieve(NSID, KEYS, memory.buffers))
    assert (found["opcode"], found["cdw10"], found["cdw11"]) == (0x02, 64, 16)
    found = words(builder().list_from(7, None, memory.buffers))
    assert (found["opcode"], found["cdw10"], found["cdw11"]) == (0x06, 64, 0)
    assert words(builder().list_from(7, KEYS, memory.buffers))["key"] == KEY


def run(device, command):
    return device.execute(command.tobytes())


def test_device_keeps_to_the_store_options():
    device, build = SoftDevice(), builder()
    value = Memory(b"v" * 32)
    assert run(device, build.store(NSID, KEYS, value.buffers, 1))[0] == 0x87
    assert run(device, build.store(NSID, KEYS, value.buffers, ONLY_IF_ABSENT))[0] == 0
    assert run(device, build.store(NSID, KEYS, value.buffers, ONLY_IF_ABSENT))[0] == 0x89
    assert run(device, build.store(NSID, KEYS, value.buffers, 0))[0] == 0


def test_device_reports_size_beyond_a_short_buffer():
    device, build = SoftDevice(), builder()
    value = Memory(b"0123456789abcdef" * 4)
    run(device, build.store(NSID, KEYS, value.buffers, 0))
    short = Memory(b"\0" * 4, b"\0" * 8)
    assert run(device, build.retrieve(NSID, KEYS, short.buffers)) == (0, 64)
    assert short.content == b"0123456789ab"
    assert run(device, build.delete(NSID, KEYS))[0] == 0
    assert run(device, build.retrieve(NSID, KEYS, short.buffers))[0] == 0x87
    assert run(device, build.delete(NSID, KEYS))[0] == 0
    device.fails_absent_delete = True
    assert run(device, build.delete(NSID, KEYS))[0] == 0x87


@pytest.mark.parametrize("key_bytes", [0, 17])
def test_device_refuses_keys_of_other_lengths(key_bytes):
    command = builder().exist(NSID, KEYS)
    command["cdw11"] = key_bytes
    result, _ = run(SoftDevice(), command)
    assert result == 0x4086
    assert entry_status(np.array([result], np.int32), reading=False).tolist() == [Status.IO_ERROR]
    assert "INVALID_KEY_SIZE" in describe(result)


def test_device_refuses_long_values_and_transfers():
    build = builder()
    value = Memory(b"v" * 4096)
    store = build.store(NSID, KEYS, value.buffers, 0)
    assert run(SoftDevice(value_max=4095), store)[0] == 0x4085
    assert run(SoftDevice(max_transfer=4095), store)[0] == -22
    assert run(SoftDevice(slots=0), store)[0] == 0x81


def test_device_lists_keys_by_the_page():
    device, build = SoftDevice(), builder()
    stored = sorted(struct.pack("<QQ", i * 7919 % 101, i) for i in range(50))
    device.values = dict.fromkeys(stored, b"")
    page, seen, first = Memory(b"\0" * 204), [], None
    while True:
        assert run(device, build.list_from(7, first, page.buffers))[0] == 0
        (count,) = struct.unpack_from("<I", page.content)
        keys = [page.content[6 + 20 * i : 22 + 20 * i] for i in range(count)]
        seen += keys if first is None else keys[1:]
        if count < 2:
            break
        first = np.frombuffer(keys[-1], "<u8").reshape(1, 2).copy()
    assert seen == stored


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param({"cdw14": 0}, id="command-set"),
        pytest.param({"cdw12": 3}, id="blocks"),
        pytest.param({"cdw10": 4095}, id="bytes"),
        pytest.param({"cdw11": 16}, id="option"),
    ],
)
def test_block_device_refuses_the_standard_form(spoil):
    memory = Memory(b"x" * 4096)
    command = builder("block").store(NSID, KEYS, memory.buffers, ONLY_IF_ABSENT)
    assert run(SoftDevice("block"), command)[0] == 0
    for name, value in spoil.items():
        command[name] = value
    assert run(SoftDevice("block"), command)[0] == 0x4002

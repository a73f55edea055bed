"""NVMe key-value commands as 72-byte rows, and how devices differ about them.

Byte map of a command (struct nvme_uring_cmd; the ioctl's struct adds a u64 result):

     0 u8 opcode   1 u8 flags   2 u16 -   4 u32 nsid
     8 u32 cdw2   12 u32 cdw3                key bytes 0..7
    16 u64 metadata
    24 u64 address   of iovecs (every command goes by the vectored form)
    32 u32 metadata length   36 u32 number of iovecs
    40 u32 cdw10   bytes of the value (store) or of the buffer (retrieve, list)
    44 u32 cdw11   key length in bits 7:0, options in bits 15:8
    48 u32 cdw12   52 u32 cdw13
    56 u32 cdw14   60 u32 cdw15              key bytes 8..15
    64 u32 timeout in ms   68 u32 -

Dialects. `standard` is the NVM Express Key Value command set. `block` is spoken by cards
whose KV commands go through a namespace that the kernel takes for a block device: bits
31:24 of cdw14 name the command set and so displace key byte 11, cdw12 has the size in
512-byte blocks less one, transfers are multiples of 4096 up to 270336, and a store must
say "only if absent". What only the standard promises (exist, list, a store that replaces)
is not asked of a block device.

Threads: pure functions. It must not know files, rings or values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.units import PAGE_BYTES
from adp_kv.wire.keys import KEY_BYTES, KeyArray


class Opcode(IntEnum):
    """Commands of the key-value set; bits 1:0 say which way data goes."""

    STORE = 0x01
    RETRIEVE = 0x02
    LIST = 0x06
    DELETE = 0x10
    EXIST = 0x14


COMMAND: Final = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
        ("nsid", "<u4"),
        ("cdw2", "<u4"),
        ("cdw3", "<u4"),
        ("metadata", "<u8"),
        ("address", "<u8"),
        ("metadata_bytes", "<u4"),
        ("vectors", "<u4"),
        ("cdw10", "<u4"),
        ("cdw11", "<u4"),
        ("cdw12", "<u4"),
        ("cdw13", "<u4"),
        ("cdw14", "<u4"),
        ("cdw15", "<u4"),
        ("timeout_ms", "<u4"),
        ("reserved2", "<u4"),
    ]
)
CommandArray: TypeAlias = NDArray[np.void]
"""COMMAND [n]."""

DialectName: TypeAlias = Literal["standard", "block"]

ONLY_IF_ABSENT: Final = 2
"""Option of a store; 0 replaces what is there."""

BLOCK_BYTES: Final = 512
_OPTION_SHIFT: Final = 8
_COMMAND_SET_SHIFT: Final = 24
_KV_COMMAND_SET: Final = 1


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a kind of device wants its commands.

    Attributes:
        name: in settings and messages.
        transfer_bytes: power of two; transfers are multiples of it.
        max_transfer_bytes: longest transfer whatever the device says; None: as it says.
        counts_blocks: cdw10 is the transfer, cdw12 its blocks less one.
        names_command_set: bits 31:24 of cdw14 do, so that key byte 11 is lost.
        replaces: a store without option replaces a value in one step.
        has_exist: EXIST works; otherwise a short RETRIEVE stands for it.
        has_identify: Identify must know the key-value namespace, and LIST its keys.
    """

    name: DialectName
    transfer_bytes: int
    max_transfer_bytes: int | None
    counts_blocks: bool
    names_command_set: bool
    replaces: bool
    has_exist: bool
    has_identify: bool


DIALECTS: Final = MappingProxyType(
    {
        "standard": Dialect(
            name="standard",
            transfer_bytes=8,
            max_transfer_bytes=None,
            counts_blocks=False,
            names_command_set=False,
            replaces=True,
            has_exist=True,
            has_identify=True,
        ),
        "block": Dialect(
            name="block",
            transfer_bytes=PAGE_BYTES,
            max_transfer_bytes=270336,
            counts_blocks=True,
            names_command_set=True,
            replaces=False,
            has_exist=False,
            has_identify=False,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where the data of n commands is.

    Attributes:
        addresses: uint64 [n], of iovec arrays.
        counts: uint32 [n], iovecs of each.
        num_bytes: uint32 [n], bytes of the value or for it; not rounded up.
    """

    addresses: NDArray[np.uint64]
    counts: NDArray[np.uint32]
    num_bytes: NDArray[np.uint32]


class CommandBuilder:
    """Rows of commands in one dialect."""

    def __init__(self, dialect: Dialect, timeout_ms: int) -> None:
        """Build for `dialect`; the kernel gives a command up after `timeout_ms`."""
        self.dialect = dialect
        self._timeout_ms = timeout_ms

    def transfer_sizes(self, num_bytes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return how many bytes move for values of `num_bytes`: uint32 [n]."""
        mask = np.uint32(self.dialect.transfer_bytes - 1)
        return (num_bytes + mask) & ~mask

    def store(
        self, nsids: NDArray[np.uint32], keys: KeyArray, data: Buffers, option: int
    ) -> CommandArray:
        """Return commands that store values under keys."""
        return self._with_data(Opcode.STORE, nsids, keys, data, option)

    def retrieve(self, nsids: NDArray[np.uint32], keys: KeyArray, data: Buffers) -> CommandArray:
        """Return commands that read values; a longer value is cut to the buffer."""
        return self._with_data(Opcode.RETRIEVE, nsids, keys, data, 0)

    def exist(self, nsids: NDArray[np.uint32], keys: KeyArray) -> CommandArray:
        """Return commands that ask for keys."""
        return self._plain(Opcode.EXIST, nsids, keys)

    def delete(self, nsids: NDArray[np.uint32], keys: KeyArray) -> CommandArray:
        """Return commands that delete keys; an absent one may be a success."""
        return self._plain(Opcode.DELETE, nsids, keys)

    def list_from(self, nsid: int, first: KeyArray | None, data: Buffers) -> CommandArray:
        """Return one command that lists keys, from `first` (uint64 [1, 2]) or the start."""
        nsids = np.array([nsid], dtype=np.uint32)
        keys = np.zeros((1, 2), dtype=np.uint64) if first is None else first
        command = self._with_data(Opcode.LIST, nsids, keys, data, 0)
        if first is None:
            command["cdw11"] = 0
        return command

    def _plain(self, opcode: Opcode, nsids: NDArray[np.uint32], keys: KeyArray) -> CommandArray:
        commands = np.zeros(len(keys), dtype=COMMAND)
        words = np.ascontiguousarray(keys).view("<u4")
        commands["opcode"] = opcode
        commands["nsid"] = nsids
        commands["cdw2"], commands["cdw3"] = words[:, 0], words[:, 1]
        commands["cdw14"], commands["cdw15"] = words[:, 2], words[:, 3]
        commands["cdw11"] = KEY_BYTES
        commands["timeout_ms"] = self._timeout_ms
        if self.dialect.names_command_set:
            low = np.uint32((1 << _COMMAND_SET_SHIFT) - 1)
            commands["cdw14"] = (words[:, 2] & low) | np.uint32(
                _KV_COMMAND_SET << _COMMAND_SET_SHIFT
            )
        return commands

    def _with_data(
        self,
        opcode: Opcode,
        nsids: NDArray[np.uint32],
        keys: KeyArray,
        data: Buffers,
        option: int,
    ) -> CommandArray:
        commands = self._plain(opcode, nsids, keys)
        commands["address"] = data.addresses
        commands["vectors"] = data.counts
        commands["cdw10"] = data.num_bytes
        commands["cdw11"] |= np.uint32(option << _OPTION_SHIFT)
        if self.dialect.counts_blocks:
            transfers = self.transfer_sizes(data.num_bytes)
            commands["cdw10"] = transfers
            commands["cdw12"] = transfers // np.uint32(BLOCK_BYTES) - np.uint32(1)
        return commands


def displaced_key_bytes(keys: KeyArray) -> NDArray[np.uint8]:
    """Return key byte 11 of each key, which the block dialect does not send: uint8 [n]."""
    return (keys[:, 1] >> np.uint64(_COMMAND_SET_SHIFT)).astype(np.uint8)

"""Settings of the Mooncake card, checked where they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from adp_kv.errors import ConfigError
from adp_kv.units import GiB, MiB

_RANGES: Final = {
    "replicas": (1, 16),
    "max_value_bytes": (1, 256 * MiB),
    "threads": (1, 64),
    "batch_rows": (1, 4096),
    "connect_timeout_s": (0.1, 3600),
    "io_timeout_s": (0.1, 3600),
    "reconnect_s": (0, 3600),
    "close_timeout_s": (0, 3600),
}
_SEGMENT_BYTES: Final = (16 * MiB, 1024 * GiB)  # the engine's own
_MAX_PREFIX: Final = 64
_MASTER: Final = re.compile(
    r"(?P<address>(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/?\[\]]+):(?P<port>\d{1,5}))"
    r"(\?space=(?P<space>[\w.-]{1,64}))?"
)
_PROTOCOLS: Final = ("tcp", "rdma")


@dataclass(frozen=True, slots=True)
class Master:
    """A store, and a key space in it.

    Attributes:
        text: as in the settings.
        address: HOST:PORT as the engine takes it.
        host: of that.
        port: of that.
        space: name of the key space, "" for the unnamed one.
    """

    text: str
    address: str
    host: str
    port: int
    space: str


def parse_master(text: str) -> Master:
    """Return the parts of HOST:PORT, with ?space=NAME or not.

    Raises:
        ConfigError: It is no such thing.
    """
    match = _MASTER.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigError(f"masters: {text!r}: expected HOST:PORT, with ?space=NAME or not")
    host = match["host"].strip("[]")
    return Master(text, match["address"], host, int(match["port"]), match["space"] or "")


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the Mooncake card.

    Attributes:
        masters: HOST:PORT of a Mooncake master, with ?space=NAME for another key space of the
            same store; one a database of the card, in order.
        protocol: tcp, or rdma.
        rdma_devices: names of RDMA devices, separated by commas; empty: the engine chooses.
        metadata_server: the transfer engine's; P2PHANDSHAKE needs none.
        local_host: this host as the store's machines reach it; matters with rdma and
            segment_bytes.
        segment_bytes: RAM of this gateway that the store may use, gone when it ends; 0: none.
        replicas: copies of each value, on different segments.
        key_prefix: before the 32 hexadecimal digits of each key, to share a store.
        max_value_bytes: the longest value.
        threads: that call the engine, for each database.
        batch_rows: entries of one call, at most 8 MiB of values.
        connect_timeout_s: to reach the master.
        io_timeout_s: for one answer of the master, and for a transfer that does not move; whole
            seconds for the latter. Whoever waits for a silent store waits a few times this.
        reconnect_s: how long a master that does not answer is left alone.
        close_timeout_s: seconds that close() lets batches finish.
    """

    masters: tuple[str, ...]
    protocol: str = "tcp"
    rdma_devices: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    local_host: str = "127.0.0.1"
    segment_bytes: int = 0
    replicas: int = 1
    key_prefix: str = "adp:"
    max_value_bytes: int = 2 * MiB
    threads: int = 2
    batch_rows: int = 32
    connect_timeout_s: float = 3.0
    io_timeout_s: float = 3.0
    reconnect_s: float = 1.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.masters:
            raise ConfigError("masters: empty; name one, such as 127.0.0.1:50051")
        if len({(m.address, m.space) for m in self.parsed_masters}) != len(self.masters):
            raise ConfigError("masters: one is named twice; use ?space=NAME to tell them apart")
        if self.protocol not in _PROTOCOLS:
            raise ConfigError(f"protocol: {self.protocol!r}: one of {', '.join(_PROTOCOLS)}")
        if self.rdma_devices and self.protocol != "rdma":
            raise ConfigError("rdma_devices: set, but protocol is not rdma")
        if not (self.metadata_server and self.local_host):
            raise ConfigError("metadata_server, local_host: neither may be empty")
        if len(self.key_prefix.encode()) > _MAX_PREFIX:
            raise ConfigError(f"key_prefix: longer than {_MAX_PREFIX} bytes")
        for name, (lowest, highest) in _RANGES.items():
            _check_range(name, getattr(self, name), lowest, highest)
        if self.segment_bytes:
            lowest, highest = _SEGMENT_BYTES
            _check_range("segment_bytes", self.segment_bytes, lowest, highest)

    @property
    def parsed_masters(self) -> list[Master]:
        """The masters' parts."""
        return [parse_master(text) for text in self.masters]


def _check_range(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(f"{name}: {value} is not in {lowest:g}..{highest:g}")

"""Settings of the Mooncake card, checked where they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from adp_kv.errors import ConfigError
from adp_kv.units import GiB, MiB
from gateway.cards.settings import LaneSettings, check_range

_SEGMENT_BYTES: Final = (16 * MiB, 1024 * GiB)  # the engine's own
_LEAST_TIMEOUT_S: Final = 0.1
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


class MooncakeSettings(LaneSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    threads: int = 2
    batch_rows: int = 32

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
        self.check_shared(_LEAST_TIMEOUT_S)
        check_range("replicas", self.replicas, 1, 16)
        check_range("threads", self.threads, 1, 64)
        check_range("batch_rows", self.batch_rows, 1, 4096)
        if self.segment_bytes:
            check_range("segment_bytes", self.segment_bytes, *_SEGMENT_BYTES)

    @property
    def parsed_masters(self) -> list[Master]:
        """The masters' parts."""
        return [parse_master(text) for text in self.masters]

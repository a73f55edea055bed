"""Settings of the NVMe key-value card, checked where they are made."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from adp_kv.errors import ConfigError
from adp_kv.units import PAGE_BYTES
from gateway.cards.nvme.commands import DialectName
from gateway.cards.settings import check_range

ExecutorKind: TypeAlias = Literal["auto", "io_uring", "ioctl"]

_MAX_QUEUE_DEPTH: Final = 4096
_COMMAND_TIMEOUT_S: Final = (0.001, 3600)  # the kernel is told milliseconds; 0 is its default


class NvmeKvSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the NVMe key-value card.

    Attributes:
        devices: namespaces, one a database, in order: /dev/ngXnY for the standard dialect,
            /dev/ngXnY or /dev/nvmeXnY for the block dialect.
        dialect: "standard" or "block"; see `gateway.cards.nvme.commands`.
        max_value_bytes: longest value, a multiple of 4096, where the device takes more; 0: as
            it takes.
        io_engine: "auto" (io_uring where it works), "io_uring" or "ioctl".
        queue_depth: commands in flight, io_uring.
        io_threads: commands in flight, ioctl.
        checker_threads: threads that compute checksums and build commands.
        command_timeout_s: after which the kernel gives a command up: IO_ERROR.
        count_timeout_s: how long open() may list keys to know how many there are; 0: not.
        close_timeout_s: seconds that close() lets batches finish.
    """

    devices: tuple[str, ...]
    dialect: DialectName = "standard"
    max_value_bytes: int = 0
    io_engine: ExecutorKind = "auto"
    queue_depth: int = 128
    io_threads: int = 16
    checker_threads: int = 2
    command_timeout_s: float = 30.0
    count_timeout_s: float = 1.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.devices or not all(self.devices):
            raise ConfigError("devices: empty; name the namespaces, such as /dev/ng0n1")
        if len(set(self.devices)) != len(self.devices):
            raise ConfigError(f"devices: {', '.join(self.devices)}: one is named twice")
        if self.max_value_bytes < 0 or self.max_value_bytes % PAGE_BYTES:
            raise ConfigError(
                f"max_value_bytes: {self.max_value_bytes} is no multiple of {PAGE_BYTES}"
            )
        check_range("queue_depth", self.queue_depth, 1, _MAX_QUEUE_DEPTH)
        for name in ("io_threads", "checker_threads"):
            check_range(name, getattr(self, name), 1, None)
        check_range("command_timeout_s", self.command_timeout_s, *_COMMAND_TIMEOUT_S)
        for name in ("count_timeout_s", "close_timeout_s"):
            check_range(name, getattr(self, name), 0, None)

"""Settings of the slab card, checked where they are made."""

from __future__ import annotations

from typing import Final

from adp_kv.errors import ConfigError
from adp_kv.units import PAGE_BYTES, KiB, MiB
from gateway.cards.engines import EngineKind
from gateway.cards.retention import RetentionSettings
from gateway.cards.settings import check_range

_MAX_DATABASES: Final = 4096
_MAX_SLOT_BYTES: Final = 1 << 30
_MAX_QUEUE_DEPTH: Final = 4096
_MIN_SYNC_INTERVAL_S: Final = 0.01
_ALIGNMENTS: Final = (0, 512, PAGE_BYTES)


class SlabSettings(RetentionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the slab card.

    Attributes:
        path: directory of the card; made if it is not there.
        capacity_bytes: slots of all databases together; allocated when the card is made.
        slot_bytes: the longest value, a multiple of 4096; every value takes this much.
        num_databases: independent key spaces, one slab each; they share the capacity evenly.
        devices: block devices to use as slabs, one a database, in order; empty for files in
            `path`. The journals stay in `path`.
        checksums: check xxh3_64 of every value read (0.06-0.08 CPU seconds a GB). Values
            written without are CORRUPT to a card that checks: they are written anew.
        io_engine: "auto" (io_uring where it works), "io_uring" or "threads".
        queue_depth: I/Os in flight, io_uring.
        io_threads: I/Os in flight, threads.
        checker_threads: threads that compute checksums and append to journals.
        sync_interval_s: seconds between fdatasyncs: what a power loss may take.
        sync_bytes: bytes written to a database that bring the next fdatasync forward.
        scrub_bytes_per_s: how fast values are read again in the background to find damaged
            ones before a load does; 0: never.
        lock_wait_s: seconds to wait for a former gateway's last I/O to end.
        close_timeout_s: seconds that close() lets batches finish.
        alignment_bytes: of addresses and I/O: 512, 4096, or 0 to ask the file system.
    """

    path: str
    capacity_bytes: int
    slot_bytes: int = 256 * KiB
    num_databases: int = 1
    devices: tuple[str, ...] = ()
    checksums: bool = True
    io_engine: EngineKind = "auto"
    queue_depth: int = 128
    io_threads: int = 16
    checker_threads: int = 2
    sync_interval_s: float = 1.0
    sync_bytes: int = 64 * MiB
    scrub_bytes_per_s: int = 16 * MiB
    lock_wait_s: float = 2.0
    close_timeout_s: float = 10.0
    alignment_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path: empty; name the card's directory")
        if self.slot_bytes % PAGE_BYTES:
            raise ConfigError(f"slot_bytes: {self.slot_bytes} is no multiple of {PAGE_BYTES}")
        if self.alignment_bytes not in _ALIGNMENTS:
            raise ConfigError(f"alignment_bytes: {self.alignment_bytes} is none of {_ALIGNMENTS}")
        check_range("slot_bytes", self.slot_bytes, PAGE_BYTES, _MAX_SLOT_BYTES)
        check_range("num_databases", self.num_databases, 1, _MAX_DATABASES)
        check_range("queue_depth", self.queue_depth, 1, _MAX_QUEUE_DEPTH)
        for name in ("io_threads", "checker_threads", "sync_bytes"):
            check_range(name, getattr(self, name), 1, None)
        check_range("sync_interval_s", self.sync_interval_s, _MIN_SYNC_INTERVAL_S, None)
        for name in ("lock_wait_s", "close_timeout_s", "scrub_bytes_per_s"):
            check_range(name, getattr(self, name), 0, None)
        if self.devices and len(self.devices) != self.num_databases:
            raise ConfigError(
                f"devices: {len(self.devices)} for {self.num_databases} databases; name one each"
            )
        if self.slots_per_database < 1:
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} has no room for one slot of "
                f"{self.slot_bytes} bytes in each of {self.num_databases} databases"
            )

        self.check_retention(self.slot_bytes)

    @property
    def slots_per_database(self) -> int:
        """Values a database holds, not counting markers."""
        return self.capacity_bytes // self.num_databases // self.slot_bytes

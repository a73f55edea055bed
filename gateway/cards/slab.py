"""The embedded card: slabs of fixed slots on local NVMe, files or block devices.

    submit ──► planner: look up, pin or allocate ──► I/O engine: O_DIRECT
                                                         │ parts of about 8 MiB
    on_done ◄── checkers: xxh3, journal, index ◄─────────┘

A batch is planned at once and runs in parts, so that checking one overlaps the I/O of
the next. Every value has xxh3_64 (seeded with key and database), length and key in its
journal record, and each read is checked after its I/O: a torn, lost or misplaced write
is CORRUPT, which deletes the entry. So nothing needs to be ordered by fsync.

A WRITE goes to a free slot, then into the journal, then into the index, then is answered;
the slot of a replaced value is let go after that and not written while read. A full
database answers NO_SPACE, to overwrites too: they need a slot until the old one is let go.
Before it comes to that whole chunks are evicted (`gateway.cards.evictor`).

    slab.py       open, close, threads        slab_flows.py     what a batch goes through
    slab_store.py files, locks, headers       slab_database.py  journal and table in step
    slab_upkeep.py  compaction, scrubbing     journal.py, journal_records.py

Threads. One planner, the engine's, `checker_threads`, one each that syncs, evicts, and
compacts and scrubs. A database's table has its lock, held for vectorised work and journal
appends alone.
Durability. Answered writes survive the process. The sync thread calls fdatasync each
`sync_interval_s` or `sync_bytes`, so a power loss takes about that much (missing or
CORRUPT, never wrong). With checksums=False that promise holds for a killed process
only: after a power loss or on a bad device wrong bytes may be read.
Failure scope. Entries: what the device refuses is IO_ERROR for that entry; a full file
system under the journal is NO_SPACE.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from pathlib import Path
from typing import Final

from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from gateway.cards.base import Batch, Card, CardLimits, OnDone
from gateway.cards.batches import PendingBatch, WorkerPool, check_batch
from gateway.cards.direct_io import alignment_of
from gateway.cards.engines import start_engine
from gateway.cards.evictor import Evictor
from gateway.cards.io_engine import IoEngine
from gateway.cards.slab_database import Database
from gateway.cards.slab_flows import Flows, Machinery
from gateway.cards.slab_scrub import Scrubber
from gateway.cards.slab_settings import SlabSettings
from gateway.cards.slab_store import Store, StoreSpec, format_store, open_store
from gateway.cards.slab_upkeep import Upkeep

_logger: Final = logging.getLogger(__name__)

_STOP_TIMEOUT_S: Final = 5.0


class SlabCard(Card):
    """A card of slab files or block devices (see the module)."""

    def __init__(self, settings: SlabSettings) -> None:
        """Make a closed card; touches nothing on disk.

        Args:
            settings: of the card.
        """
        self._settings = settings
        self._path = Path(settings.path)
        alignment = settings.alignment_bytes or max(
            alignment_of(Path(device)) for device in settings.devices or (settings.path,)
        )
        self._limits = CardLimits(
            settings.slot_bytes,
            alignment,
            settings.num_databases,
            settings.uncommitted_s,
            exclusive=True,
        )
        self._store: Store | None = None
        self._databases: list[Database] = []
        self._state = threading.Condition()
        self._outstanding = 0

    @property
    @override
    def limits(self) -> CardLimits:
        return self._limits

    @property
    def engine_name(self) -> str:
        """Which executor runs the I/O: "io_uring" or "threads"; "" while closed."""
        return self._engine.name if self._store is not None else ""

    @property
    def _spec(self) -> StoreSpec:
        s = self._settings
        slots = s.slots_per_database
        return StoreSpec(self._path, s.devices, s.slot_bytes, s.num_databases, slots, s.lock_wait_s)

    @override
    def open(self, on_done: OnDone) -> None:
        s = self._settings
        if self._store is not None:
            raise CardError(f"path {s.path}: this card is open already")
        groups = s.new_groups(s.slots_per_database * s.num_databases, s.slot_bytes)
        store = open_store(self._spec, groups)
        try:
            self._engine: IoEngine = start_engine(s.io_engine, s.queue_depth, s.io_threads)
        except CardError:
            store.close()
            raise
        self._databases = store.databases
        self._on_done = on_done
        self._planner = WorkerPool("adp-card-plan", 1)
        self._checkers = WorkerPool("adp-card-check", s.checker_threads)
        self._sync_wake = threading.Event()
        self._sync_stop = False
        self._evictor = Evictor(groups, store.databases, s)
        machinery = Machinery(
            self._engine,
            self._checkers,
            store.databases,
            groups,
            self._evictor,
            self._settled,
            self._sync_wake.set,
        )
        self._flows = Flows(s, self._limits, machinery)
        self._sync_thread = threading.Thread(target=self._sync, name="adp-card-sync", daemon=True)
        self._sync_thread.start()
        self._store = store  # before the upkeep, which begins batches
        self._upkeep = Upkeep(store.databases, s, self._begin)
        for database in store.databases:
            if database.journal.discarded_bytes:
                _logger.warning(
                    "path %s: %d bytes at the end of a journal were not whole and are forgotten",
                    s.path,
                    database.journal.discarded_bytes,
                )

    @override
    def register(self, address: int, num_bytes: int) -> None:
        if self._store is not None:
            self._engine.register(address, num_bytes)

    @override
    def unregister(self) -> None:
        if self._store is not None:
            self._engine.unregister()

    @override
    def submit(self, batch: Batch) -> None:
        check_batch(batch, self._limits)
        self._begin(batch, None)

    def _begin(self, batch: Batch, on_done: OnDone | None) -> None:
        with self._state:
            if self._store is None:
                raise CardError(f"path {self._settings.path}: the card is not open")
            self._outstanding += 1
        pending = PendingBatch(batch, on_done or self._on_done)
        self._planner.put(functools.partial(self._flows.plan, pending))

    @override
    def stats(self) -> dict[str, int]:
        if not self._databases:
            return dict.fromkeys(("values", "bytes_read", "bytes_written", "corrupt"), 0) | {
                "io_errors": 0
            }
        tables = [database.table for database in self._databases]
        return {
            "values": sum(len(table) for table in tables),
            "free_slots": sum(table.num_free for table in tables),
            "journal_bytes": sum(d.journal.size_bytes for d in self._databases),
            "journal_failures": sum(d.journal_failures for d in self._databases),
            **self._flows.stats(),
            **self._evictor.stats(),
            **self._upkeep.stats(),
        }

    @override
    def latencies(self) -> dict[int, Histogram]:
        return {i: self._engine.latencies.of(d.fd) for i, d in enumerate(self._databases)}

    @override
    def verify(self) -> dict[str, int]:
        s = self._settings
        if self._store is None:
            raise CardError(f"path {s.path}: the card is not open")
        scrubber = Scrubber(self._databases, s.slot_bytes, self._begin, threading.Event())
        before = self.stats()
        while scrubber.step(math.inf):
            pass
        after = self.stats()
        return {
            "values": scrubber.num_read,
            "bytes": after["scrubbed_bytes"] - before["scrubbed_bytes"],
            "corrupt": scrubber.num_corrupt,
            "failed": scrubber.num_failed,
            "chunks": after["groups"],
        }

    @override
    def format(self, *, force: bool) -> None:
        if self._store is not None:
            raise CardError(f"path {self._settings.path}: the card is open")
        format_store(self._spec, force=force)
        self.open(lambda _token, _status: None)
        self.close()

    @override
    def close(self) -> None:
        with self._state:
            store = self._store
            if store is None:
                return
            self._upkeep.stop_soon()
            self._store = None
        deadline = time.monotonic() + self._settings.close_timeout_s
        quiet = self._upkeep.stop(_STOP_TIMEOUT_S)
        quiet &= self._evictor.stop(_STOP_TIMEOUT_S)
        with self._state:
            while self._outstanding and time.monotonic() < deadline:
                self._state.wait(max(0.0, deadline - time.monotonic()))
        self._flows.abandoning = True
        # The planner feeds the engine and the engine the checkers: stop them in that order.
        quiet &= self._planner.stop(_STOP_TIMEOUT_S)
        quiet &= self._engine.stop(_STOP_TIMEOUT_S)
        quiet &= self._checkers.stop(_STOP_TIMEOUT_S)
        self._sync_stop = True
        self._sync_wake.set()
        self._sync_thread.join(_STOP_TIMEOUT_S)
        quiet &= not self._sync_thread.is_alive()
        self._databases = []
        if not quiet:
            # The descriptors stay open, and locked, as long as I/O may go through them.
            _logger.error(
                "path %s: I/O did not end in time; end this process, its memory is in use",
                self._settings.path,
            )
            return
        store.close()

    def _settled(self) -> None:
        with self._state:
            self._outstanding -= 1
            self._state.notify_all()

    def _sync(self) -> None:
        while True:
            self._sync_wake.wait(self._settings.sync_interval_s)
            self._sync_wake.clear()
            last = self._sync_stop
            for database in self._databases:
                try:
                    database.sync()
                except OSError as error:
                    self._flows.count("io_errors", 1)
                    _logger.warning("path %s: sync: %s", self._settings.path, error.strerror)
            if last:
                return

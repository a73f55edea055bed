"""What a slab card does in the background: compacting journals, and scrubbing.

Compaction runs when a journal holds more dead records than live ones; scrubbing
(`gateway.cards.slab_scrub`) all the time, at `scrub_bytes_per_s`.

Threads. One of its own, which waits between small steps.
Failure scope. A step that fails is logged and tried again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from gateway.cards.base import Batch, OnDone
from gateway.cards.pace import Pace
from gateway.cards.slab_database import Database
from gateway.cards.slab_scrub import Scrubber
from gateway.cards.slab_settings import SlabSettings

_logger: Final = logging.getLogger(__name__)

COMPACT_SLACK: Final = 4096
"""Dead records that are never worth a rewrite."""

_TICK_S: Final = 1.0
_RETRY_S: Final = 60.0  # from a compaction that failed to the next attempt


class Upkeep:
    """The background work of an open card (see the module).

    Attributes:
        scrubber: reads the values again.
    """

    def __init__(
        self,
        databases: list[Database],
        settings: SlabSettings,
        submit: Callable[[Batch, OnDone], None],
    ) -> None:
        """Start the thread.

        Args:
            databases: in order.
            settings: rates.
            submit: begins a batch like any other.
        """
        self._databases = databases
        self._settings = settings
        self._submit = submit
        self._compactions = 0
        self._retry_at: dict[Database, float] = {}
        self._stop = threading.Event()
        self.scrubber = Scrubber(databases, settings.slot_bytes, submit, self._stop)
        self._thread = threading.Thread(target=self._run, name="adp-card-upkeep", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Return what was done."""
        return {
            "compactions": self._compactions,
            "scrub_passes": self.scrubber.num_passes,
            "scrub_corrupt": self.scrubber.num_corrupt,
        }

    def stop_soon(self) -> None:
        """Begin nothing more; called before the card refuses what this thread begins."""
        self._stop.set()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it ended in time."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            began = time.monotonic()
            try:
                for database in self._databases:
                    self.compact(database)
                while self._scrub(began + _TICK_S):
                    pass
            except Exception:
                if not self._stop.is_set():  # then the card refuses whatever was under way
                    _logger.exception("upkeep failed; it is tried again")

    def _scrub(self, until: float) -> bool:
        rate = self._settings.scrub_bytes_per_s
        return bool(rate) and self.scrubber.step(rate) and time.monotonic() < until

    def compact(self, database: Database) -> bool:
        """Compact a journal if dead records dominate; return whether it was."""
        live = len(database.table)
        if database.journal.num_records - live <= live + COMPACT_SLACK:
            return False
        if time.monotonic() < self._retry_at.get(database, 0.0):
            return False
        # Without room the attempt would take what is left from those who append.
        done = database.journal.has_room(live)
        if done:
            pace = Pace(self._stop)
            done = database.journal.compact(database.table.lock, database.are_live, pace.pause)
        if not done:
            self._retry_at[database] = time.monotonic() + _RETRY_S
        self._compactions += done
        return done

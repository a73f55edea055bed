"""Which databases of a card answer: suspects are probed, bad ones kept out and probed again.

    SERVING ──errors, a late batch──► suspect: probe ──fails──► OUT ──quarantine_s──► probe
       ▲                                │ works                                        │
       └────────────────────────────────┴──────────────────── works ───────────────────┘

While a database is out its entries are answered UNREACHABLE without asking it, so that the
others serve at their speed. A database serves on while it is suspected: one damaged
place of a device must not take the rest away, so the probe decides.

Threads: the gateway's main. Failure scope: one database of one card.
"""

from __future__ import annotations

import logging
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.cards.base import Status, StatusArray

log = logging.getLogger("adp_kv.gateway")

_SUSPICIOUS_BATCHES: Final = 3
"""Batches in a row with an IO_ERROR in a database, after which it is probed."""


class Quarantine:
    """The state of each database.

    Args:
        num_databases: of the card.
        quarantine_s: seconds from a probe that failed to the next.
    """

    def __init__(self, num_databases: int, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._out = np.zeros(num_databases, dtype=np.bool_)
        self._probing = np.zeros(num_databases, dtype=np.bool_)
        self._probe_at = np.full(num_databases, math.inf)
        self._errors = np.zeros(num_databases, dtype=np.int64)

    @property
    def num_out(self) -> int:
        """Databases that are kept out."""
        return int(np.count_nonzero(self._out))

    def are_out(self, databases: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """Return which entries would go to a database that is kept out."""
        return self._out[databases]

    def note(self, databases: NDArray[np.uint16], status: StatusArray, now: float) -> None:
        """Learn from the answers to a batch."""
        wrong = status == int(Status.IO_ERROR)  # numpy takes four times as long for the member
        if not wrong.any() and not self._errors.any():
            return
        failed = np.zeros_like(self._out)
        failed[databases[wrong]] = True
        answered = np.zeros_like(self._out)
        answered[databases] = True
        self._errors[answered & ~failed] = 0
        self._errors[failed] += 1
        self._suspect(failed & (self._errors >= _SUSPICIOUS_BATCHES), now)

    def note_late(self, databases: NDArray[np.uint16], now: float) -> None:
        """Learn that a batch was not answered in time: any of its databases may be why."""
        suspects = np.zeros_like(self._out)
        suspects[databases] = True
        self._suspect(suspects, now)

    def _suspect(self, suspects: NDArray[np.bool_], now: float) -> None:
        fresh = suspects & ~self._out & ~self._probing
        self._probe_at[fresh] = np.minimum(self._probe_at[fresh], now)

    def due(self, now: float) -> list[int]:
        """Return the databases to probe now; probed() follows for each."""
        due = (self._probe_at <= now) & ~self._probing
        self._probing |= due
        self._probe_at[due] = math.inf
        return [int(database) for database in np.flatnonzero(due)]

    def probed(self, database: int, now: float, *, works: bool) -> None:
        """Take the outcome of a probe."""
        was_out = bool(self._out[database])
        self._probing[database] = False
        self._out[database] = not works
        self._errors[database] = 0
        if not works:
            self._probe_at[database] = now + self._quarantine_s
        if was_out and works:
            log.warning("database %d of the card answers again: it serves", database)
        elif not was_out and not works:
            log.error(
                "database %d of the card does not work: its objects are missed, the others "
                "serve; it is tried again every quarantine_s = %g s",
                database,
                self._quarantine_s,
            )

"""A card over Mooncake Store: one key space of a store is a database.

    submit ──► parts of batch_rows ──► lanes (threads) ──► engine ──► the store's machines
    on_done ◄── statuses ◄── codes, values moved straight from and to announced memory

Each value is stored behind a 16-byte header with its xxh3_64 (seeded with its key) and
length (`gateway.cards.value_header`), so that a foreign or damaged value, and one that was
given away while it was read, is CORRUPT, and then removed.

A name that is taken is not written again: a WRITE answers OK and the old value stays, which
is the same one where a key stands for its bytes. A corrupt one is removed when it is read.

The store owns capacity: it evicts, by its own rules and not by groups, and a full one answers
NO_SPACE. A value can vanish at any time, which a gateway reads as a miss.

Threads. `threads` lanes a database; the engine has more of its own.
Durability. The store's: values in RAM go with the process that holds them, all of them with
the master.
Failure scope. Entries. Machines of the store that are gone cost IO_ERROR until the master
has noticed, then ABSENT. A master that is gone costs IO_ERROR until it is back, empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from typing_extensions import override

from gateway.cards.mooncake.exchanges import MooncakePart
from gateway.cards.mooncake.lanes import MooncakeLanes
from gateway.cards.mooncake.settings import MooncakeSettings
from gateway.cards.parts import LaneCard, Lanes

_WAITS: Final = 4  # a call can take this many deadlines of the engine


class MooncakeCard(LaneCard[MooncakePart]):
    """A card of Mooncake stores (see the module)."""

    def __init__(self, settings: MooncakeSettings) -> None:
        """Make a closed card; connects to nothing."""
        super().__init__(
            "mooncake",
            settings,
            MooncakePart,
            databases=len(settings.masters),
            lanes=settings.threads,
            rows=settings.batch_rows,
            # Calls that are under way have the engine's deadlines.
            stop_timeout_s=_WAITS * settings.io_timeout_s,
        )
        self._settings = settings

    @override
    def _connect(self) -> Iterator[Lanes[MooncakePart]]:
        for master in self._settings.parsed_masters:
            yield MooncakeLanes(master, self._settings, self._ended)

    @override
    def stats(self) -> dict[str, int]:
        """Return counters; `values` is what this card stored and removed since it was opened."""
        return {**super().stats(), "masters_lost": sum(lanes.lost for lanes in self._lanes)}

"""Gets: objects from the card into ring slots.

    first rank asks ─► slots ─► card reads ─► all ranks have asked? ─► Granted ─► Release

Reading starts at the first rank's request. An object that can't be read is granted
with its status, and its chunk's commit record is removed, so that the same hit is not
offered again. Contract of requests, threads and failure: requests.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gateway.cards.base import StatusArray
from gateway.requests import Request, RequestTable, SlotBatch, count_failures, ignore


class GetTable(RequestTable):
    """All gets of one session."""

    kind = "get"

    def pump(self) -> None:
        """Start reads while slots are free, in the order of arrival."""
        for request in list(self._requests.values()):
            while not request.failed and request.num_started < len(request.objects):
                slots = self._slots.try_allocate(self._next_count(request))
                if slots is None:
                    return
                self._start(request, slots)

    def _start(self, request: Request, slots: NDArray[np.uint32]) -> None:
        batch = SlotBatch(request.num_started, slots)
        request.batches[batch.first] = batch
        request.num_started += len(slots)
        self._ctx.store.read(
            request.objects[batch.span],
            self._ctx.mapping.read_addresses(slots),
            request.lengths[batch.span],
            lambda status: self._on_read(request, batch, status),
        )

    def _on_read(self, request: Request, batch: SlotBatch, status: StatusArray) -> None:
        batch.status = status
        good = status == 0
        self._ctx.counters.add("objects_read", int(good.sum()))
        self._ctx.counters.add("bytes_read", int(request.lengths[batch.span][good].sum()))
        count_failures(self._ctx.counters, "objects_missed", status)
        if not good.all():
            self._withdraw(request, batch.first + np.flatnonzero(~good))
        if request.failed:
            self._drop(request, batch)
            self.pump()
        elif request.all_arrived:
            self._grant(request, batch)

    def _withdraw(self, request: Request, objects: NDArray[np.int64]) -> None:
        chunks = np.unique(request.chunks[request.chunk_of(objects)], axis=0)
        self._ctx.counters.add("commits_withdrawn", len(chunks))
        self._ctx.store.uncommit(chunks, ignore)

    def _on_open(self, request: Request) -> None:
        """Gets need no further check."""

    def _on_complete(self, request: Request) -> None:
        for batch in request.batches.values():
            if batch.status is not None and batch.granted_at is None:
                self._grant(request, batch)

    def _on_released(self, request: Request, batch: SlotBatch) -> None:
        self._drop(request, batch)

    def _on_abandoned(self, batch: SlotBatch) -> None:
        """Its objects were read and are counted."""

    def _on_end(self, request: Request) -> None:
        """A get leaves nothing behind."""

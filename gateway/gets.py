"""Gets: objects from the card into ring slots.

    first rank asks ─► slots ─► card reads ─► all ranks have asked? ─► Granted ─► Release

Reading starts at the first rank's request and runs ahead of the ranks as far as the ring
goes. The first batches after idle time are small, so that the link has work at once;
each is twice the one before, up to batch_bytes, since a batch costs gateway and ranks
some time whatever its size. An object that can't be read is granted
with its status, and its chunk's commit record is removed, so that the same hit is not
offered again. Contract of requests, threads and failure: requests.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from gateway.ahead import Match, ReadAhead
from gateway.cards.base import Status, StatusArray
from gateway.requests import (
    Context,
    Ramp,
    Request,
    RequestTable,
    SlotBatch,
    count_failures,
    ignore,
)


class GetTable(RequestTable):
    """All gets of one session."""

    kind = "get"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ramp = Ramp(context.batch_bytes)
        self.ahead = ReadAhead(context, self._slots, self._all_started, self.pump)

    def pump(self) -> None:
        """Start reads while slots are free, in the order of arrival; then read ahead."""
        for request in list(self._requests.values()):
            while not request.failed and request.num_started < len(request.objects):
                if not self._take_shelf(request) and not self._read_some(request):
                    return
        self.ahead.pump()

    @property
    @override
    def withheld(self) -> int:
        return self.num_withheld + self.ahead.num_withheld

    def _all_started(self) -> bool:
        return all(r.failed or r.num_started == len(r.objects) for r in self._requests.values())

    def _shelf_for(self, request: Request) -> Match | None:
        """Return what of a request, from where it stands, was read ahead."""
        if not self.ahead.num_slots or len(request.message.caches) > 1:
            return None
        return self.ahead.find(request.message.caches[0], request.chunks, request.num_started)

    def _take_shelf(self, request: Request) -> bool:
        """Make a shelf that holds the request's next objects a batch of it."""
        match = self._shelf_for(request)
        if match is None or match.first != request.num_started:
            return False
        batch = SlotBatch(match.first, np.zeros(0, dtype=np.uint32), at_card=True)
        batch.slots, status = self.ahead.take(
            match,
            lambda status: self._on_read(request, batch, status),
            lambda: self._on_quiet(batch),
        )
        request.batches[batch.first] = batch
        request.num_started += len(batch.slots)
        self._ramp.begun(int(request.lengths[batch.span].sum()))
        if status is not None:
            self._on_read(request, batch, status)
        return True

    def _read_some(self, request: Request) -> bool:
        """Start reading the request's next objects; False if there are no slots for them."""
        batch_bytes = self._ramp.batch_bytes
        count = self._next_count(request, batch_bytes)
        match = self._shelf_for(request)
        if match is not None:
            count = min(count, match.first - request.num_started)
        slots = self._slots.try_allocate(count)
        while slots is None:
            if not self.ahead.give_way():
                return False
            slots = self._slots.try_allocate(count)
        self._ramp.begun(batch_bytes)
        self._start(request, slots)
        return True

    def _start(self, request: Request, slots: NDArray[np.uint32]) -> None:
        batch = SlotBatch(request.num_started, slots, at_card=True)
        request.batches[batch.first] = batch
        request.num_started += len(slots)
        self._ctx.store.read(
            request.objects[batch.span],
            self._ctx.mapping.read_addresses(slots),
            request.lengths[batch.span],
            lambda status: self._on_read(request, batch, status),
            lambda: self._on_quiet(batch),
        )

    def _on_read(self, request: Request, batch: SlotBatch, status: StatusArray) -> None:
        batch.status = status
        lengths = request.lengths[batch.span]
        if status.any():
            lengths = lengths[status == 0]
            count_failures(self._ctx.counters, "objects_missed", status)
            # What is out of reach for a while is still there.
            lost = (status != 0) & (status != Status.UNREACHABLE)
            self._withdraw(request, batch.first + np.flatnonzero(lost))
        self._ctx.counters.add("objects_read", len(lengths))
        self._ctx.counters.add("bytes_read", int(lengths.sum()))
        if request.failed:
            self._drop(request, batch)
            self.pump()
        elif request.all_arrived:
            self._grant(request, batch)

    def _withdraw(self, request: Request, objects: NDArray[np.int64]) -> None:
        if not len(objects):
            return
        chunks = np.unique(request.chunks[request.chunk_of(objects)], axis=0)
        self._ctx.counters.add("commits_withdrawn", len(chunks))
        self._ctx.store.uncommit(chunks, ignore)

    def _on_open(self, request: Request) -> None:
        self.ahead.on_get(request.chunks)

    def _on_complete(self, request: Request) -> None:
        for batch in request.batches.values():
            if batch.status is not None and batch.granted_at is None:
                self._grant(request, batch)

    def _on_released(self, request: Request, batch: SlotBatch) -> None:
        self._drop(request, batch)

    def abandon(self) -> None:
        """As for every table; nothing more is read ahead."""
        self.ahead.stop()
        super().abandon()

    def _on_abandoned(self, batch: SlotBatch) -> None:
        """Its objects were read and are counted."""

    def tick(self) -> None:
        """As for every table; what was read ahead and nobody came for is dropped."""
        self.ahead.tick()
        super().tick()

    def _on_end(self, request: Request) -> None:
        if not self._requests:
            self._ramp.reset()

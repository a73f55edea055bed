"""Restores of replicated caches by all ranks of a group together.

    restore() ─► share, exchange, scatter of every piece are queued ─► Ticket
    ticket    fence(): the compute stream waits      proven(): every rank brought its share

Order. An exchange has no name: call k of one rank meets call k of every other. So all ranks
must call restore() in the same order, with the same sizes, or none may. The caller has that
order for free: the gateway is one thread and sends each batch of a get to all ranks of the
engine before it sends the next one, a connection keeps its order, and a rank's client handles
one message at a time. Therefore the batches granted to one rank are, at any time, a prefix of
those granted to another or the reverse, and what is exchanged is decided from the message
alone: from its number of objects, its status bytes, and the caches' sizes. It must not be
decided from anything that a rank has of its own. In particular:

- A rank that gave the job up, whose pages are out of range or whose copy can't be queued takes
  part all the same and says so in the flags (see flags); every rank's ticket then fails.
- A get of which some rank stayed away is never granted, to nobody; a failed one neither.
- Small transfers are not exchanged by any rank, since the size alone says so.
- No message is handled twice, and none is dropped but at the end of the session.

Only the end of the session breaks the order: one rank got a batch and another the Goodbye, or
died. The rank that waits notices by the Goodbye, or by the exchange's deadline, and aborts;
whatever had not ended by then has failed. Should the order be broken by a fault of ours, what
ranks say of an exchange, its number and what it belongs to, does not match, and the restore
fails instead of bringing wrong bytes.

No rank waits for another on a CPU, and a rank's device waits for another only in the exchange
stream. What the model computes after a fence waits for exchanges that were queued before it on
every rank, never for later ones, and an exchange waits for what was computed before its mark;
so the order of marks and exchanges, equal on all ranks, has no circle.

Threads: restore(), check() and close() belong to the client's thread; tickets may be asked by
the forward pass too; everything shared is under the lock. Failure scope: a share that did not
come fails its transfer on all ranks; an exchange that does not end fails this rank's group for
good, and with it the external cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from adp_kv.errors import TransferError
from adp_kv.fanout.exchange import Exchange, ExchangeError
from adp_kv.fanout.flags import Flags
from adp_kv.fanout.pipe import FanoutPipe
from adp_kv.fanout.plan import Piece, Shape, fits, least_bytes, make_pieces
from adp_kv.fanout.settings import FanoutSettings
from adp_kv.fanout.shares import Source, find_source
from adp_kv.transfer.base import SliceCopy, Ticket
from adp_kv.transfer.hardware import Hardware

_ROOM_POLL_S = 0.00005
_CLOSE_POLL_S = 0.001


@dataclass(slots=True)
class _Flight:
    """A queued piece.

    Attributes:
        label: what it belongs to.
        problem: why the bytes are not to be used; proven: that they are what they should be.
        ended: the device touches neither buffer nor pages for it any more.
    """

    number: int
    label: tuple[int, int]
    deadline: float
    event: torch.cuda.Event | None = None
    problem: str | None = None
    proven: bool = False
    ended: bool = False


class Fanout:
    """One rank of a group.

    Args:
        hardware: what the rank's mover lends.
        exchange: the rank's end of the group.
        flags: the memory that it shares with the group.
        settings: the same on every rank.
        ranks: of the engine, in the group's order; for messages.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        hardware: Hardware,
        exchange: Exchange,
        flags: Flags,
        settings: FanoutSettings,
        ranks: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks = ranks
        self._device = hardware.device
        self._least_bytes = least_bytes(len(ranks))
        self._capture_safe = hardware.device.capture_safe()  # used under the lock
        self._bound: int | None = None
        self._ring = hardware.ring
        self._exchange, self._flags = exchange, flags
        self._settings = settings
        self._clock = clock
        self._pipe = FanoutPipe(hardware, exchange, flags, settings)
        self._lock = threading.RLock()
        self._in_flight: deque[_Flight] = deque()
        self._count = 0
        self._broken: str | None = None

    def takes(self, shape: Shape) -> bool:
        """Return whether a transfer is exchanged; the same on every rank (see the module)."""
        return shape.total_bytes >= self._least_bytes and fits(
            shape.page_bytes, len(self.ranks), self._settings.buffer_bytes
        )

    def restore(
        self, label: tuple[int, int], shape: Shape, copy: SliceCopy | None, after: object
    ) -> Ticket:
        """Queue a transfer of this rank's share and of everybody's pages.

        Args:
            label: what the transfer is; equal on every rank.
            shape: of the transfer, equal on every rank.
            copy: the whole transfer on this rank; None if it has failed here: the rank takes
                part, and the transfer fails on all ranks.
            after: mark before which no page may be touched.

        Returns:
            A ticket, of a transfer that has failed too: it ends when no page is touched any more.

        Raises:
            ExchangeError: This rank's group can't be used any more, and nothing was queued that
                touches a page.
        """
        source, problem = None, None
        if copy is not None:
            try:
                source = find_source(copy, self._ring)
            except TransferError as error:
                problem = str(error)
        limits = (self._settings.buffer_bytes, self._settings.max_pages)
        turn = self._count % len(self.ranks)  # exchanges so far: equal on every rank, see above
        flights: list[_Flight] = []
        try:
            for piece in make_pieces(shape, len(self.ranks), *limits, turn):
                self._make_room()
                with self._lock:
                    flights.append(self._queue(label, piece, source, after))
                    if problem is not None:
                        flights[-1].problem = problem
        except ExchangeError as error:
            if not flights:
                raise
            # Pieces before are queued, and once aborted the device scatters whatever lies in
            # their buffers: the pages are in use until they have ended. check() ends the client.
            flights.insert(0, _Flight(-1, label, 0.0, problem=str(error), ended=True))
        return FanoutTicket(self, flights)

    def _queue(
        self, label: tuple[int, int], piece: Piece, source: Source | None, after: object
    ) -> _Flight:
        self._check_usable()
        number = self._count
        self._count += 1
        flight = _Flight(number, label, self._clock() + self._settings.timeout_s)
        try:
            with self._capture_safe:
                self._bind()
                flight.event, error = self._pipe.queue(number, piece, label, source, after)
        except (ExchangeError, RuntimeError) as caught:
            self._abort(f"an exchange could not be queued: {caught}")
            self._keep_rest(flight)
            raise ExchangeError(self._broken) from caught
        if error is not None:
            flight.problem = f"this rank's share failed: {error}"
        self._in_flight.append(flight)
        return flight

    def _keep_rest(self, flight: _Flight) -> None:
        """Count what was queued of a piece as in flight: its copies still read the ring."""
        flight.problem = self._broken
        try:
            with self._capture_safe:
                flight.event = self._pipe.end()
        except RuntimeError:
            return  # nothing runs on a device that takes nothing
        self._in_flight.append(flight)

    def _bind(self) -> None:
        """Make the device the calling thread's, once: all is queued by one thread."""
        if self._bound != threading.get_ident():
            self._device.bind()
            self._bound = threading.get_ident()

    def _make_room(self) -> None:
        """Wait until another exchange may be queued; bounded by the deadline of the oldest."""
        while len(self._in_flight) >= self._settings.max_ahead:
            self.check()
            if len(self._in_flight) >= self._settings.max_ahead:
                time.sleep(_ROOM_POLL_S)

    def check(self) -> None:
        """Look after the exchanges in flight; to be called often.

        Raises:
            ExchangeError: This rank's group can't be used any more.
        """
        with self._lock:
            self._poll()
            self._check_usable()

    @property
    def num_in_flight(self) -> int:
        """Exchanges that were queued and have not ended."""
        with self._lock:
            return len(self._in_flight)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise ExchangeError(self._broken)

    def _poll(self) -> None:
        """Take note of exchanges that have ended; abort when the oldest never will."""
        if not self._in_flight:
            return
        with self._capture_safe:
            while self._in_flight and self._has_ended(self._in_flight[0]):
                flight = self._in_flight.popleft()
                flight.ended = True
                if flight.problem is None:
                    flight.problem = self._problem(flight)
                    flight.proven = flight.problem is None
        if self._in_flight and self._broken is None:
            late = self._clock() > self._in_flight[0].deadline
            if late:
                self._abort(
                    "an exchange with the other ranks did not end within "
                    f"{self._settings.timeout_s:g} s (load_timeout_s)"
                )

    def _has_ended(self, flight: _Flight) -> bool:
        if flight.event is None:
            return True
        try:
            return bool(flight.event.query())
        except RuntimeError as error:
            flight.problem = f"the device failed during an exchange: {error}"
            return True

    def _problem(self, flight: _Flight) -> str | None:
        """Return what the ranks' flags say against a piece whose exchange has ended."""
        found = self._flags.problem(flight.number, flight.label)
        return None if found is None else f"rank {self.ranks[found[0]]} {found[1]}"

    def _abort(self, reason: str) -> None:
        """End all exchanges; whatever has not been proven by now never will be."""
        if self._broken is not None:
            return
        self._broken = f"NVLink fan-out: {reason}"
        with self._capture_safe:  # it frees memory; a gateway may go while vLLM captures graphs
            self._exchange.abort()
        for flight in self._in_flight:
            flight.problem = flight.problem or self._broken

    def poll(self) -> None:
        """As check(), but without an error; for tickets."""
        with self._lock:
            self._poll()

    def close(self, grace_s: float) -> bool:
        """End; idempotent.

        Args:
            grace_s: exchanges in flight have so long to end by themselves; those that wait
                for another rank are aborted then, and have as long again.

        Returns:
            Whether the device has done with the ring.
        """
        self._wait_ended(grace_s)
        with self._lock:
            self._poll()
            self._abort("closed")
        self._wait_ended(grace_s)
        return not self.num_in_flight

    def _wait_ended(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while self.num_in_flight and time.monotonic() < until:
            self.poll()
            time.sleep(_CLOSE_POLL_S)

    def fence_of(self, flights: list[_Flight]) -> None:
        """Make the caller's current stream wait for flights.

        Not for one that has ended: its event is another's then, of an exchange that may wait
        for what the caller is about to compute.
        """
        with self._lock:
            if flights and flights[-1].event is not None and not flights[-1].ended:
                self._device.current_stream().wait_event(flights[-1].event)


@dataclass(slots=True)
class FanoutTicket(Ticket):
    """A transfer of a group: right once its exchanges have ended, to which all brought a share."""

    fanout: Fanout
    flights: list[_Flight] = field(default_factory=list)

    @override
    def done(self) -> bool:
        self.fanout.poll()
        if not all(flight.ended for flight in self.flights):
            return False
        self._raise_problem()
        return True

    @override
    def proven(self) -> bool:
        self.fanout.poll()
        self._raise_problem()
        return all(flight.proven for flight in self.flights)

    @override
    def fence(self) -> None:
        self.fanout.fence_of(self.flights)

    def _raise_problem(self) -> None:
        problem = next((f.problem for f in self.flights if f.problem is not None), None)
        if problem is not None:
            raise TransferError(problem)

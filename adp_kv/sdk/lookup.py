"""The scheduler side's client: which chunks are stored?

Threads: ask() is called by the scheduler and never blocks; answers come on the loop's
thread. Failure scope: an answer that does not come is a lookup without a hit; a
gateway that is gone turns lookups off.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adp_kv.sdk.loop import ChannelLoop
from adp_kv.wire.keys import KeyArray, pack_keys
from adp_kv.wire.messages import Ahead, Forget, Hello, Lookup, LookupReply, ToRank, Welcome

IDLE_S = 1.0


@dataclass(slots=True)
class LookupTicket:
    """A question that was asked.

    Attributes:
        deadline: on the monotonic clock; after it the question counts as unanswered.
        asked_at, answered_at: on the same clock.
        stored: bool [num_chunks] once answered, None before.
        noted: free for the one who asked.
    """

    num_chunks: int
    deadline: float
    asked_at: float = field(default_factory=time.monotonic)
    answered_at: float = 0.0
    noted: bool = False
    stored: NDArray[np.bool_] | None = None

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed without an answer."""
        return self.stored is None and time.monotonic() > self.deadline


class LookupClient(ChannelLoop):
    """Asks the gateway which chunks are on the card."""

    off_message = "External KV cache lookups turned off"  # a rank's own line is the rank's
    on_again_message = "External KV cache lookups are back"

    def __init__(
        self, hello: Hello, address: str, timeout_s: float, connect_timeout_s: float
    ) -> None:
        super().__init__(hello, address, timeout_s, connect_timeout_s)
        self._tickets: dict[int, LookupTicket] = {}
        self._next_request = 1
        self._numbers = itertools.count(1)
        self._news = threading.Event()

    def ask(self, chunks: KeyArray, timeout_s: float) -> LookupTicket:
        """Ask about chunks; poll the ticket's `stored`."""
        ticket = LookupTicket(len(chunks), time.monotonic() + timeout_s)
        packed = pack_keys(chunks)
        self.call(lambda: self._send(ticket, packed))
        return ticket

    def read_ahead(self, chunks: KeyArray, part: int) -> int:
        """Tell the gateway what of a part a waiting request will restore.

        Returns:
            A number for forget().
        """
        number = next(self._numbers)
        packed = pack_keys(chunks)
        self.call(lambda: self.channel.send(Ahead(number, packed, part)))
        return number

    def forget(self, number: int) -> None:
        """Take a read_ahead() back."""
        self.call(lambda: self.channel.send(Forget(number)))

    def wait_news(self, timeout_s: float) -> None:
        """Return when an answer, the Welcome or the end has come since the last call."""
        self._news.wait(timeout_s)
        self._news.clear()

    def _send(self, ticket: LookupTicket, packed: bytes) -> None:
        request = self._next_request
        self._next_request += 1
        self._tickets[request] = ticket
        self.channel.send(Lookup(request, packed))

    def on_message(self, message: ToRank) -> None:
        """Settle the ticket of an answer."""
        if not isinstance(message, LookupReply):
            return
        ticket = self._tickets.pop(message.request, None)
        if ticket is not None and len(message.stored) == ticket.num_chunks:
            ticket.answered_at = time.monotonic()
            ticket.stored = np.frombuffer(message.stored, dtype=np.bool_)
            self._news.set()

    def on_welcome(self, welcome: Welcome) -> None:
        """Nothing to prepare."""
        self._news.set()

    def on_turn(self) -> float:
        """Forget tickets that nobody waits for any more."""
        for request in [r for r, t in self._tickets.items() if t.expired]:
            del self._tickets[request]
        return IDLE_S

    def on_off(self, reason: str) -> None:
        """Leave tickets unanswered: they expire."""
        self._tickets.clear()
        self._news.set()

    def on_exit(self) -> None:
        """Nothing is owned."""

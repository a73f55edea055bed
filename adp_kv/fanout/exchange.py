"""The contract of what carries regions between the ranks of a group.

One exchange object belongs to one rank. Every rank of the group calls all_gather() the same
number of times with the same sizes; call k of one rank meets call k of the others. What is
queued runs in the order of a stream of the caller's, beside everything else, and never on a
communicator that somebody else uses.

Lifetime. A rank that never makes its call leaves the others' streams waiting: abort() ends
that on this rank at once, from whatever thread, and every region of an unfinished call is
then worthless, whatever it holds. After abort() nothing can be exchanged any more.

Threads: calls of one object are made one at a time, by its owner under its lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from adp_kv.errors import AdpError


class ExchangeError(AdpError):
    """Raised when a rank can't take part in an exchange: the group is of no use any more."""


class Exchange(ABC):
    """One rank's end of a group.

    Attributes:
        rank: in the group.
        num_ranks: of the group.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    @abstractmethod
    def all_gather(self, address: int, region_bytes: int, stream: int) -> None:
        """Queue an exchange in place; never waits for another rank.

        Args:
            address: of num_ranks * region_bytes bytes; region `rank` is this rank's and full
                when the stream gets here, the others are filled by the exchange.
            region_bytes: the same on every rank.
            stream: handle of the stream.

        Raises:
            ExchangeError: It could not be queued, or abort() was called before.
        """

    @abstractmethod
    def abort(self) -> None:
        """End what is queued and free everything; idempotent; bounded, needs no other rank."""

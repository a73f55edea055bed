"""Requests and copies of a rank that stand still while a file exists (worker_extension.adp_hold).

A held copy is made when its ticket is first asked for after the file has gone, so that it
reads or fills the ring as late as one on a device would; closing the mover waits for it, as
every mover does. A held request is sent then; until then the rank goes on as ever.

A file FILE.RANK says that something of that rank was held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from adp_kv.sdk.rank_client import RankClient
from adp_kv.transfer.base import Mark, SliceCopy, Ticket
from adp_kv.wire.messages import Get, Put

REQUESTS: dict[str, type] = {"get": Get, "put": Put}
COPIES = ("restore", "save")
_POLL_S = 0.01
_LONGEST_S = 120.0


class HeldTicket(Ticket):
    """A copy that begins when a file has gone."""

    def __init__(self, path: Path, start: Callable[[], Ticket]) -> None:
        self._path = path
        self._start = start
        self._ticket: Ticket | None = None
        self._lock = threading.Lock()

    @override
    def done(self) -> bool:
        with self._lock:
            if self._ticket is None:
                if self._path.exists():
                    return False
                self._ticket = self._start()
            return self._ticket.done()

    @override
    def fence(self) -> None:
        deadline = time.monotonic() + _LONGEST_S
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._path} is still there")
            time.sleep(_POLL_S)


def hold_copies(client: RankClient, kind: str, path: Path, reached: Path) -> None:
    """Hold a rank's copies of a kind, "restore" or "save"."""
    mover, tickets = client.mover, list[HeldTicket]()
    start, close = getattr(mover, kind), mover.close

    def held(copy: SliceCopy, after: Mark | None) -> Ticket:
        tickets.append(HeldTicket(path, lambda: start(copy, after)))
        reached.touch()
        return tickets[-1]

    def close_after() -> None:
        for ticket in tickets:
            ticket.fence()
        close()

    setattr(mover, kind, held)
    mover.close = close_after  # type: ignore[method-assign]


def hold_requests(client: RankClient, kind: type, path: Path, reached: Path) -> None:
    """Hold a rank's requests of a kind."""
    send, on_turn, held = client.channel.send, client.on_turn, list[Any]()

    def send_later(message: Any) -> None:
        if isinstance(message, kind) and path.exists():
            held.append(message)
            reached.touch()
        else:
            send(message)

    def turn() -> float:
        if held and not path.exists():
            for message in held:
                send(message)
            held.clear()
        wait_s = on_turn()
        return min(wait_s, _POLL_S) if held else wait_s

    client.channel.send = send_later  # type: ignore[method-assign]
    client.on_turn = turn  # type: ignore[method-assign]


def hold(client: RankClient, rank: int, what: str, path: Path) -> None:
    """Hold what a rank asks for ("get", "put") or copies ("restore", "save") while path exists."""
    reached = path.with_name(f"{path.name}.{rank}")
    if what in COPIES:
        hold_copies(client, what, path, reached)
    else:
        hold_requests(client, REQUESTS[what], path, reached)

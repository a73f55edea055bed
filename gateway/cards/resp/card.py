"""A card over the Valkey/Redis protocol: one logical database of a server is a database.

    submit ──► parts of pipeline_rows ──► lanes (thread + connection) ──► server
    on_done ◄── statuses ◄── replies, values received straight into the ring

Each value is stored behind a 16-byte header with its xxh3_64 (seeded with its key) and
length (`gateway.cards.resp.exchanges`), so that another program's key, a cut value or a
value of another key is CORRUPT, and then deleted.

The server owns capacity: with `maxmemory-policy noeviction` a full one answers NO_SPACE,
with an evicting one values vanish, which a gateway reads as a miss. `ttl_s` makes every
value expire. A cluster's redirections are not followed: name its nodes' databases, or a
proxy.

Threads. `connections` lanes an endpoint, each with a connection of its own.
Durability. The server's: nothing survives its restart unless it keeps an RDB or AOF file.
Failure scope. Entries. A lost connection fails the unanswered entries of its pipeline with
IO_ERROR (a WRITE among them may have been stored); the next batch connects anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from typing_extensions import override

from adp_kv.errors import CardError
from gateway.cards.parts import LaneCard, Lanes
from gateway.cards.resp.connection import ConnectionLostError, ReplyError
from gateway.cards.resp.exchanges import RespPart
from gateway.cards.resp.lanes import RespLanes
from gateway.cards.resp.settings import Endpoint, RespSettings

_REFUSALS: Final = {
    "NOAUTH": "set password (and username)",
    "WRONGPASS": "wrong username or password",
    "ERR AUTH": "the server has no password: set none",
    "ERR DB index": "the server has no such database: lower ?db=",
    "ERR SELECT": "a cluster has database 0 alone: drop ?db=",
    "NOPERM": "let the user run GET, SET, DEL, EXISTS, DBSIZE, SELECT and PING on key_prefix*",
    "DENIED": "the server is in protected mode: set a password on it, or bind it",
    "LOADING": "the server is loading its data; start again when it is done",
}


class RespCard(LaneCard[RespPart]):
    """A card of Valkey or Redis servers (see the module)."""

    def __init__(self, settings: RespSettings) -> None:
        """Make a closed card; connects to nothing."""
        super().__init__(
            "resp",
            settings,
            RespPart,
            databases=len(settings.endpoints),
            lanes=settings.connections,
            rows=settings.pipeline_rows,
            # What is under way is aborted, but for connecting, which has its deadline.
            stop_timeout_s=settings.connect_timeout_s,
        )
        self._settings = settings

    @override
    def _connect(self) -> Iterator[Lanes[RespPart]]:
        password = self._settings.read_password()
        for endpoint in self._settings.parsed_endpoints:
            yield self._open_lanes(endpoint, password)

    def _open_lanes(self, endpoint: Endpoint, password: str) -> RespLanes:
        try:
            return RespLanes(endpoint, self._settings, password, self._ended)
        except ConnectionLostError as error:
            raise CardError(
                f"endpoints: {endpoint.text}: {error}; is the server running, and is that "
                "its address?"
            ) from error
        except ReplyError as error:
            hints = (hint for start, hint in _REFUSALS.items() if str(error).startswith(start))
            hint = next(hints, "the server refuses us")
            raise CardError(f"endpoints: {endpoint.text}: {error}; {hint}") from error

    @override
    def stats(self) -> dict[str, int]:
        """Return counters; `values` is what the servers said last, other programs' keys too."""
        return {**super().stats(), "connections_lost": sum(lanes.lost for lanes in self._lanes)}

"""Settings of the Valkey/Redis card, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from adp_kv.errors import CardError, ConfigError
from gateway.cards.settings import LaneSettings, check_range

_MAX_CONNECTIONS: Final = 64
_MAX_TTL_S: Final = 10 * 365 * 86400.0
_LEAST_TIMEOUT_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server's logical database.

    Attributes:
        text: as in the settings.
        host: name or address; None for a Unix socket.
        port: TCP port; 0 for a Unix socket.
        path: of the Unix socket, "" for TCP.
        db: number that SELECT takes.
    """

    text: str
    host: str | None
    port: int
    path: str
    db: int


def parse_endpoint(text: str) -> Endpoint:
    """Return the parts of tcp://HOST:PORT or unix:///PATH, either with ?db=N.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        endpoint = _parse(text)
    except ValueError:
        endpoint = None
    if endpoint is None:
        raise ConfigError(
            f"endpoints: {text!r}: expected tcp://HOST:PORT or unix:///PATH, with ?db=N or not"
        )
    return endpoint


def _parse(text: str) -> Endpoint | None:
    parts = urlsplit(text)
    query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    db = int(query.pop("db", ["0"])[0])
    if query or db < 0 or parts.username is not None:
        return None
    if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path:
        return Endpoint(text, parts.hostname, parts.port, "", db)
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return Endpoint(text, None, 0, parts.path, db)
    return None


class RespSettings(LaneSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the Valkey/Redis card.

    Attributes:
        endpoints: tcp://HOST:PORT or unix:///PATH, with ?db=N for another logical database
            of the server; one a database of the card, in order. Not a cluster.
        username: of the server's ACL; empty: the default user.
        password: of that user; empty: none.
        password_file: file whose first line is the password, instead of `password`.
        key_prefix: before the 16 bytes of each key, to share a server.
        ttl_s: seconds after which a value is gone; 0: never.
        max_value_bytes: the longest value.
        connections: to each endpoint.
        pipeline_rows: entries asked for at once on a connection, at most 8 MiB of values.
        connect_timeout_s: to connect and log in.
        io_timeout_s: for one pipeline of entries: IO_ERROR for those not answered.
        reconnect_s: how long a server that can't be reached is not tried again.
        close_timeout_s: seconds that close() lets batches finish.
    """

    endpoints: tuple[str, ...]
    username: str = ""
    password: str = ""
    password_file: str = ""
    ttl_s: float = 0.0
    connections: int = 2
    pipeline_rows: int = 32
    io_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("endpoints: empty; name servers, such as tcp://127.0.0.1:6379")
        parsed = self.parsed_endpoints
        if len({(e.host, e.port, e.path, e.db) for e in parsed}) != len(parsed):
            raise ConfigError("endpoints: one is named twice; use ?db=N to tell them apart")
        if self.password and self.password_file:
            raise ConfigError("password_file: password is set too; keep one of them")
        if self.username and not (self.password or self.password_file):
            raise ConfigError("username: set without password or password_file")
        self.check_shared(_LEAST_TIMEOUT_S)
        check_range("ttl_s", self.ttl_s, 0, _MAX_TTL_S)
        if 0 < self.ttl_s < 1:
            raise ConfigError(f"ttl_s: {self.ttl_s} is below a second; 0 is never")
        check_range("connections", self.connections, 1, _MAX_CONNECTIONS)
        check_range("pipeline_rows", self.pipeline_rows, 1, 4096)

    @property
    def parsed_endpoints(self) -> list[Endpoint]:
        """The endpoints' parts."""
        return [parse_endpoint(text) for text in self.endpoints]

    def read_password(self) -> str:
        """Return the password, "" if there is none.

        Raises:
            CardError: The file can't be read.
        """
        if not self.password_file:
            return self.password
        try:
            return Path(self.password_file).read_text().split("\n", 1)[0]
        except OSError as error:
            raise CardError(f"password_file {self.password_file}: {error.strerror}") from error

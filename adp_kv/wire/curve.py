"""Encrypted, mutually authenticated sockets (CurveZMQ) from one secret that both sides have.

    key file (0600) ─► secret of the gateway, secret of the engines ─► CURVE key pairs

Each side derives both pairs, uses its own, and takes the other's public key as the only one
it speaks to. A peer without the file gets no reply at all.

Threads: none; sockets belong to their callers. Failure scope: ConfigError before a socket is
connected or bound.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import zmq
from zmq.utils import z85

from adp_kv.errors import ConfigError

MIN_SECRET_BYTES = 32
ZAP_DOMAIN = b"adp"
_MAX_PATH_BYTES = 107  # of sockaddr_un, without the zero at its end
_MAKE = "make one with: (umask 077; openssl rand -base64 32 > FILE)"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Both key pairs, z85-encoded as ZeroMQ wants them."""

    gateway_secret: bytes
    gateway_public: bytes
    engine_secret: bytes
    engine_public: bytes

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket speak to the gateway of this key alone; before connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.gateway_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.engine_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.engine_secret)

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket accept CURVE peers alone; before bind. Who they are, a ZAP handler says."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.gateway_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def read_keys(key_file: str) -> CurveKeys | None:
    """Return the keys of a file, None for "".

    Raises:
        ConfigError: It can't be read, is too short, or others may read it; says how to make one.
    """
    if not key_file:
        return None
    path = Path(key_file)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123  an open descriptor: what is checked is read
            found = os.fstat(fd)
            secret = file.read(1 << 16).strip()
    except OSError as error:
        raise ConfigError(f"key_file = {key_file!r}: {error.strerror}; {_MAKE}") from error
    if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"key_file = {key_file!r}: others may read it; chmod 600 {key_file}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"key_file = {key_file!r}: less than {MIN_SECRET_BYTES} bytes; {_MAKE}")
    gateway, engine = _pair(secret, "gateway"), _pair(secret, "engine")
    return CurveKeys(*gateway, *engine)


def _pair(secret: bytes, side: Literal["gateway", "engine"]) -> tuple[bytes, bytes]:
    """Return the secret and the public key of a side."""
    digest = blake2b(secret, digest_size=32, person=f"adpkv-{side}".encode()).digest()
    own = z85.encode(digest)
    return own, zmq.curve_public(own)


def is_local(address: str) -> bool:
    """Return whether only this host can reach an address: ipc, or a loopback interface."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, of which only this one is known to stay here
        return host == "localhost"


def require_address(setting: str, address: str) -> None:
    """Refuse what is no address of a gateway.

    Raises:
        ConfigError: It names both forms.
    """
    match = re.fullmatch(r"tcp://[^/\s]+:(\d{1,5})|ipc:///.+", address)
    if match is None or int(match[1] or 0) >= 1 << 16:
        raise ConfigError(
            f"{setting} = {address!r}: expected tcp://HOST:PORT or ipc:///absolute/path"
        )
    if len(os.fsencode(address.removeprefix("ipc://"))) > _MAX_PATH_BYTES and match[1] is None:
        raise ConfigError(
            f"{setting} = {address!r}: the path of a socket has at most {_MAX_PATH_BYTES} bytes; "
            "choose a shorter one"
        )


def require_key(setting: str, address: str, key_file: str) -> None:
    """Refuse an address beyond this host without a key.

    Raises:
        ConfigError: It names both remedies.
    """
    if not is_local(address) and not key_file:
        raise ConfigError(
            f"{setting} = {address!r} can be reached from other hosts: set key_file on both sides, "
            "or use tcp://127.0.0.1:PORT or ipc:///PATH"
        )

"""Who may speak: ZeroMQ's authentication requests (ZAP), answered in the gateway's own loop.

Only peers with the engines' key of our key file are let in; without a key file there is no
gatekeeper and the address must be local (`adp_kv.wire.curve`).

Threads: the gateway's main. Failure scope: a refused peer costs a line in the log.
"""

from __future__ import annotations

import hmac
import logging
from typing import Any

import zmq
from zmq.utils import z85

from adp_kv.wire.curve import CurveKeys

log = logging.getLogger("adp_kv.gateway")

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_NUM_FRAMES = 7  # version, id, domain, address, identity, mechanism, key


class Gatekeeper:
    """Answers ZAP requests of one context.

    Args:
        context: of the sockets to guard.
        keys: whose engine key is let in.
    """

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self.num_refused = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self._engine = z85.decode(keys.engine_public)

    def answer(self) -> None:
        """Answer every request that waits."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = ([*frames, b"", b""])[:2]
            known = len(frames) == _NUM_FRAMES and frames[5] == b"CURVE"
            welcome = known and hmac.compare_digest(frames[6], self._engine)
            if not welcome:
                self.num_refused += 1
                where = frames[3].decode(errors="replace") if known else "a peer"
                log.warning("refused %s: it does not have this gateway's key", where)
            code, text = (b"200", b"OK") if welcome else (b"400", b"no key")
            self.socket.send_multipart([version, request, code, text, b"engine", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

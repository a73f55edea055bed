"""Questions that anyone may ask a gateway, without being a rank of an engine.

Threads: the caller's. Failure scope: GatewayError if nobody answers in time.
"""

from __future__ import annotations

import contextlib
import time
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import GatewayError
from adp_kv.sdk.channel import Channel
from adp_kv.wire.keys import KeyArray, pack_keys
from adp_kv.wire.messages import Inspect, LookupReply, StatsReply, StatsRequest, ToGateway

_Reply = TypeVar("_Reply")
_POLL_S = 0.02


def ask_stats(address: str, timeout_s: float, key_file: str = "") -> dict[str, int]:
    """Return a gateway's counters by name (docs/metrics.md).

    Raises:
        GatewayError: No answer in time.
    """
    return _ask(address, StatsRequest(), StatsReply, timeout_s, key_file).counters


def ask_stored(
    address: str, chunks: KeyArray, timeout_s: float, key_file: str = ""
) -> NDArray[np.bool_]:
    """Return which chunks a gateway's card holds whole: bool [n].

    Raises:
        GatewayError: No answer in time.
    """
    reply = _ask(address, Inspect(1, pack_keys(chunks)), LookupReply, timeout_s, key_file)
    return np.frombuffer(reply.stored, dtype=np.bool_)


def _ask(
    address: str, question: ToGateway, kind: type[_Reply], timeout_s: float, key_file: str
) -> _Reply:
    deadline = time.monotonic() + timeout_s
    with Channel(address, timeout_s, key_file=key_file) as channel:
        asked = False
        while time.monotonic() < deadline:
            if not asked:
                with contextlib.suppress(GatewayError):  # not connected yet
                    channel.send(question)
                    asked = True
            channel.wait(_POLL_S)
            message = channel.receive()
            if isinstance(message, kind):
                return message
    raise GatewayError(f"no gateway answers at {address} within {timeout_s:g} s")

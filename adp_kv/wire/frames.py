"""The trust boundary: bytes from a peer become messages here, or a WireError.

Sizes from peers are never trusted: counts are bounded, packed arrays must have a
whole number of items, and what a message means is checked by whoever acts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import WireError
from adp_kv.wire.messages import ToGateway, ToRank

_T = TypeVar("_T")

MAX_MESSAGE_BYTES = 64 << 20
"""Room for 4 million keys; a larger frame is refused by the socket itself."""

_encoder = msgspec.msgpack.Encoder()
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def encode(message: ToGateway | ToRank) -> bytes:
    """Return the message's frame."""
    return _encoder.encode(message)


def decode_at_gateway(frames: Sequence[bytes]) -> ToGateway:
    """Return the message that a rank sent; frames exclude the sender's identity.

    Raises:
        WireError: Not one frame, not msgpack, not a message ranks send, or a field is off.
    """
    return _decode(frames, _to_gateway)


def decode_at_rank(frames: Sequence[bytes]) -> ToRank:
    """Return the message that the gateway sent.

    Raises:
        WireError: As decode_at_gateway.
    """
    return _decode(frames, _to_rank)


def _decode(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    if len(frames) != 1:
        raise WireError(f"a message is one frame, got {len(frames)}")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, RecursionError, ValueError, MemoryError) as error:
        raise WireError(f"undecodable message of {len(frames[0])} bytes: {error}") from error


def pack_slots(slots: NDArray[np.uint32]) -> bytes:
    """Return slots as packed little-endian uint32."""
    return slots.astype("<u4", copy=False).tobytes()


def unpack_slots(packed: bytes) -> NDArray[np.uint32]:
    """Return uint32 [n] over packed slots.

    Raises:
        WireError: The length is no multiple of 4.
    """
    if len(packed) % 4:
        raise WireError(f"packed slots: {len(packed)} bytes is no multiple of 4")
    return np.frombuffer(packed, dtype="<u4")

"""Frames: messages come back whole, and nothing else becomes a message."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adp_kv.errors import WireError
from adp_kv.wire import messages as m
from adp_kv.wire.frames import (
    decode_at_gateway,
    decode_at_rank,
    encode,
    pack_slots,
    unpack_slots,
)

CACHE = m.CacheDecl(8, "layers.1", 1 << 20, 1, 4)
TO_GATEWAY = [
    m.Hello(1, "0.1", "engine", 3, 8, bytes(16), [CACHE, CACHE], 77),
    m.Attached(1 << 63),
    m.Lookup(7, bytes(range(32))),
    m.Ahead(8, bytes(range(32)), 0),
    m.Forget(8),
    m.Get(1 << 40, [0, 8, 16], bytes(48)),
    m.Put(2, 3, [1], bytes(16)),
    m.Release(2, 9, ok=False),
    m.Goodbye("the engine shut down"),
    m.StatsRequest(),
    m.Inspect(3, bytes(16)),
]
TO_RANK = [
    m.Welcome("0.1", 5, "/dev/shm/x", 4096, 8, 512, "slab", 1.0, bytes(16)),
    m.Refused("retry: no"),
    m.LookupReply(7, b"\x00\x01"),
    m.Granted(2, 0, bytes(8), b"\x00\x02"),
    m.Failed(2, "a rank stayed away"),
    m.Goodbye("the gateway shut down"),
    m.StatsReply({"gets": 1}),
]
BOTH = [m.Ping(1), m.Pong(-1), m.Goodbye("")]
SIDES = [
    pytest.param(decode_at_gateway, TO_GATEWAY + BOTH, TO_RANK, id="gateway"),
    pytest.param(decode_at_rank, TO_RANK + BOTH, TO_GATEWAY, id="rank"),
]
DECODERS = [decode_at_gateway, decode_at_rank]


def kinds(messages):
    return {type(message) for message in messages}


@pytest.mark.parametrize(("decode", "known", "_other"), SIDES)
def test_every_message_comes_back(decode, known, _other):
    assert all(decode([encode(message)]) == message for message in known)
    union = m.ToGateway if decode is decode_at_gateway else m.ToRank
    assert kinds(known) == set(union.__args__)


@pytest.mark.parametrize(("decode", "known", "other"), SIDES)
def test_messages_of_the_other_direction_are_refused(decode, known, other):
    for message in other:
        if type(message) not in kinds(known):
            with pytest.raises(WireError):
                decode([encode(message)])


def test_no_message_is_another():
    every = TO_GATEWAY + TO_RANK + BOTH
    tags = {kind.__struct_config__.tag for kind in kinds(every)}
    assert len(tags) == len(kinds(every))
    for message in every:
        frame = encode(message)
        for kind in kinds(every) - {type(message)}:
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(frame, type=kind)


@pytest.mark.parametrize(("decode", "known", "_other"), SIDES)
def test_cut_and_doubled_frames_are_refused(decode, known, _other):
    for message in known:
        frame = encode(message)
        cuts = [frame[:n] for n in range(len(frame))] + [frame[n:] for n in range(1, len(frame))]
        for wrong in (*cuts, frame + frame, frame + b"\xc0"):
            with pytest.raises(WireError):
                decode([wrong])


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("frames", [[], [b"", b""], [encode(m.Ping(1))] * 2, [b""]])
def test_other_than_one_frame_is_refused(decode, frames):
    with pytest.raises(WireError):
        decode(frames)


def changed(message, field, value):
    return msgspec.msgpack.encode(
        msgspec.to_builtins(message, builtin_types=[bytes]) | {field: value}
    )


@pytest.mark.parametrize(("decode", "known", "_other"), SIDES)
def test_wrong_types_and_missing_fields_are_refused(decode, known, _other):
    for message in known:
        plain = msgspec.to_builtins(message, builtin_types=[bytes])
        for field in plain:
            for value in (None, [], {"a": 1}, 1.5, [[1]], -(1 << 63)):
                if not isinstance(value, type(plain[field])) and (
                    not isinstance(plain[field], float) or not isinstance(value, int)
                ):
                    with pytest.raises(WireError):
                        decode([changed(message, field, value)])
            without = {name: value for name, value in plain.items() if name != field}
            with pytest.raises(WireError):
                decode([msgspec.msgpack.encode(without)])


def nested(depth):
    ping = msgspec.msgpack.encode({"type": "ping", "nonce": 1, "x": None})
    return ping[:-1] + b"\x91" * depth + b"\xc0"


HOSTILE = [
    nested(100_000),
    b"\x91" * 100_000,
    encode(m.Refused("abc")).replace(b"abc", b"\xff\xfe\xfd"),
    encode(m.Goodbye("abc")).replace(b"abc", b"\xff\xfe\xfd"),
    encode(m.Get(1, [5], b"")).replace(b"caches\x91\x05", b"caches\xdd\xff\xff\xff\xff\x05"),
    encode(m.Put(1, 1, [5], b"")).replace(b"caches\x91\x05", b"caches\xdd\x7f\xff\xff\xff\x05"),
    encode(m.Get(1, [5], b"")).replace(b"chunks\xc4\x00", b"chunks\xc6\xff\xff\xff\xff"),
    encode(m.StatsReply({})).replace(b"counters\x80", b"counters\xdf\xff\xff\xff\xff"),
    encode(m.Ping(1)).replace(b"nonce\x01", b"nonce\xd4\x05\x00"),
    b"\xdf\xff\xff\xff\xff",
    b"\xc1",
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("frame", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_frame_is_refused(decode, frame):
    with pytest.raises(WireError):
        decode([frame])


def survives(decode, frame):
    try:
        decode([frame])
    except WireError:
        return


@given(st.binary(max_size=200))
@example(b"")
def test_random_bytes_never_raise_anything_else(frame):
    survives(decode_at_gateway, frame)
    survives(decode_at_rank, frame)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TO_GATEWAY + TO_RANK + BOTH), st.data())
def test_mutated_frames_never_raise_anything_else(message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not frame:
            break
    survives(decode_at_gateway, bytes(frame))
    survives(decode_at_rank, bytes(frame))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(TO_GATEWAY + TO_RANK + BOTH),
    st.dictionaries(
        st.sampled_from(["seq", "caches", "chunks", "nonce", "rank", "type", "slots", "z"]), PLAIN
    ),
)
def test_well_formed_nonsense_never_raises_anything_else(message, fields):
    plain = msgspec.to_builtins(message, builtin_types=[bytes])
    frame = msgspec.msgpack.encode(plain | fields)
    survives(decode_at_gateway, frame)
    survives(decode_at_rank, frame)


def test_packed_slots_come_back():
    slots = np.array([0, 1, m.NO_SLOT, 70000], dtype=np.uint32)
    assert pack_slots(slots) == slots.astype("<u4").tobytes()
    assert (unpack_slots(pack_slots(slots)) == slots).all()
    for length in (1, 2, 3, 5):
        with pytest.raises(WireError, match="multiple of 4"):
            unpack_slots(bytes(length))


def test_object_bytes_count_all_slices():
    assert CACHE.object_bytes == 4 << 20

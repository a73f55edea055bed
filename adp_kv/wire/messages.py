"""Every message between an engine's ranks and the gateway, as msgspec tagged structs.

    rank                                gateway
    Hello (all ranks; geometry) ─────►
                                ◄────── Welcome (ring) or Refused
    Attached                    ─────►  (all attached: the ring's name goes)
    Lookup (scheduler side)     ─────►
                                ◄────── LookupReply
    Ahead, Forget (scheduler side) ──►  (may read it before a Get asks; may not)
    Get (one a layer and rank)  ─────►  (all ranks: run once)
                                ◄────── Granted, once a batch of objects is in its slots
    Release                     ─────►  (all ranks: slots are free again)
    Put                         ─────►
                                ◄────── Granted, slots to fill (NO_SLOT: already stored)
    Release                     ─────►  (all ranks filled them: written, then free)
    Ping ◄────► Pong            either side's heartbeat
                                ◄────── Failed (one request), Goodbye (the session)

Arrays travel packed (little-endian) in one bytes field: one message for thousands of
objects. The order of objects in a request is cache-major: object c * len(chunks) + i
is cache `caches[c]` of chunk i. A message is one ZeroMQ frame, msgpack-encoded.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PROTOCOL_VERSION = 3
DEFAULT_PORT = 5557
NO_SLOT = 0xFFFFFFFF
"""In Granted.slots of a put: nothing to fill, the object is stored or not wanted."""


class CacheDecl(msgspec.Struct, frozen=True, array_like=True):
    """One cache of one layer as one rank holds it.

    Attributes:
        index: engine-wide number of the (layer, cache kind); part of object keys.
        name: for messages and logs.
        slice_bytes: bytes of this rank's slice of an object.
        slice_idx: which slice of the object this rank holds.
        num_slices: distinct slices of an object (1 for replicated caches).
        layout: item type, shape and strides inside a page: what its bytes mean.
        part: caches with the same number have their chunks stored and committed together.
    """

    index: int
    name: str
    slice_bytes: int
    slice_idx: int
    num_slices: int
    layout: str = ""
    part: int = 0

    @property
    def object_bytes(self) -> int:
        """Bytes of one object of this cache, all slices together."""
        return self.slice_bytes * self.num_slices


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """A rank (or the scheduler side, rank -1) asks to join.

    Attributes:
        version: PROTOCOL_VERSION of the sender.
        release: adp-kv version, for messages.
        engine: the engine's own name; all ranks of one engine send the same.
        rank: 0..world_size-1, or -1 for the scheduler side.
        world_size: workers of the engine.
        namespace: 16-byte digest of everything that changes the bytes.
        caches: this rank's caches; empty for the scheduler side.
        pid: for logs.
    """

    version: int
    release: str
    engine: str
    rank: int
    world_size: int
    namespace: bytes
    caches: list[CacheDecl]
    pid: int


class Welcome(_Message, frozen=True, tag="welcome"):
    """The engine is complete; the ring is ready to be mapped.

    geometry: 16-byte digest of all ranks' caches; part of the scheduler side's keys.
    """

    release: str
    generation: int
    ring_path: str
    io_size: int
    num_slots: int
    fragment_size: int
    card: str
    heartbeat_s: float
    geometry: bytes


class Refused(_Message, frozen=True, tag="refused"):
    """The gateway does not take this rank; reason names what to change."""

    reason: str


class Attached(_Message, frozen=True, tag="attached"):
    """This rank has mapped the ring."""

    generation: int


class Lookup(_Message, frozen=True, tag="lookup"):
    """EXIST: which chunks are stored whole? chunks: packed 16-byte chunk keys."""

    request: int
    chunks: bytes


class LookupReply(_Message, frozen=True, tag="lookup_reply"):
    """stored: one byte a chunk, 1 = its commit record exists."""

    request: int
    stored: bytes


class Ahead(_Message, frozen=True, tag="ahead"):
    """A request that still waits in the engine's queue will restore these chunks.

    Attributes:
        request: a number of the scheduler side's, unique among its unfinished ones.
        chunks: packed chunk keys, in the order in which a Get will name them.
        part: whose caches will be asked for them.
    """

    request: int
    chunks: bytes
    part: int


class Forget(_Message, frozen=True, tag="forget"):
    """The request of an Ahead restores nothing any more."""

    request: int


class Inspect(_Message, frozen=True, tag="inspect"):
    """Anyone may ask which chunks are stored whole, without Hello; answered by a LookupReply.

    Keys are digests that nobody can guess: who names one knows the prompt and the namespace.
    """

    request: int
    chunks: bytes


class Get(_Message, frozen=True, tag="get"):
    """Read the objects of caches x chunks into ring slots.

    Attributes:
        seq: the same number on every rank of the group for the same request; unique
            among the engine's unfinished requests.
        caches: indices of the caches.
        chunks: packed chunk keys.
    """

    seq: int
    caches: list[int]
    chunks: bytes


class Put(_Message, frozen=True, tag="put"):
    """Store the objects of caches x chunks; fields as in Get.

    Attributes:
        job: puts of one job and part have the same chunks and together every cache of
            the part; a chunk is committed when its job has stored all of them.
    """

    seq: int
    job: int
    caches: list[int]
    chunks: bytes


class Granted(_Message, frozen=True, tag="granted"):
    """Objects first .. first+n-1 of a request have slots.

    Attributes:
        seq: of the request.
        first: index of the first object.
        slots: uint32 [n] packed.
        status: of a get: uint8 [n] packed, 0 = the slot holds the object's exact bytes,
            else why not (gateway.cards.base.Status). Empty for a put.
    """

    seq: int
    first: int
    slots: bytes
    status: bytes


class Release(_Message, frozen=True, tag="release"):
    """This rank is done with a Granted batch: copied out (get) or filled (put).

    Attributes:
        seq, first: of the Granted message.
        ok: of a put: the slots hold the bytes; False: not filled, don't store them.
    """

    seq: int
    first: int
    ok: bool


class Failed(_Message, frozen=True, tag="failed"):
    """A request has ended without its objects; nothing more follows for it."""

    seq: int
    reason: str


class Ping(_Message, frozen=True, tag="ping"):
    """Are you there?"""

    nonce: int


class Pong(_Message, frozen=True, tag="pong"):
    """Yes."""

    nonce: int


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """The sender leaves the session; nothing it was asked will be answered."""

    reason: str


class StatsRequest(_Message, frozen=True, tag="stats_request"):
    """Anyone may ask for the counters, without Hello."""


class StatsReply(_Message, frozen=True, tag="stats_reply"):
    """Counters by name since the gateway started; docs/metrics.md has their meaning."""

    counters: dict[str, int]


ToGateway: TypeAlias = (
    Hello
    | Attached
    | Lookup
    | Inspect
    | Ahead
    | Forget
    | Get
    | Put
    | Release
    | Ping
    | Pong
    | Goodbye
    | StatsRequest
)
ToRank: TypeAlias = (
    Welcome | Refused | LookupReply | Granted | Failed | Ping | Pong | Goodbye | StatsReply
)

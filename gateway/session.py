"""One engine as the gateway sees it: which ranks, which caches, which ring.

    EMPTY ──Hello of a rank──► JOINING ──all ranks──► ACTIVE ──Goodbye, lease, death──► CLOSED

Ranks join by Hello and wait; when the last one is there, their geometry is checked
against one another, the ring is divided for the largest object and published, and
everybody is welcomed. A session that ends is never reused: the next engine gets a
new ring file, so that nobody who still holds the old mapping can do harm.

Threads: the gateway's main. Failure scope: a refused rank changes nothing; a broken
session ends for all its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from adp_kv.errors import WireError
from adp_kv.wire.keys import KEY_BYTES
from adp_kv.wire.messages import PROTOCOL_VERSION, CacheDecl, Hello

SCHEDULER_RANK = -1
MAX_WORLD_SIZE = 4096
MAX_CACHES = 65536
MAX_PARTS = 4096


@dataclass(frozen=True, slots=True)
class Cache:
    """One (layer, cache kind) of the engine.

    Attributes:
        object_bytes: all slices together.
        part: caches of one part have their chunks committed together.
        group: the ranks that hold a slice and take part in its requests, ascending.
    """

    name: str
    object_bytes: int
    part: int
    group: tuple[int, ...]


@dataclass(slots=True)
class Member:
    """A rank that has said Hello."""

    identity: bytes
    hello: Hello
    last_seen: float
    attached: bool = False


@dataclass(slots=True)
class Session:
    """The ranks of one engine.

    Attributes:
        engine: its name, world_size and namespace, the same in every Hello.
        members: by rank; the scheduler side is rank -1.
        caches: by index, filled by complete().
    """

    engine: str
    world_size: int
    namespace: bytes
    members: dict[int, Member] = field(default_factory=dict)
    caches: dict[int, Cache] = field(default_factory=dict)
    active: bool = False

    def join(self, identity: bytes, hello: Hello, now: float) -> None:
        """Take a rank in; a repeated Hello of the same peer shows that it still waits.

        Raises:
            WireError: The Hello contradicts those before it.
        """
        if hello.world_size != self.world_size or hello.namespace != self.namespace:
            raise WireError(
                f"rank {hello.rank} of engine {hello.engine} says world_size {hello.world_size}, "
                f"namespace {hello.namespace.hex()}, the ranks before it {self.world_size} and "
                f"{self.namespace.hex()}: all ranks need one model, one set of settings and one "
                "adp-kv release (what a namespace holds: VLLM_LOGGING_LEVEL=DEBUG)"
            )
        member = self.members.get(hello.rank)
        if member is not None and member.identity != identity:
            raise WireError(
                f"rank {hello.rank} of engine {hello.engine} is already here as pid "
                f"{member.hello.pid}: restart the engine as a whole"
            )
        if member is not None:
            member.last_seen = now
            return
        for rank, other in self.members.items():
            if other.identity == identity:
                raise WireError(f"rank {rank} of engine {hello.engine} says it is {hello.rank} too")
        self.members[hello.rank] = Member(identity, hello, now)

    @property
    def complete(self) -> bool:
        """Whether every worker rank has joined."""
        return all(rank in self.members for rank in range(self.world_size))

    def settle(self) -> int:
        """Check the ranks' caches against one another; return io_size.

        Raises:
            WireError: Slices are missing or of different sizes; names cache and ranks.
        """
        holders: dict[int, list[tuple[int, CacheDecl]]] = {}
        for rank in range(self.world_size):
            for decl in self.members[rank].hello.caches:
                holders.setdefault(decl.index, []).append((rank, decl))
        if not holders:
            raise WireError(f"engine {self.engine} declared no cache")
        self.caches = {index: _settle_cache(decls) for index, decls in holders.items()}
        self.active = True
        return max(cache.object_bytes for cache in self.caches.values())

    def geometry(self) -> bytes:
        """Return a 16-byte digest of every rank's caches; only once settled."""
        facts = blake2b(digest_size=KEY_BYTES, person=b"adpkv-geometry")
        for rank in range(self.world_size):
            for decl in sorted(self.members[rank].hello.caches, key=lambda d: d.index):
                facts.update(repr((rank, *msgspec.structs.astuple(decl))).encode())
        return facts.digest()

    def part(self, part: int) -> set[int]:
        """Return the caches of a part, whose chunks are committed together."""
        return {index for index, other in self.caches.items() if other.part == part}

    def group_of(self, caches: list[int], rank: int) -> tuple[int, ...]:
        """Return the ranks that share a request for these caches.

        Raises:
            WireError: Unknown caches, caches of different ranks or parts, or not this rank's.
        """
        if not caches:
            raise WireError("a request names no cache")
        unknown = [c for c in caches if c not in self.caches]
        if unknown:
            raise WireError(f"unknown cache index {unknown[0]}")
        group = self.caches[caches[0]].group
        if len(set(caches)) != len(caches):
            raise WireError("a request names a cache twice")
        if any(self.caches[c].group != group for c in caches):
            raise WireError("one request mixes caches of different ranks")
        if any(self.caches[c].part != self.caches[caches[0]].part for c in caches):
            raise WireError("one request mixes caches of different parts")
        if rank not in group:
            raise WireError(f"rank {rank} holds no slice of {self.caches[caches[0]].name}")
        return group


def _settle_cache(decls: list[tuple[int, CacheDecl]]) -> Cache:
    first_rank, first = decls[0]
    for rank, decl in decls:
        same = msgspec.structs.replace(decl, slice_idx=first.slice_idx) == first
        if not same or not 0 <= decl.slice_idx < decl.num_slices:
            raise WireError(
                f"cache {first.index}: rank {first_rank} has {first.name}, {first.num_slices} "
                f"slices of {first.slice_bytes} bytes, rank {rank} has {decl.name}, slice "
                f"{decl.slice_idx} of {decl.num_slices} of {decl.slice_bytes} bytes; layouts "
                f"{first.layout!r} and {decl.layout!r}, parts {first.part} and {decl.part}"
            )
    missing = set(range(first.num_slices)) - {decl.slice_idx for _, decl in decls}
    if missing:
        raise WireError(f"cache {first.name}: no rank holds slice {min(missing)}")
    return Cache(first.name, first.object_bytes, first.part, tuple(rank for rank, _ in decls))


def check_hello(hello: Hello) -> None:
    """Check a Hello by itself.

    Raises:
        WireError: Another protocol version, or a number out of range; names the remedy.
    """
    if hello.version != PROTOCOL_VERSION:
        raise WireError(
            f"rank {hello.rank} speaks protocol {hello.version} (adp-kv {hello.release}), this "
            f"gateway {PROTOCOL_VERSION}: install the same adp-kv release on both sides"
        )
    if not 1 <= hello.world_size <= MAX_WORLD_SIZE:
        raise WireError(f"world_size {hello.world_size} is out of range")
    if not SCHEDULER_RANK <= hello.rank < hello.world_size:
        raise WireError(f"rank {hello.rank} of {hello.world_size} is out of range")
    if len(hello.namespace) != KEY_BYTES or len(hello.caches) > MAX_CACHES:
        raise WireError("a namespace is 16 bytes and an engine has at most 65536 caches")
    if len({decl.index for decl in hello.caches}) != len(hello.caches):
        raise WireError(f"rank {hello.rank} declares a cache index twice")
    for decl in hello.caches:
        sizes_ok = 1 <= decl.slice_bytes <= 1 << 40 and 1 <= decl.num_slices <= MAX_WORLD_SIZE
        if not sizes_ok or not 0 <= decl.index < MAX_CACHES or not 0 <= decl.part < MAX_PARTS:
            raise WireError(f"cache {decl.name!r} of rank {hello.rank} is out of range")

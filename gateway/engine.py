"""One engine being served: its session, its ring, its gets and puts.

    Hello ─► Session ─► last rank: ring divided and published ─► Welcome ─► tables

Threads: the gateway's main. Failure scope: end() finishes the engine for good; its
ring is freed when the card no longer touches it, and `drained` tells when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from adp_kv import __version__
from adp_kv.errors import WireError
from adp_kv.ring.region import RingFile
from adp_kv.units import format_bytes
from adp_kv.wire.keys import unpack_keys
from adp_kv.wire.messages import (
    Ahead,
    Attached,
    Forget,
    Get,
    Goodbye,
    Hello,
    Lookup,
    LookupReply,
    Ping,
    Put,
    Release,
    ToRank,
    Welcome,
)
from gateway.cards.base import StatusArray
from gateway.config import Settings
from gateway.counters import Counters
from gateway.gets import GetTable
from gateway.objects import ObjectStore
from gateway.puts import PutTable
from gateway.requests import Context
from gateway.session import SCHEDULER_RANK, Session

log = logging.getLogger("adp_kv.gateway")

Deliver = Callable[[bytes, ToRank], bool]


class Engine:
    """Serves the ranks of one engine until end().

    Args:
        deliver: sends a message to a peer's identity; False if the peer is gone.
    """

    def __init__(
        self,
        hello: Hello,
        settings: Settings,
        ring: RingFile,
        store: ObjectStore,
        counters: Counters,
        deliver: Deliver,
        clock: Callable[[], float],
    ) -> None:
        self.session = Session(hello.engine, hello.world_size, hello.namespace)
        self.ended: str | None = None
        self._settings = settings
        self._ring = ring
        self._store = store
        self._counters = counters
        self._deliver = deliver
        self._clock = clock
        self._ranks: dict[bytes, int] = {}
        self._gets: GetTable | None = None
        self._puts: PutTable | None = None
        self._welcome: Welcome | None = None

    def rank_of(self, identity: bytes) -> int | None:
        """Return the rank behind a peer, or None."""
        return self._ranks.get(identity)

    def touch(self, rank: int) -> None:
        """Note that a rank has spoken."""
        self.session.members[rank].last_seen = self._clock()

    def hello(self, identity: bytes, hello: Hello) -> None:
        """Take a rank in; welcome everybody when it was the last, else let it know we are here.

        Raises:
            WireError: It contradicts the others.
            RingError: The ring can't hold the engine's objects.
        """
        self.session.join(identity, hello, self._clock())
        self._ranks[identity] = hello.rank
        if self._welcome is not None:
            self._send(hello.rank, self._welcome)
        elif self.session.complete:
            self._start()
        else:
            self._send(hello.rank, Ping(0))  # so that it knows what it waits for

    @property
    def start_failed(self) -> bool:
        """Whether all ranks are here and could not be welcomed: nothing will come of it."""
        return self.session.complete and self._welcome is None

    def is_taken(self, identity: bytes, rank: int) -> bool:
        """Return whether another peer is that rank."""
        member = self.session.members.get(rank)
        return member is not None and member.identity != identity

    def _start(self) -> None:
        io_size = max(self.session.settle(), self._settings.io_size)
        mapping = self._ring.divide(io_size)
        header = mapping.header
        context = Context(
            session=self.session,
            store=self._store,
            mapping=mapping,
            send=self._send,
            counters=self._counters,
            clock=self._clock,
            batch_bytes=self._settings.batch_bytes,
            read_ahead_bytes=self._settings.read_ahead_bytes,
            rank_deadline_s=self._settings.rank_deadline_s,
        )
        self._store.namespace = int.from_bytes(self.session.namespace[:4], "little")
        self._gets = GetTable(context)
        self._puts = PutTable(context, self._settings.job_deadline_s)
        self._ring.publish()
        self._store.card.register(mapping.address, mapping.num_bytes)
        log.info(
            "engine %s: %d ranks, %d caches; io_size = %d bytes (%s), max_parallel_ios = %d",
            self.session.engine,
            self.session.world_size,
            len(self.session.caches),
            io_size,
            format_bytes(io_size),
            header.num_slots,
        )
        self._welcome = Welcome(
            release=__version__,
            generation=header.generation,
            ring_path=str(self._ring.path),
            io_size=io_size,
            num_slots=header.num_slots,
            fragment_size=self._store.fragment_size,
            card=self._settings.card,
            heartbeat_s=self._settings.heartbeat_s,
            geometry=self.session.geometry(),
        )
        for rank in list(self.session.members):
            self._send(rank, self._welcome)

    def _send(self, rank: int, message: ToRank) -> None:
        member = self.session.members.get(rank)
        if member is None or self.ended is not None:
            return
        if not self._deliver(member.identity, message):
            self.end(f"rank {rank} (pid {member.hello.pid}) is gone")

    def attached(self, rank: int, message: Attached) -> None:
        """Note that a rank has mapped the ring; withdraw its name after the last.

        Raises:
            WireError: Another ring was mapped.
        """
        if message.generation != self._ring.generation:
            raise WireError(f"rank {rank} mapped ring {message.generation:x}, not this one")
        self.session.members[rank].attached = True
        workers = [m for r, m in self.session.members.items() if r != SCHEDULER_RANK]
        if len(workers) == self.session.world_size and all(m.attached for m in workers):
            self._ring.withdraw()
            log.info("engine %s: every rank has mapped the ring", self.session.engine)

    def lookup(self, rank: int, message: Lookup) -> None:
        """Answer which chunks are stored whole.

        Raises:
            WireError: No chunk, or the keys are cut.
        """
        chunks = unpack_keys(message.chunks)
        if not len(chunks):
            raise WireError("a lookup names no chunk")
        self._counters.add("lookups")
        self._counters.add("chunks_looked_up", len(chunks))

        def then(status: StatusArray) -> None:
            stored = status == 0
            caches = self.session.caches
            sizes = {index: cache.object_bytes for index, cache in caches.items()}
            stored &= self._store.reachable(chunks, sizes)
            self._counters.add("chunks_found", int(stored.sum()))
            self._send(rank, LookupReply(message.request, stored.tobytes()))

        self._store.committed(chunks, then)

    def read_ahead(self, rank: int, message: Ahead | Forget) -> None:
        """Note what a waiting request will restore, or that it will not.

        Raises:
            WireError: It is not the scheduler side that says so, or the keys are cut.
        """
        if rank != SCHEDULER_RANK or self._gets is None:
            raise WireError(f"rank {rank} can't ask to read ahead")
        if isinstance(message, Forget):
            self._gets.ahead.forget(message.request)
            return
        chunks = unpack_keys(message.chunks)
        if not len(chunks):
            raise WireError("an Ahead names no chunk")
        caches = self.session.part(message.part)
        if not caches:
            raise WireError(f"an Ahead names part {message.part}, which has no cache")
        self._gets.ahead.wish(message.request, chunks, sorted(caches))
        self._gets.pump()

    def request(self, rank: int, message: Get | Put | Release) -> None:
        """Hand a get, put or release to its table.

        Raises:
            WireError: It breaks the protocol.
        """
        if self._gets is None or self._puts is None:
            raise WireError("the engine is not complete yet")
        if isinstance(message, Get):
            self._gets.admit(rank, message)
        elif isinstance(message, Put):
            self._puts.admit(rank, message)
        elif not self._gets.release(rank, message) and not self._puts.release(rank, message):
            log.debug("rank %d released request %#x, which has ended", rank, message.seq)

    def tick(self) -> None:
        """Deadlines, leases and liveness."""
        if self.ended is not None:
            return
        for table in (self._gets, self._puts):
            if table is not None:
                table.tick()
                overdue = table.overdue(self._settings.lease_s)
                if overdue is not None:
                    self.end(overdue)
                    return
        now = self._clock()
        for rank, member in self.session.members.items():
            if now > member.last_seen + self._settings.liveness_s:
                self.end(
                    f"rank {rank} (pid {member.hello.pid}) was silent for longer than "
                    f"liveness_s = {self._settings.liveness_s:g} s"
                )
                return

    def check_peers(self, ping: ToRank) -> None:
        """End the session if a peer can't be reached any more."""
        for rank in list(self.session.members):
            self._send(rank, ping)

    def end(self, reason: str) -> None:
        """End the session for all ranks; idempotent."""
        if self.ended is not None:
            return
        self.ended = reason
        log.warning("engine %s: session ended: %s", self.session.engine, reason)
        self._counters.add("sessions_ended")
        for table in (self._gets, self._puts):
            if table is not None:
                table.abandon()
        for member in self.session.members.values():
            self._deliver(member.identity, Goodbye(reason))
        self._ring.withdraw()

    def gauges(self) -> dict[str, float]:
        """Return what is the case now, by metric (gateway/metrics.py)."""
        now: dict[str, float] = {
            "engine_active": self._welcome is not None and self.ended is None,
            "ranks": sum(rank != SCHEDULER_RANK for rank in self.session.members),
            "ranks_expected": self.session.world_size,
        }
        if self._welcome is not None:
            now["io_size_bytes"] = self._welcome.io_size
        for table in (self._gets, self._puts):
            if table is not None:
                now[f"ring_slots:{table.kind}"] = table.num_slots
                now[f"ring_slots_free:{table.kind}"] = table.num_free_slots
                now[f"ring_slots_withheld:{table.kind}"] = table.withheld
                now[f"requests_open:{table.kind}"] = table.num_requests
        if self._puts is not None:
            now["jobs_open"] = self._puts.num_jobs
        return now

    @property
    def drained(self) -> bool:
        """Whether nothing of the card's touches the ring any more."""
        return self._store.num_inflight == 0

    @property
    def is_stuck(self) -> bool:
        """Whether the card has given no answer to whatever it still has of the ring."""
        return 0 < self._store.num_inflight == self._store.num_late

    def free_abandoned(self) -> None:
        """Free the ring of an engine that others followed; only when drained at last."""
        self._ring.close()

    def close(self) -> None:
        """Free the ring; only when drained, or when the card is closed."""
        if self._welcome is not None:
            self._store.card.unregister()
        self._ring.close()

"""A gateway on a thread of this process, and ranks that speak to it message by message.

with Serving() as serving:
    ranks = serving.join(replicated(2, object_bytes=4096), world_size=2)
    ... put(ranks, ...), get(ranks, ...) ...
"""

import itertools
import os
import queue
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq

from adp_kv.errors import GatewayError
from adp_kv.ring.region import attach
from adp_kv.sdk.channel import Channel
from adp_kv.wire.frames import unpack_slots
from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import (
    NO_SLOT,
    PROTOCOL_VERSION,
    Attached,
    CacheDecl,
    Failed,
    Get,
    Granted,
    Hello,
    Lookup,
    LookupReply,
    Put,
    Refused,
    Release,
    StatsReply,
    StatsRequest,
    Welcome,
)
from gateway.config import Settings
from gateway.server import RETRY, Server
from tests.support.cards import memory_card, value_of
from tests.support.gateways import own_name
from tests.support.process import wait_until

NAMESPACE = bytes(range(16))
WAIT_S = 20.0
_numbers = itertools.count()


def sharded(num_caches, world_size, slice_bytes=4096):
    """Return each rank's caches where every rank holds a slice of its own."""
    return [
        [CacheDecl(i, f"layer.{i}", slice_bytes, rank, world_size) for i in range(num_caches)]
        for rank in range(world_size)
    ]


def replicated(num_caches, world_size, slice_bytes=4096):
    """Return each rank's caches where all ranks hold the same bytes."""
    return [
        [CacheDecl(i, f"layer.{i}", slice_bytes, 0, 1) for i in range(num_caches)]
        for _ in range(world_size)
    ]


def staged(num_caches, world_size, slice_bytes=4096):
    """Return each rank's caches where each rank is a pipeline stage of its own."""
    return [
        [
            CacheDecl(i, f"layer.{i}", slice_bytes, 0, 1)
            for i in range(num_caches)
            if i % world_size == rank
        ]
        for rank in range(world_size)
    ]


def random_chunks(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (n, 2), dtype=np.uint64)


def object_bytes(chunk, decl, version=0):
    """The bytes that belong into an object: all slices, no two objects alike."""
    key = (int(chunk[0]) ^ (decl.index * 0x9E3779B97F4A7C15 % 2**64), int(chunk[1]))
    return value_of(key, decl.object_bytes, version)


class Rank:
    """One rank (or the scheduler side, -1) on a channel of its own."""

    def __init__(self, address, rank, caches=(), engine="engine", world_size=1, **hello):
        self.rank = rank
        self.caches = {decl.index: decl for decl in caches}
        self.channel = Channel(address, timeout_s=WAIT_S)
        self.mapping = None
        facts = {
            "version": PROTOCOL_VERSION,
            "release": "test",
            "engine": engine,
            "rank": rank,
            "world_size": world_size,
            "namespace": NAMESPACE,
            "caches": list(caches),
            "pid": os.getpid(),
        }
        self.hello = Hello(**(facts | hello))

    def send(self, message):
        """Send, waiting for the connection if need be."""
        wait_until(lambda: self._sent(message), WAIT_S, f"rank {self.rank} connected")

    def _sent(self, message):
        try:
            self.channel.send(message)
        except GatewayError:
            return False
        return True

    def send_raw(self, *frames):
        """Send frames as they are; the channel must be connected."""
        wait_until(lambda: self._sent_raw(frames), WAIT_S, "room in the socket")

    def _sent_raw(self, frames):
        try:
            self.channel._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s=WAIT_S):
        """Return the next message; a Goodbye raises GatewayError."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.channel.receive()
            if message is not None:
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"rank {self.rank}: no message within {timeout_s:g} s")
            self.channel.wait(min(left, 0.1))

    def expect(self, kind, timeout_s=WAIT_S):
        """Return the next message, which must be of a kind."""
        message = self.receive(timeout_s)
        assert isinstance(message, kind), f"rank {self.rank}: {message!r}"
        return message

    def expect_goodbye(self, timeout_s=WAIT_S):
        """Return the reason of the Goodbye that comes next, whatever comes before it."""
        try:
            while True:
                self.receive(timeout_s)
        except GatewayError as error:
            return str(error)

    def silent(self, for_s=0.2):
        """Return whether nothing comes."""
        try:
            self.receive(for_s)
        except AssertionError:
            return True
        return False

    def welcomed(self, timeout_s=WAIT_S):
        """Return the Welcome, saying Hello again as long as the gateway asks for that."""
        return welcome_all([self], timeout_s)[0]

    def attach(self, welcome):
        """Map the ring and tell."""
        self.mapping = attach(welcome.ring_path, welcome.generation)
        self.send(Attached(welcome.generation))

    def stats(self):
        """Return the gateway's counters; nothing else may be on its way."""
        self.send(StatsRequest())
        return self.expect(StatsReply).counters

    def lookup(self, chunks, request=1):
        """Return which chunks are stored: a list of bool."""
        self.send(Lookup(request, pack_keys(chunks)))
        reply = self.expect(LookupReply)
        assert reply.request == request
        return [bool(byte) for byte in reply.stored]

    def slice_of(self, slot, decl, *, write):
        """Return this rank's slice of a ring slot as uint8."""
        header = self.mapping.header
        offset = header.write_offset(slot) if write else header.read_offset(slot)
        offset += decl.slice_idx * decl.slice_bytes
        return self.mapping.data[offset : offset + decl.slice_bytes]

    def close(self, goodbye=None):
        if self.mapping is not None:
            self.mapping.close()
        self.channel.close(goodbye)


def welcome_all(ranks, timeout_s=WAIT_S):
    """Return each rank's Welcome; ranks say Hello again where the gateway asks for that."""
    welcomes = {}
    deadline = time.monotonic() + timeout_s
    while len(welcomes) < len(ranks):
        assert time.monotonic() < deadline, f"only {sorted(welcomes)} were welcomed"
        for rank in ranks:
            message = rank.channel.receive()
            if isinstance(message, Welcome):
                welcomes[rank.rank] = message
            elif message is None:
                rank.channel.wait(0.005)
            else:
                assert isinstance(message, Refused), message
                assert message.reason.startswith(RETRY), message.reason
                rank.send(rank.hello)
    return [welcomes[rank.rank] for rank in ranks]


@dataclass
class Outcome:
    """What a rank saw of one request."""

    status: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    failed: str | None = None


def drive(ranks, seq, num_objects, on_grant, *, ok=lambda rank: True, timeout_s=WAIT_S):
    """Take a request's batches on every rank until all objects came, or it failed.

    Args:
        on_grant: called as on_grant(rank, object_number, slot, status) for each object.
        ok: what a rank's Release says.
    """
    outcomes = {rank.rank: Outcome() for rank in ranks}
    waiting = list(ranks)
    deadline = time.monotonic() + timeout_s
    while waiting:
        assert time.monotonic() < deadline, f"request {seq:#x} has not ended: {outcomes}"
        for rank in list(waiting):
            message = rank.channel.receive()
            if message is None:
                rank.channel.wait(0.002)
                continue
            outcome = outcomes[rank.rank]
            assert message.seq == seq, message
            if isinstance(message, Failed):
                outcome.failed = message.reason
            else:
                _take(rank, message, outcome, on_grant)
                rank.send(Release(seq, message.first, ok(rank)))
            if outcome.failed is not None or len(outcome.slots) == num_objects:
                waiting.remove(rank)
    return outcomes


def _take(rank, granted, outcome, on_grant):
    assert isinstance(granted, Granted), granted
    slots = unpack_slots(granted.slots).tolist()
    status = list(granted.status) or [0] * len(slots)
    outcome.batches.append(len(slots))
    for i, (slot, code) in enumerate(zip(slots, status, strict=True), granted.first):
        assert i not in outcome.slots, "an object was granted twice"
        outcome.slots[i], outcome.status[i] = slot, code
        on_grant(rank, i, slot, code)


def put(ranks, job, chunks, caches, *, seq=None, version=0, **how):
    """Store objects, every rank its slices; return the ranks' outcomes."""
    seq = (job << 24) | (1 << 20) | caches[0] if seq is None else seq
    for rank in ranks:
        rank.send(Put(seq, job, list(caches), pack_keys(chunks)))

    def fill(rank, i, slot, _status):
        if slot == NO_SLOT:
            return
        decl = rank.caches[caches[i // len(chunks)]]
        whole = object_bytes(chunks[i % len(chunks)], decl, version)
        first = decl.slice_idx * decl.slice_bytes
        rank.slice_of(slot, decl, write=True)[:] = whole[first : first + decl.slice_bytes]

    return drive(ranks, seq, len(caches) * len(chunks), fill, **how)


def get(ranks, seq, chunks, caches, *, version=0, **how):
    """Restore objects and check every byte of those whose status is 0."""
    for rank in ranks:
        rank.send(Get(seq, list(caches), pack_keys(chunks)))

    def check(rank, i, slot, status):
        if status:
            return
        decl = rank.caches[caches[i // len(chunks)]]
        whole = object_bytes(chunks[i % len(chunks)], decl, version)
        first = decl.slice_idx * decl.slice_bytes
        found = rank.slice_of(slot, decl, write=False)
        assert np.array_equal(found, whole[first : first + decl.slice_bytes]), f"object {i}"

    return drive(ranks, seq, len(caches) * len(chunks), check, **how)


def store(ranks, chunks, job=1, version=0):
    """Store chunks whole, a put a group of ranks, and wait until they are committed."""
    groups = {}
    for rank in ranks:
        for index in rank.caches:
            groups.setdefault(index, []).append(rank)
    members = {}
    for index, group in sorted(groups.items()):
        members.setdefault(tuple(r.rank for r in group), []).append(index)
    by_number = {rank.rank: rank for rank in ranks}
    outcomes = [
        put([by_number[n] for n in group], job, chunks, caches, version=version)
        for group, caches in members.items()
    ]
    wait_until(lambda: all(ranks[0].lookup(chunks)), WAIT_S, "the chunks are committed")
    return outcomes


class AskedServer(Server):
    """A Server that also runs what a test asks of it, on its own thread between two turns."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = queue.SimpleQueue()

    def _turn(self):
        super()._turn()
        while not self.asked.empty():
            self.asked.get()()

    def ask(self, function):
        """Have function run soon."""
        self.asked.put(function)
        os.eventfd_write(self._store.wakeup_fd, 1)


class Serving:
    """A Server on a thread; leaves nothing behind.

    Args:
        card: not yet open; a memory card by default.
        clock: of the server.
        kind: what the settings call the card; fragment_size follows from it.
        settings: the gateway's others, by name.
    """

    def __init__(self, card=None, clock=time.monotonic, kind="memory", **settings):
        self.folder = Path(tempfile.mkdtemp(prefix="adp-serving-"))
        try:
            self._make(card, clock, kind, settings)
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        self.error = None
        self._ranks = []
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    def _make(self, card, clock, kind, settings):
        address = f"ipc://{self.folder}/s"
        usual = {
            "listen": address,
            "ring_name": own_name(f"test-{os.getpid()}-{next(_numbers)}"),
            "shared_memory_size": 64 * 4096,
            "card": kind,
        }
        self.settings = Settings(**(usual | settings))
        self.address = self.settings.listen
        self.card = card or memory_card(capacity_bytes=32 << 20, max_value_bytes=64 << 10)
        self.server = AskedServer(self.settings, self.card, clock)

    def _run(self):
        try:
            self.server.serve()
        except BaseException as error:  # noqa: BLE001  handed to the test by stop()
            self.error = error

    def rank(self, rank, caches=(), **how):
        """Return a rank that has said nothing yet."""
        self._ranks.append(Rank(self.address, rank, caches, **how))
        return self._ranks[-1]

    def join(self, caches_by_rank, *, scheduler=False, **how):
        """Return ranks that are all welcomed and attached; the scheduler side is the last."""
        how = {"world_size": len(caches_by_rank)} | how
        ranks = [self.rank(i, caches, **how) for i, caches in enumerate(caches_by_rank)]
        if scheduler:
            ranks.append(self.rank(-1, **how))
        for rank in ranks:
            rank.send(rank.hello)
        welcomes = welcome_all(ranks)
        for rank, welcome in zip(ranks, welcomes, strict=True):
            if rank.rank >= 0:
                rank.attach(welcome)
        return ranks

    @property
    def alive(self):
        return self._thread.is_alive()

    def on_main(self, function):
        """Return function(), run on the server's thread: what it sees belongs to one moment."""
        answers = queue.SimpleQueue()
        self.server.ask(lambda: answers.put(function()))
        try:
            return answers.get(timeout=WAIT_S)
        except queue.Empty:
            raise AssertionError(f"the server has no turn within {WAIT_S:g} s") from self.error

    def idle(self):
        """Return whether no request, job, slot or card batch is left."""
        return self.on_main(self._is_idle)

    def _is_idle(self):
        engine = self.server._engine
        if engine is None:
            return True
        tables = [engine._gets, engine._puts]
        if self.server._store.num_inflight or engine._puts is None:
            return engine._puts is None
        whole = all(t.num_free_slots == t._slots.num_slots for t in tables)
        return whole and not any(t.num_requests for t in tables) and engine._puts.num_jobs == 0

    def assert_idle(self, timeout_s=WAIT_S):
        """Wait until everything has been given back; the allocators must add up."""
        wait_until(self.idle, timeout_s, "requests, jobs, slots and batches given back")
        engine = self.server._engine
        if engine is not None and engine._gets is not None:
            engine._gets._slots.check_integrity()
            engine._puts._slots.check_integrity()

    def stop(self):
        """Stop; an error of the serving thread is raised here."""
        for rank in self._ranks:
            rank.close()
        if self._thread.is_alive():
            self.server.stop()
        self._thread.join(15)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not self._thread.is_alive(), "the gateway does not stop"
        if self.error is not None:
            raise self.error

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.stop()
        except BaseException:
            if error is None:
                raise

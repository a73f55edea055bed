"""Driving a card in tests: guarded memory, synchronous batches, exact values."""

import itertools
import mmap
import threading

import numpy as np

from gateway.cards.base import Batch, Op, Status
from gateway.cards.memory import MemoryCard, MemorySettings
from gateway.cards.mooncake.card import MooncakeCard
from gateway.cards.mooncake.settings import MooncakeSettings
from gateway.cards.nvme.card import NvmeKvCard
from gateway.cards.nvme.settings import NvmeKvSettings
from gateway.cards.resp.card import RespCard
from gateway.cards.resp.settings import RespSettings
from gateway.cards.slab import SlabCard
from gateway.cards.slab_settings import SlabSettings
from tests.support.nvme_device import SoftDevice, SoftHost

PAGE = 4096
GUARD = 0xA5
READ_GUARD = 0x3C
SLOT_BYTES = 262144
SLOTS = 32


def memory_card(**changes):
    settings = {"capacity_bytes": SLOTS * SLOT_BYTES, "max_value_bytes": SLOT_BYTES}
    return MemoryCard(MemorySettings(**(settings | changes)))


def slab_settings(path, **changes):
    settings = {
        "path": str(path),
        "capacity_bytes": SLOTS * SLOT_BYTES,
        "slot_bytes": SLOT_BYTES,
        "io_engine": "threads",
        "io_threads": 4,
        "lock_wait_s": 0.1,
    }
    return SlabSettings(**(settings | changes))


def slab_card(path, **changes):
    return SlabCard(slab_settings(path, **changes))


def nvme_host(dialect="standard", num_databases=1, **changes):
    """Software devices /dev/ng0n1, /dev/ng1n1, ... that share SLOTS values evenly."""
    return SoftHost(
        {
            f"/dev/ng{i}n1": SoftDevice(
                dialect, nsid=i + 1, slots=SLOTS // num_databases, **changes
            )
            for i in range(num_databases)
        }
    )


def nvme_card(host, **changes):
    dialect = next(iter(host.devices.values())).dialect
    settings = {"devices": tuple(host.devices), "dialect": dialect, "io_threads": 4}
    return NvmeKvCard(NvmeKvSettings(**(settings | changes)), host)


def resp_card(*endpoints, **changes):
    return RespCard(RespSettings(endpoints=endpoints, **changes))


def mooncake_card(*masters, **changes):
    return MooncakeCard(MooncakeSettings(masters=masters, **changes))


def random_keys(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (n, 2), dtype=np.uint64)


def value_of(key, length, version=0):
    """The bytes that belong under a key: random, so that no two values look alike."""
    seed = [int(key[0]), int(key[1]), length, version]
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


class Arena:
    """Page-aligned memory that hands out places with a guard page behind each."""

    def __init__(self, num_bytes=16 << 20):
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.base = self.bytes.ctypes.data
        self.clear()

    def clear(self):
        self.bytes[:] = GUARD
        self._next = 0

    def place(self, length):
        """Return the offset of `length` bytes; their page-rounded end is followed by a guard."""
        start = self._next
        self._next += -(-length // PAGE) * PAGE + PAGE
        assert self._next <= self.num_bytes, "arena too small for this test"
        return start

    def addresses(self, offsets):
        return np.array([self.base + o for o in offsets], dtype=np.uint64)

    def at(self, offset, length):
        return self.bytes[offset : offset + length]

    def guard(self, offset, length, alignment):
        """Return what lies behind the memory that a value of `length` at `offset` may use."""
        start = offset + -(-length // alignment) * alignment
        return self.bytes[start : offset + -(-length // PAGE) * PAGE + PAGE]


class Driver:
    """An open card, and batches that wait for their answer."""

    def __init__(self, card, arena=None):
        self.card = card
        self.arena = arena or Arena()
        self.answers = {}
        self._answered = threading.Condition()
        self._tokens = itertools.count(1)
        card.open(self._on_done)

    def _on_done(self, token, status):
        with self._answered:
            assert token not in self.answers, "answered twice"
            self.answers[token] = (status, threading.get_ident())
            self._answered.notify_all()

    def start(self, op, keys, offsets=None, lengths=None, databases=0, groups=None, namespace=0):
        n = len(keys)
        token = next(self._tokens)
        self.card.submit(
            Batch(
                op=op,
                token=token,
                databases=np.broadcast_to(np.asarray(databases, np.uint16), n).copy(),
                keys=keys,
                addresses=None if offsets is None else self.arena.addresses(offsets),
                lengths=None if lengths is None else np.asarray(lengths, dtype=np.uint32),
                groups=None if groups is None else np.asarray(groups, dtype=np.uint64),
                namespace=namespace,
            )
        )
        return token

    def wait(self, token, timeout_s=20):
        with self._answered:
            assert self._answered.wait_for(lambda: token in self.answers, timeout_s), "no answer"
            return self.answers[token][0]

    def run(self, *args, **kwargs):
        return self.wait(self.start(*args, **kwargs)).tolist()

    def write(self, keys, lengths, version=0, databases=0, **group):
        offsets = [self.arena.place(length) for length in lengths]
        for key, offset, length in zip(keys, offsets, lengths, strict=True):
            self.arena.at(offset, length)[:] = value_of(key, length, version)
        return self.run(Op.WRITE, keys, offsets, lengths, databases, **group)

    def read(self, keys, lengths, databases=0):
        """Return (status, value) of each key; checks that nothing beyond a value was touched."""
        alignment = self.card.limits.alignment_bytes
        offsets = [self.arena.place(length) for length in lengths]
        guards = [self.arena.guard(o, n, alignment) for o, n in zip(offsets, lengths, strict=True)]
        for guard in guards:
            guard[:] = READ_GUARD  # not GUARD: a card may have stored what lay behind a value
        status = self.run(Op.READ, keys, offsets, lengths, databases)
        assert all((guard == READ_GUARD).all() for guard in guards), "wrote beyond a value"
        return status, [self.arena.at(o, n).copy() for o, n in zip(offsets, lengths, strict=True)]

    def check(self, keys, lengths, version=0, databases=0):
        """Assert that every key reads back exactly."""
        status, values = self.read(keys, lengths, databases)
        assert status == [Status.OK] * len(keys)
        for key, length, value in zip(keys, lengths, values, strict=True):
            assert np.array_equal(value, value_of(key, length, version))

    def exist(self, keys, databases=0):
        return self.run(Op.EXIST, keys, databases=databases)

    def delete(self, keys, databases=0):
        return self.run(Op.DELETE, keys, databases=databases)

    def close(self):
        self.card.close()

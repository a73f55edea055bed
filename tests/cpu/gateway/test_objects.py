"""Objects in fragments over databases, against a card of plain memory."""

import ctypes
import itertools
import os
import select

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_kv.errors import CardError
from gateway.cards.base import Card, CardLimits, Op, Status
from gateway.config import Settings
from gateway.objects import ObjectStore
from tests.support.cards import SLOT_BYTES, Arena, memory_card, random_keys, slab_card
from tests.support.process import wait_until


class PlainCard(Card):
    """Answers at once from poll-free memory; remembers every batch."""

    def __init__(self, max_value_bytes=261120, alignment=512, num_databases=4):
        self._limits = CardLimits(max_value_bytes, alignment, num_databases)
        self.batches = []
        self.values = {}
        self.answers = None  # replaced by a test that answers itself

    @property
    def limits(self):
        return self._limits

    def open(self, on_done):
        self.on_done = on_done

    def register(self, address, num_bytes):
        self.registered = (address, num_bytes)

    def unregister(self):
        self.registered = None

    def submit(self, batch):
        self.batches.append(batch)
        if self.answers is not None:
            self.answers(batch)
            return
        status = [
            self._run(batch.op, int(d), k.tobytes(), a, n)
            for d, k, a, n in zip(
                batch.databases,
                batch.keys,
                batch.addresses.tolist(),
                batch.lengths.tolist(),
                strict=True,
            )
        ]
        self.on_done(batch.token, np.array(status, dtype=np.uint8))

    def _run(self, op, database, key, address, length):
        where = (database, key)
        if op is Op.WRITE:
            self.values[where] = ctypes.string_at(address, length) if length else b""
            return Status.OK
        if where not in self.values:
            return Status.ABSENT
        if op is Op.DELETE:
            del self.values[where]
        elif op is Op.READ:
            assert len(self.values[where]) == length
            ctypes.memmove(address, self.values[where], length)
        return Status.OK

    def stats(self):
        return {}

    def close(self):
        self.closed = True


@pytest.fixture
def opened():
    stores = []

    def make(card, fragment_size=1024):
        stores.append(ObjectStore(card, fragment_size))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def run(store, method, *args):
    answers = []
    getattr(store, method)(*args, answers.append)
    wait_until(lambda: store.poll() or bool(answers), 5, "the batch has ended")
    return answers[0].tolist()


def move(store, method, arena, objects, offsets, lengths):
    addresses = np.array([arena.base + o for o in offsets], dtype=np.int64)
    chunks = [objects] if method == "write" else []
    return run(store, method, objects, *chunks, addresses, np.array(lengths, dtype=np.int64))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=12),
    fragment_size=st.sampled_from([512, 1000, 1024, 4096, 100_000]),
    num_databases=st.integers(1, 5),
)
def test_fragments_hold_every_byte_once(lengths, fragment_size, num_databases):
    card = PlainCard(num_databases=num_databases)
    store = ObjectStore(card, fragment_size)
    try:
        arena = Arena(1 << 20)
        arena.bytes[:] = np.random.default_rng(0).integers(0, 256, arena.num_bytes, np.uint8)
        offsets = [arena.place(n) for n in lengths]
        before = [arena.at(o, n).copy() for o, n in zip(offsets, lengths, strict=True)]
        objects = random_keys(len(lengths))
        assert move(store, "write", arena, objects, offsets, lengths) == [0] * len(lengths)
        (batch,) = card.batches
        size = store.fragment_size
        assert size % 512 == 0
        assert len(batch.keys) == sum(-(-n // size) for n in lengths)
        assert len({k.tobytes() for k in batch.keys}) == len(batch.keys)
        assert int(batch.lengths.max()) <= size
        assert (batch.addresses % np.uint64(512) == 0).all()
        spans = sorted(zip(batch.addresses.tolist(), batch.lengths.tolist(), strict=True))
        wanted = {arena.base + o + i for o, n in zip(offsets, lengths, strict=True) for i in (0, n)}
        assert {a for a, _ in spans} | {a + n for a, n in spans} >= wanted
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert sum(n for _, n in spans) == sum(lengths)
        arena.bytes[:] = 0
        assert move(store, "read", arena, objects, offsets, lengths) == [0] * len(lengths)
        for offset, value in zip(offsets, before, strict=True):
            assert np.array_equal(arena.at(offset, len(value)), value)
    finally:
        store.close()


def test_fragments_of_an_object_spread_over_databases(opened):
    store = opened(PlainCard(num_databases=4))
    arena = Arena(1 << 20)
    move(store, "write", arena, random_keys(2), [0, 65536], [8 * 1024] * 2)
    for half in np.split(store.card.batches[0].databases, 2):
        assert np.bincount(half).tolist() == [2, 2, 2, 2]
        assert (np.diff(half.astype(int)) % 4 == 1).all()


def test_read_finds_what_write_spread(opened):
    store = opened(memory_card(num_databases=3), fragment_size=1000)
    arena = Arena(1 << 20)
    lengths, offsets = [1, 999, 1000, 1001, 2500], [0, 4096, 8192, 12288, 16384]
    objects = random_keys(5)
    arena.bytes[:20000] = np.arange(20000) % 251
    assert move(store, "write", arena, objects, offsets, lengths) == [0] * 5
    arena.bytes[:] = 0
    assert move(store, "read", arena, objects, offsets, lengths) == [0] * 5
    for offset, length in zip(offsets, lengths, strict=True):
        expected = np.arange(offset, offset + length) % 251
        assert np.array_equal(arena.at(offset, length), expected.astype(np.uint8))
    assert move(store, "read", arena, random_keys(5, 9), offsets, lengths) == [1] * 5


def test_whole_object_has_the_key_that_it_has_beside_cut_ones(opened):
    """What was stored in one batch is found by another, whatever else is in either."""
    store = opened(memory_card(num_databases=3), fragment_size=1000)
    arena = Arena(1 << 20)
    objects, offsets = random_keys(3), [0, 4096, 8192]
    assert move(store, "write", arena, objects, offsets, [500, 2500, 1000]) == [0] * 3
    assert move(store, "read", arena, objects[[2, 0]], [8192, 0], [1000, 500]) == [0] * 2
    assert move(store, "write", arena, objects[:1], [0], [700]) == [0]
    assert move(store, "read", arena, objects[:2], offsets[:2], [700, 2500]) == [0] * 2


@pytest.mark.parametrize(
    ("fragment_size", "max_value_bytes", "alignment", "expected"),
    [
        (261120, 1 << 20, 512, 261120),
        (261120, 1 << 20, 4096, 258048),
        (1 << 20, 261120, 512, 261120),
        (1 << 20, 261120, 4096, 258048),
        (100, 1 << 20, 512, 512),
        (131072, 100_000, 512, 99840),
    ],
)
def test_fragment_size_is_whole_alignments(
    opened, fragment_size, max_value_bytes, alignment, expected
):
    store = opened(PlainCard(max_value_bytes, alignment), fragment_size)
    assert store.fragment_size == expected


def test_fragments_fill_the_slots_of_the_slab_card(opened, tmp_path):
    """An object of a whole number of slots takes so many; fragments of 255 KiB took one more."""
    card = slab_card(tmp_path)
    store = opened(card, Settings(card="slab").effective_fragment_size)
    arena, objects, lengths = Arena(5 * SLOT_BYTES), random_keys(2), [4 * SLOT_BYTES, SLOT_BYTES]
    offsets = [0, 4 * SLOT_BYTES]
    assert move(store, "write", arena, objects, offsets, lengths) == [0, 0]
    assert card.stats()["values"] == 5
    assert move(store, "read", arena, objects, offsets, lengths) == [0, 0]


def test_object_fails_with_its_worst_fragment(opened):
    card = PlainCard()
    store = opened(card)
    status = [0, 0, 1, 0, 2, 1, 0, 0]
    card.answers = lambda b: card.on_done(b.token, np.array(status, dtype=np.uint8))
    found = move(store, "read", Arena(1 << 20), random_keys(3), [0, 4096, 8192], [3000, 2048, 2600])
    assert found == [1, 2, 1]
    assert card.batches[0].lengths.tolist() == [1024, 1024, 952, 1024, 1024, 1024, 1024, 552]


def test_commit_records_come_and_go(opened):
    store = opened(memory_card(num_databases=2))
    chunks = random_keys(4)
    assert run(store, "committed", chunks) == [1] * 4
    assert run(store, "commit", chunks[:3]) == [0] * 3
    assert run(store, "committed", chunks) == [0, 0, 0, 1]
    assert run(store, "uncommit", chunks[1:]) == [0, 0, 1]
    assert run(store, "committed", chunks) == [0, 1, 1, 1]


def test_refused_batch_is_answered_as_io_error(opened):
    card = PlainCard()
    store = opened(card)

    def refuse(_batch):
        raise CardError("not this one")

    card.answers = refuse
    assert run(store, "committed", random_keys(3)) == [Status.IO_ERROR] * 3
    assert store.num_inflight == 0


def test_card_that_answers_nonsense_is_survived(opened):
    card = PlainCard()
    store = opened(card)

    def lie(batch):
        card.on_done(batch.token + 1000, np.zeros(1, np.uint8))
        card.on_done(batch.token, np.zeros(1, np.uint8))
        card.on_done(batch.token, np.zeros(3, np.uint8))

    card.answers = lie
    assert run(store, "committed", random_keys(3)) == [Status.IO_ERROR] * 3
    store.poll()
    assert store.num_inflight == 0


def test_wakeup_fd_is_quiet_after_poll(opened):
    card = PlainCard()
    store = opened(card)
    held = []
    card.answers = held.append
    answers = []
    store.committed(random_keys(1), answers.append)
    # The card's thread was stopped between noting its answer and the wake-up.
    store._completions.append((held[0].token, np.zeros(1, np.uint8)))
    store.poll()
    os.eventfd_write(store.wakeup_fd, 1)
    store.poll()
    assert select.select([store.wakeup_fd], [], [], 0)[0] == []
    assert len(answers) == 1


@pytest.mark.parametrize("length", [1025, 2048, 2049, 5000])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_objects_of_one_length_have_the_fragments_of_any(opened, op, length):
    """Most batches take a shorter way, and must find what the longer one stored."""
    store = opened(PlainCard(num_databases=3))
    objects = np.random.default_rng(5).integers(0, 2**64, (7, 2), dtype=np.uint64)
    addresses = np.arange(7, dtype=np.int64) * 8192 + 4096
    groups = np.arange(7, dtype=np.uint64) if op is Op.WRITE else None
    equal = np.full(7, length, dtype=np.int64)
    mixed = np.append(equal[:-1], length + 7 * 1024)
    short, short_starts = store._fragments(op, objects, addresses, equal, groups)
    long, long_starts = store._fragments(op, objects, addresses, mixed, groups)
    ours = slice(0, 6 * -(-length // 1024))
    for name in ("databases", "keys", "addresses", "lengths", "groups"):
        got, want = getattr(short, name), getattr(long, name)
        if want is None:
            assert got is None
            continue
        assert got.dtype == want.dtype
        assert got.flags.c_contiguous
        assert np.array_equal(got[ours], want[ours]), name
    assert short_starts.tolist() == list(range(0, 7 * -(-length // 1024), -(-length // 1024)))
    assert long_starts[:7].tolist() == short_starts.tolist()

"""What evicting costs others, and a file system that refuses its records."""

import errno
import math
import shutil
import threading

import numpy as np
import pytest

from gateway.cards import evictor as evictor_module
from gateway.cards import journal as journal_module
from gateway.cards.base import Status
from tests.support.cards import Arena
from tests.support.chunks import Chunks
from tests.support.clock import FakeClock
from tests.support.evicting_cards import (
    NUM_SLOTS,
    groups_of,
    slab,
    store_all,
)
from tests.support.process import wait_until


def test_trickle_of_expired_chunks_does_not_cost_a_pass_each(make):
    """A pass goes through the whole index: one has to be some time after the last."""
    driver = make(ttl_s=50.0)
    clock = groups_of(driver)._wall = FakeClock()
    evictor, chunks = driver.card._evictor, Chunks(driver)
    store_all(chunks, [0])
    evictor._rested_at = math.inf  # the last pass took long
    clock.advance(60)
    evictor.round()
    assert chunks.lookup([0]) == [False]
    assert driver.card.stats()["expired_chunks"] == 1
    assert chunks.load(0)[0] == [Status.OK] * 3
    number = 1
    while driver.card.stats()["evicted_chunks"] == 0:  # it goes where room is short
        store_all(chunks, [number])
        number += 1
    assert chunks.load(0)[0] == [Status.ABSENT] * 3
    evictor._rested_at = 0.0
    clock.advance(60)
    evictor.round()
    wait_until(lambda: driver.card.stats()["values"] == 0, 5, "so do the others after the rest")
    assert evictor._rested_at > 0


class WatchedEvent(threading.Event):
    """Tells who waits for it."""

    def __init__(self, on_wait):
        super().__init__()
        self.on_wait = on_wait

    def wait(self, timeout=None):
        self.on_wait(timeout)
        return super().wait(timeout)


def test_writes_to_a_card_where_nothing_may_go_cost_no_round_each(make):
    driver = make(hit_grace_s=1000.0)
    evictor, chunks, rounds = driver.card._evictor, Chunks(driver), []
    store_all(chunks, range(34))
    assert all(chunks.lookup(range(34)))
    resting, go_on = threading.Event(), threading.Event()
    evictor._stop = WatchedEvent(lambda _: (resting.set(), go_on.wait(20)))
    for number in range(100, 106):
        chunks.write(number)
    try:
        assert resting.wait(10), "it does not rest"
        groups = groups_of(driver)
        choose = groups.choose
        groups.choose = lambda *args: (rounds.append(1), choose(*args))[1]
        for _ in range(20):
            assert Status.NO_SPACE in chunks.write(200)
        assert not rounds
    finally:
        go_on.set()
    assert all(chunks.lookup(range(34)))


def test_pass_lets_others_in_between_two_pieces(make, monkeypatch):
    """Whoever waits for a lock that is taken again at once may wait for the whole pass."""
    monkeypatch.setattr(evictor_module, "PIECE_ROWS", 8)
    driver = make()
    evictor, chunks, pauses = driver.card._evictor, Chunks(driver), []
    store_all(chunks, range(30))
    me = threading.get_ident()

    def note(_):
        if threading.get_ident() == me:
            pauses.append([shelf.table.lock.locked() for shelf in evictor._shelves])

    evictor._stop = WatchedEvent(note)
    victims = evictor._choose(NUM_SLOTS, None)
    assert victims.size == 30
    evictor._sweep(victims)
    between = sum(shelf.table.extent[0] // 8 - 1 for shelf in evictor._shelves)
    assert len(pauses) >= between + 1  # and between markers
    assert not np.any(pauses)


@pytest.mark.parametrize("checksums", [True, False])
def test_slot_is_not_written_while_the_journal_says_it_is_anothers(
    tmp_path, drive, monkeypatch, caplog, checksums
):
    """A file system that is full refuses the records of an eviction, and what was evicted is
    back after a restart: without checksums nothing but its slots would tell."""
    options = {"num_databases": 1, "evict_above": 1.0, "checksums": checksums}
    driver = drive(slab(tmp_path, **options), Arena(1 << 20))
    chunks = Chunks(driver)
    store_all(chunks, range(4))

    def refused(_descriptor, _data, _offset):
        raise OSError(errno.ENOSPC, "no space left")

    evictor = driver.card._evictor
    with monkeypatch.context() as full:
        full.setattr(journal_module, "_write_all", refused)
        evictor._sweep(evictor._choose(6, None))
        assert chunks.lookup(range(4)) == [False, False, True, True]
        for number in range(10, 14):
            assert chunks.write(number) == [Status.NO_SPACE] * 3
    assert driver.card.stats()["journal_failures"] >= 6
    assert caplog.text.count("no space left") == 1
    shutil.copytree(tmp_path / "card", tmp_path / "killed")
    assert chunks.store(20)
    driver.close()
    for name, stored in (("killed", []), ("card", [20])):
        after = Chunks(drive(slab(tmp_path, name, **options), Arena(1 << 20)))
        hits = [n for n, hit in enumerate(after.lookup(range(21))) if hit]
        assert set(hits) >= {2, 3, *stored}
        assert set(hits) <= {0, 1, 2, 3, *stored}
        for number in hits:
            after.check(number)
    assert hits == [2, 3, 20]

"""Cards that evict whole chunks, above all: no hit is offered whose load fails."""

import shutil

import numpy as np
import pytest

from adp_kv.errors import ConfigError
from gateway.cards import journal as journal_module
from gateway.cards.base import Status
from gateway.cards.journal_records import Kind
from tests.support.cards import Arena, Driver, memory_card, slab_settings
from tests.support.chunks import Chunks, marker_key
from tests.support.clock import FakeClock
from tests.support.evicting_cards import (
    NUM_DATABASES,
    NUM_SLOTS,
    SLOT_BYTES,
    groups_of,
    slab,
    store_all,
    store_soon,
)
from tests.support.process import wait_until


def free_slots(driver):
    return driver.card.stats()["free_slots"]


def test_full_card_goes_on_storing(make):
    driver = make()
    chunks = Chunks(driver)
    store_all(chunks, range(300))
    wait_until(lambda: free_slots(driver) >= NUM_SLOTS * 0.1, 5, "there is room")
    driver.card._evictor.round()  # waits for one that has dropped values and not yet counted them
    stats = driver.card.stats()
    assert stats["evicted_chunks"] >= 300 - NUM_SLOTS / 3
    assert stats["evicted_bytes"] == stats["evicted_chunks"] * 3 * chunks.length
    kept = [n for n, hit in enumerate(chunks.lookup(range(300))) if hit]
    assert len(kept) >= NUM_SLOTS * 0.7 / 3
    assert min(kept) > 200  # the oldest went first
    for number in kept:
        chunks.check(number)
    assert stats["groups"] == stats["values"] - stats["groups"] * 3


def pin_all(tables):
    """Begin a read of every value that is there; return what ends them."""
    pinned = []
    for table in tables:
        with table.lock:
            keys, slots = table.piece(0, table.extent[0])
            values = slots < table.marker
            table.pin(keys[values], table.lengths[slots[values]])
        pinned.append((table, slots[values]))

    def end():
        for table, slots in pinned:
            with table.lock:
                table.unpin(slots)

    return end


def test_reads_under_way_do_not_make_a_card_evict_more(make):
    """A slot that waits for a read, a scrub's say, will be free: nothing else goes for it."""
    driver = make()
    chunks = Chunks(driver)
    store_all(chunks, range(30))
    end = pin_all([shelf.table for shelf in driver.card._evictor._shelves])
    number = 30
    while driver.card.stats()["evicted_chunks"] == 0:
        number += chunks.store(number)
    driver.card._evictor.round()
    assert sum(chunks.lookup(range(number))) >= NUM_SLOTS * 0.7 / 3
    end()
    # By the values themselves: the last chunk may be there in part, without a marker.
    tables = [shelf.table for shelf in driver.card._evictor._shelves]
    values = sum((table.piece(0, table.extent[0])[1] < table.marker).sum() for table in tables)
    assert free_slots(driver) == NUM_SLOTS - values


def test_used_chunk_outlives_younger_ones(make):
    driver = make()
    chunks = Chunks(driver)
    store_all(chunks, range(10))
    for number in range(10, 200):
        assert chunks.lookup([0]) == [True]
        store_soon(chunks, number)
    chunks.check(0)
    assert not any(chunks.lookup(range(1, 10)))


def evict_all_that_may_go(driver):
    evictor = driver.card._evictor
    for _ in range(2):  # used ones go once around the main queue first
        evictor._sweep(evictor._choose(NUM_SLOTS, None))


def test_hit_is_kept_until_its_grace_ends(make):
    driver = make(hit_grace_s=30.0)
    clock = groups_of(driver)._clock = FakeClock()
    chunks = Chunks(driver)
    store_all(chunks, range(5))
    assert chunks.lookup([3]) == [True]
    for number in range(100, 200):
        store_soon(chunks, number)
    chunks.check(3)
    assert chunks.lookup(range(5)) == [False, False, False, True, False]
    clock.advance(20)
    chunks.check(3)  # a read prolongs it
    clock.advance(20)
    evict_all_that_may_go(driver)
    chunks.check(3)
    clock.advance(40)
    evict_all_that_may_go(driver)
    assert chunks.lookup([3]) == [False]


def test_values_without_marker_are_kept_then_let_go(make):
    driver = make(uncommitted_s=100.0)
    clock = groups_of(driver)._clock = FakeClock()
    chunks = Chunks(driver)
    assert chunks.write(0) == [Status.OK] * 3
    for number in range(100, 200):
        store_soon(chunks, number)
    chunks.check(0)
    assert chunks.commit(0) == Status.OK
    assert chunks.write(1) == [Status.OK] * 3
    clock.advance(101)
    wait_until(lambda: chunks.load(1)[0] == [Status.ABSENT] * 3, 5, "the values are gone")
    assert driver.card.stats()["abandoned_chunks"] == 1


def test_chunk_written_anew_is_not_evicted_between_two_writes(make):
    """Else it would be committed with half of its values."""
    driver = make()
    chunks = Chunks(driver)
    store_all(chunks, [0])
    keys, databases, lengths, groups = chunks.columns(0)
    for part in (slice(0, 1), slice(1, 3)):
        status = driver.write(keys[part], lengths[part], 1, databases[part], groups=groups[part])
        assert set(status) == {Status.OK}
        assert chunks.lookup([0]) == [False]
        evict_all_that_may_go(driver)
    assert chunks.commit(0) == Status.OK
    assert chunks.lookup([0]) == [True]
    chunks.check(0, version=1)


def test_expired_chunk_is_a_miss_at_once(make):
    driver = make(ttl_s=50.0)
    clock = FakeClock()
    groups_of(driver)._wall = clock
    chunks = Chunks(driver)
    store_all(chunks, [0])
    clock.advance(30)
    store_all(chunks, [1])
    clock.advance(25)
    assert chunks.lookup([0, 1]) == [False, True]
    wait_until(lambda: driver.card.stats()["expired_chunks"] == 1, 5, "it is counted")
    wait_until(lambda: chunks.load(0)[0] == [Status.ABSENT] * 3, 5, "its values are gone")
    chunks.check(1)


def test_quota_evicts_of_its_namespace_alone(make):
    driver = make(quota_bytes=45 * SLOT_BYTES)
    one, other = Chunks(driver, namespace=1), Chunks(driver, namespace=2)
    store_all(other, range(1000, 1010))
    store_all(one, range(100))
    assert all(other.lookup(range(1000, 1010)))

    def all_for_the_quota():
        """Chunks are chosen, then removed by another thread, and counted each time."""
        stats = driver.card.stats()
        return stats["quota_evicted_chunks"] == stats["evicted_chunks"] > 0

    wait_until(all_for_the_quota, 10, "what was evicted, was for the quota")
    assert NUM_SLOTS - driver.card.stats()["free_slots"] <= 45 + 30


def test_write_beyond_the_quota_is_dropped_and_counted(make):
    driver = make(quota_bytes=4 * SLOT_BYTES, evict_above=1.0)
    chunks = Chunks(driver)
    assert chunks.store(0)
    assert sorted(chunks.write(1)) == [Status.OK, Status.NO_SPACE, Status.NO_SPACE]
    assert driver.card.stats()["dropped_by_quota"] == 2
    assert chunks.lookup([0, 1]) == [True, False]


def test_card_told_not_to_evict_answers_no_space(make):
    driver = make(evict_above=1.0)
    chunks = Chunks(driver)
    stored = [chunks.store(number) for number in range(60)]
    assert stored.count(True) >= NUM_SLOTS / 3 - 8
    assert not stored[-1]
    assert driver.card.stats()["evicted_chunks"] == 0
    assert chunks.lookup(range(60)) == stored


def test_removed_marker_ends_the_offer(make):
    driver = make()
    chunks = Chunks(driver)
    store_all(chunks, [0, 1])
    assert chunks.remove(0) == Status.OK
    assert chunks.lookup([0, 1]) == [False, True]
    store_all(chunks, [0])
    assert chunks.lookup([0, 1]) == [True, True]


def test_read_of_other_length_takes_the_marker(make):
    driver = make()
    chunks = Chunks(driver)
    store_all(chunks, [0, 1])
    chunks.length = 400
    assert chunks.load(0)[0] == [Status.CORRUPT] * 3
    assert chunks.lookup([0, 1]) == [False, True]
    wait_until(lambda: driver.card.stats()["values"] == 4, 5, "its marker is gone too")


@pytest.mark.timeout(400)
def test_random_operations_never_break_a_hit(make):
    """Operations beside an oracle: a chunk that is found loads, in its last version."""
    steps = 10_000
    driver = make(hit_grace_s=5.0)
    clock = groups_of(driver)._clock = FakeClock()
    chunks = Chunks(driver, num_values=lambda number: 1 + number % 5, length=200)
    rng, versions, hits, stored = np.random.default_rng(5), {}, 0, 0
    for step in range(steps):
        number = int(rng.zipf(1.3)) % 150
        kind = rng.random()
        if kind < 0.5:
            (hit,) = chunks.lookup([number])
            if hit:
                chunks.check(number, versions[number])
                hits += 1
        elif kind < 0.97:
            if chunks.store(number, step):
                versions[number] = step
                stored += 1
            else:  # part of it may have been written over
                chunks.remove(number)
        else:
            chunks.remove(number)
        clock.advance(float(rng.exponential(0.2)))
    assert hits > steps * 0.15
    assert stored > steps * 0.3
    assert driver.card.stats()["evicted_chunks"] > steps * 0.03
    assert driver.card.stats()["corrupt"] == 0


@pytest.fixture
def moments(tmp_path, monkeypatch):
    """Copies of a card's directory, one before, amid and after each append to a journal."""
    taken = []

    def take():
        copy = tmp_path / "moments" / str(len(taken))
        shutil.copytree(tmp_path / "card", copy)
        taken.append(copy)

    real = journal_module._write_all

    def watched(descriptor, data, offset):
        take()
        real(descriptor, data[: len(data) // 2], offset)
        take()
        real(descriptor, data, offset)
        take()

    def watch():
        monkeypatch.setattr(journal_module, "_write_all", watched)

    return taken, watch


def test_kill_amid_an_eviction_leaves_no_broken_hit(tmp_path, drive, moments, monkeypatch):
    taken, watch = moments
    driver = drive(slab(tmp_path, evict_above=0.999), Arena(1 << 20))
    chunks = Chunks(driver)
    numbers = range(36)
    store_all(chunks, numbers)
    chunks.lookup([0, 5])
    watch()
    evictor = driver.card._evictor
    victims = evictor._choose(30, None)
    evictor._sweep(victims)
    monkeypatch.undo()
    assert victims.size >= 10
    assert len(taken) >= 3 * (1 + NUM_DATABASES)  # promotions, markers, values
    driver.close()
    survivors = []
    for path in taken:
        after = Driver(slab(path.parent, path.name, evict_above=0.999), Arena(1 << 20))
        found = Chunks(after)
        hits = [number for number, hit in enumerate(found.lookup(numbers)) if hit]
        for number in hits:
            found.check(number)
        survivors.append(len(hits))
        whole = sum(found.load(n)[0] == [Status.OK] * 3 for n in numbers)
        assert whole == len(hits)  # no values without a marker either
        after.close()
    assert survivors[0] == 36
    assert survivors[-1] == 36 - victims.size
    assert survivors == sorted(survivors, reverse=True)


def test_commit_records_go_before_any_value(tmp_path, drive, monkeypatch):
    driver = drive(slab(tmp_path, evict_above=0.999), Arena(1 << 20))
    chunks = Chunks(driver)
    store_all(chunks, range(30))
    deleted, real = [], journal_module._write_all

    def watched(descriptor, data, offset):
        records = np.frombuffer(data, dtype=journal_module.RECORD)
        deleted.extend(r["key"].tobytes() for r in records if r["kind"] == Kind.DELETE)
        real(descriptor, data, offset)

    monkeypatch.setattr(journal_module, "_write_all", watched)
    evictor = driver.card._evictor
    victims = evictor._choose(30, None)
    evictor._sweep(victims)
    markers = {marker_key(number) for number in range(30)}
    kinds = [key in markers for key in deleted]
    assert kinds == [True] * victims.size + [False] * 3 * victims.size


def test_restart_keeps_the_order(tmp_path, drive):
    driver = drive(slab(tmp_path, evict_above=0.999), Arena(1 << 20))
    chunks = Chunks(driver, namespace=77)
    store_all(chunks, range(36))
    chunks.lookup(range(0, 36, 5))
    driver.card._evictor._sweep(driver.card._evictor._choose(20, None))
    groups = groups_of(driver)
    groups._used[:] = False  # what a restart forgets
    driver.close()
    again = drive(slab(tmp_path, evict_above=0.999), Arena(1 << 20))
    restored = groups_of(again)
    assert restored.used_slots(77) == groups.used_slots(77) > 0
    before = groups._facts["group"][groups.choose(50).victims].tolist()
    after = restored._facts["group"][restored.choose(50).victims].tolist()
    assert before == after
    assert len(before) >= 16


def test_group_with_a_missing_value_is_dropped_at_open(tmp_path, drive):
    """A power loss may take a record of one journal and leave the marker in another."""
    driver = drive(slab(tmp_path), Arena(1 << 20))
    chunks = Chunks(driver)
    store_all(chunks, range(6))
    driver.close()
    journals = sorted((tmp_path / "card").glob("*.journal"))
    with journals[0].open("r+b") as file:
        file.truncate(journals[0].stat().st_size - 64)
    driver = drive(slab(tmp_path), Arena(1 << 20))
    chunks = Chunks(driver)
    hits = chunks.lookup(range(6))
    assert hits.count(False) == 1
    for number, hit in enumerate(hits):
        if hit:
            chunks.check(number)
        else:
            assert Status.OK not in chunks.load(number)[0]
    assert free_slots(driver) == NUM_SLOTS - 5 * 3


def test_values_without_marker_are_gone_after_a_restart(tmp_path, drive):
    driver = drive(slab(tmp_path), Arena(1 << 20))
    chunks = Chunks(driver)
    store_all(chunks, [0])
    assert chunks.write(1) == [Status.OK] * 3
    driver.close()
    for _ in range(2):
        driver = drive(slab(tmp_path), Arena(1 << 20))
        chunks = Chunks(driver)
        chunks.check(0)
        assert chunks.load(1)[0] == [Status.ABSENT] * 3
        assert free_slots(driver) == NUM_SLOTS - 3
        driver.close()


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"evict_above": 1.5}, "evict_above"),
        ({"evict_to": 0.95}, "evict_to"),
        ({"hit_grace_s": -1.0}, "hit_grace_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"quota_bytes": 100}, "quota_bytes"),
    ],
)
def test_retention_out_of_range_is_named(tmp_path, changes, setting):
    with pytest.raises(ConfigError, match=setting):
        slab_settings(tmp_path, **changes)
    with pytest.raises(ConfigError, match=setting):
        memory_card(**changes)

"""What a slab card does in the background: compaction and scrubbing, on a card in use."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards import slab_upkeep
from gateway.cards.base import Status
from gateway.cards.group_facts import Rules
from gateway.cards.groups import GroupTable
from gateway.cards.slab_format import DATA_OFFSET
from gateway.cards.slab_scrub import Scrubber
from gateway.cards.slots import SlotTable
from tests.support.cards import Arena, slab_card
from tests.support.chunks import Chunks
from tests.support.clock import FakeClock
from tests.support.process import wait_until

SLOT_BYTES = 4096
NUM_SLOTS = 90


@pytest.fixture
def make(tmp_path, drive):
    def made(**changes):
        settings = {
            "capacity_bytes": NUM_SLOTS * SLOT_BYTES,
            "slot_bytes": SLOT_BYTES,
            "num_databases": 3,
            "hit_grace_s": 0.0,
        }
        return drive(slab_card(tmp_path / "card", **(settings | changes)), Arena(1 << 20))

    return made


def more_passes(driver):
    """Wait until everything that is there now was read: by a pass that began since."""
    before = driver.card.stats()["scrub_passes"]
    wait_until(lambda: driver.card.stats()["scrub_passes"] >= before + 2, 10, "it was read")


def test_journal_is_compacted_while_in_use(make, monkeypatch):
    monkeypatch.setattr(slab_upkeep, "COMPACT_SLACK", 40)
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 0.02)
    driver = make()
    chunks, number = Chunks(driver), 0
    while driver.card.stats()["compactions"] < 6:
        if chunks.store(number):
            number += 1
        assert number < 5000, "no compaction"
    driver.card._evictor.round()  # nothing is left for it to do
    kept = [n for n, hit in enumerate(chunks.lookup(range(number))) if hit]
    stats = driver.card.stats()
    assert stats["journal_bytes"] < 64 * 3 * (2 * 40 + 40 + 100)
    driver.close()
    driver = make(evict_above=1.0)
    chunks = Chunks(driver)
    assert [n for n, hit in enumerate(chunks.lookup(range(number))) if hit] == kept
    assert len(kept) > 10
    for n in kept:
        chunks.check(n)


@pytest.mark.parametrize("why", ["no room", "refused"])
def test_compaction_that_failed_is_not_tried_again_at_once(make, monkeypatch, why):
    """An attempt a second would fill a disk that is nearly full again and again."""
    monkeypatch.setattr(slab_upkeep, "COMPACT_SLACK", 0)
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 1000.0)
    driver = make()
    upkeep, chunks, asked = driver.card._upkeep, Chunks(driver), []
    for version in range(5):
        chunks.store(0, version)
    database = max(driver.card._databases, key=lambda d: d.journal.num_records)

    def refuse(*_):
        asked.append(1)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(database.journal, "has_room" if why == "no room" else "compact", refuse)
        for _ in range(3):
            assert not upkeep.compact(database)
    assert len(asked) == 1
    upkeep._retry_at[database] -= slab_upkeep._RETRY_S
    assert upkeep.compact(database)
    assert not database.journal.has_room(1 << 60)


def test_scrub_finds_damage_before_a_load_does(make, tmp_path, monkeypatch):
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 0.02)
    driver = make(scrub_bytes_per_s=1 << 30)
    chunks = Chunks(driver)
    for number in range(5):
        assert chunks.store(number)
    more_passes(driver)
    assert driver.card.stats()["scrub_corrupt"] == 0
    assert driver.card.stats()["bytes_read"] == 0
    assert driver.card.stats()["scrubbed_bytes"] >= 5 * 3 * chunks.length
    with (tmp_path / "card" / "slab-0001.data").open("r+b") as file:
        file.seek(DATA_OFFSET + SLOT_BYTES + 100)
        file.write(b"\xff\x00\xff\x00")
    wait_until(lambda: driver.card.stats()["scrub_corrupt"] == 1, 10, "it was found")
    hits = chunks.lookup(range(5))
    assert hits.count(False) == 1
    for number, hit in enumerate(hits):
        if hit:
            chunks.check(number)
    wait_until(lambda: driver.card.stats()["values"] == 5 * 4 - 2, 5, "value and marker are gone")
    assert chunks.store(hits.index(False))
    chunks.check(hits.index(False))


def test_value_written_anew_under_a_scrub_stays(make):
    driver = make(scrub_bytes_per_s=0)
    chunks = Chunks(driver)
    assert chunks.store(0)
    keys, databases, _, _ = chunks.columns(0)
    for database in range(3):
        mine = databases == database
        lengths = np.full(int(mine.sum()), chunks.length - 1, dtype=np.uint32)
        if mine.any():
            status = driver.card._upkeep.scrubber._read(database, keys[mine], lengths)
            assert status.tolist() == [Status.ABSENT] * int(mine.sum())
    assert chunks.lookup([0]) == [True]
    chunks.check(0)


def test_scrub_keeps_to_its_rate(make, monkeypatch):
    """By the pauses it asks for, not by a clock."""
    pauses = []
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 0.02)
    driver = make(scrub_bytes_per_s=1000)
    upkeep = driver.card._upkeep
    monkeypatch.setattr(upkeep._stop, "wait", lambda s=None: pauses.append(s) or False)
    assert upkeep.scrubber._stop is upkeep._stop
    chunks = Chunks(driver)
    assert chunks.store(0)
    wait_until(lambda: driver.card.stats()["scrubbed_bytes"] >= 15 * chunks.length, 10, "scrubbed")
    monkeypatch.undo()
    assert sum(p for p in pauses if p) >= 0.5 * 14 * chunks.length / 1000


def test_large_card_with_few_values_is_not_looked_through_without_a_pause():
    """Some million rows of an index take a second of CPU: one a pass, not one in two."""
    num_slots, rate = 1 << 17, 1 << 20
    table = SlotTable(num_slots, GroupTable(Rules(num_slots, 0.0, 60.0), FakeClock(), FakeClock()))
    stop, pauses = threading.Event(), []
    stop.wait = lambda s=None: pauses.append(s) or False
    scrubber = Scrubber([SimpleNamespace(table=table)], SLOT_BYTES, None, stop)
    while scrubber.step(rate):
        pass
    assert scrubber.num_passes == 1
    assert sum(pauses) >= 2 * num_slots * 16 / rate
    assert len(pauses) <= 2 * num_slots / 1024  # nor in too many steps
    pauses.clear()
    while scrubber.step(math.inf):  # by `card verify`
        pass
    assert not any(pauses)


def test_scrub_that_a_closing_card_refuses_is_no_failure(make, monkeypatch, caplog):
    begun, refused = threading.Event(), []
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 0.02)
    driver = make(scrub_bytes_per_s=1 << 30)
    scrubber, card = driver.card._upkeep.scrubber, driver.card
    submit = scrubber._submit

    def late(batch, on_done):
        begun.set()
        wait_until(lambda: card._store is None, 10, "the card closes")
        try:
            submit(batch, on_done)
        except CardError:
            refused.append(batch)
            raise

    monkeypatch.setattr(scrubber, "_submit", late)
    assert Chunks(driver).store(0)
    assert begun.wait(10)
    driver.close()
    assert refused
    assert "upkeep failed" not in caplog.text


def test_scrub_of_nothing_is_off(make, monkeypatch):
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 0.02)
    driver = make(scrub_bytes_per_s=0)
    assert Chunks(driver).store(0)
    assert not driver.card._upkeep._scrub(1e9)
    assert driver.card.stats()["scrubbed_bytes"] == 0


def test_scrub_does_not_prolong_a_life(make, monkeypatch):
    monkeypatch.setattr(slab_upkeep, "_TICK_S", 0.02)
    driver = make(scrub_bytes_per_s=1 << 30, hit_grace_s=1000.0)
    chunks = Chunks(driver)
    assert chunks.store(0)
    more_passes(driver)
    assert driver.card._evictor._choose(1, None).size == 1
    assert chunks.load(0)[0] == [Status.OK] * 3

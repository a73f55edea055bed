"""A batch of the slab card in parts: their I/O and checksums one by one, the rest once."""

import errno

import numpy as np
import pytest

from adp_kv.units import MiB
from gateway.cards import slab_flows
from gateway.cards.base import Status
from tests.support.cards import SLOT_BYTES, SLOTS, random_keys, slab_card
from tests.support.process import wait_until

OK, CORRUPT, IO_ERROR = Status.OK, Status.CORRUPT, Status.IO_ERROR
LENGTHS = [9000, 3000, 12000, 500, 8000, 8192, 1000, 4096]


@pytest.fixture
def driver(tmp_path, drive, monkeypatch):
    """A card whose parts have two entries."""
    monkeypatch.setattr(slab_flows, "PART_BYTES", 2 * 12288)
    return drive(slab_card(tmp_path / "card", num_databases=2))


def databases():
    return np.arange(len(LENGTHS), dtype=np.uint16) % 2


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([4096] * 600, [256, 256, 88]),
        ([128 * 1024] * 100, [64, 36]),
        ([2 * MiB] * 6, [4, 2]),
        ([4096, 2 * MiB, 4096, 4096, 4096], [4, 1]),
        ([64 * MiB] * 2, [1, 1]),
    ],
)
def test_parts_have_few_rows_and_few_bytes(sizes, rows):
    parts = slab_flows._cut(np.array(sizes, dtype=np.uint32))
    assert [len(sizes[part]) for part in parts] == rows
    assert [size for part in parts for size in sizes[part]] == sizes


def test_parts_make_one_journal_record_each_and_one_append_a_database(driver, monkeypatch):
    appended = []
    for database in driver.card._databases:
        inner = database.journal.append
        monkeypatch.setattr(
            database.journal,
            "append",
            lambda records, inner=inner: (appended.append(len(records)), inner(records)),
        )
    keys = random_keys(len(LENGTHS))
    assert driver.write(keys, LENGTHS, databases=databases()) == [OK] * len(LENGTHS)
    assert appended == [4, 4]
    driver.check(keys, LENGTHS, databases=databases())


@pytest.mark.parametrize("checksums", [True, False])
def test_rows_that_fail_in_some_parts_concern_themselves(tmp_path, drive, monkeypatch, checksums):
    monkeypatch.setattr(slab_flows, "PART_BYTES", 2 * SLOT_BYTES)
    driver = drive(slab_card(tmp_path / "card", checksums=checksums))
    keys = random_keys(8)
    lengths = [SLOT_BYTES] * 8
    driver.write(keys, lengths)
    engine, results = driver.card._engine, iter([[], [1], [0, 1], [0]])

    def spoil(request, submit=engine.submit):
        failing, inner = next(results), request.on_complete

        def on_complete(moved):
            moved[failing] = [-errno.EIO, 4096][: len(failing)]
            inner(moved)

        object.__setattr__(request, "on_complete", on_complete)
        submit(request)

    monkeypatch.setattr(engine, "submit", spoil)
    status, _ = driver.read(keys, lengths)
    assert status == [OK, OK, OK, IO_ERROR, IO_ERROR, CORRUPT, IO_ERROR, OK]
    monkeypatch.undo()
    again, _ = driver.read(keys, lengths)
    assert again == [OK] * 5 + [Status.ABSENT] + [OK] * 2
    stats = driver.card.stats()
    assert (stats["corrupt"], stats["free_slots"]) == (1, SLOTS - 7)


def test_part_that_breaks_fails_alone_and_loses_nothing(driver, monkeypatch, caplog):
    keys = random_keys(len(LENGTHS))
    driver.write(keys, LENGTHS, databases=databases())
    inner, broken = slab_flows.value_checksums, keys[2]

    def breaks(some, *rest):
        if (some == broken).all(axis=1).any():
            raise MemoryError("no")
        return inner(some, *rest)

    monkeypatch.setattr(slab_flows, "value_checksums", breaks)
    status, _ = driver.read(keys, LENGTHS, databases=databases())
    assert status == [OK, OK, IO_ERROR, IO_ERROR, OK, OK, OK, OK]
    wait_until(lambda: "card work failed" in caplog.text, 10, "the log says why")
    monkeypatch.undo()
    driver.check(keys, LENGTHS, databases=databases())
    free = driver.card.stats()["free_slots"]
    assert driver.delete(keys, databases=databases()) == [OK] * len(LENGTHS)
    assert driver.card.stats()["free_slots"] == free + len(LENGTHS)  # nothing stayed pinned


def test_key_that_is_read_twice_at_once_is_let_go_twice(driver):
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    driver.check(keys[[0, 0, 1, 0, 0]], [5000] * 5)
    assert driver.delete(keys) == [OK] * 2
    assert driver.card.stats()["free_slots"] == SLOTS

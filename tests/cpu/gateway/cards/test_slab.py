"""What a slab card keeps over a restart, and what it does about damage."""

import dataclasses
import errno
import threading

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards import direct_io
from gateway.cards.base import Op, Status
from gateway.cards.io_engine import IoEngine
from gateway.cards.journal_records import RECORD
from gateway.cards.slab_format import DATA_OFFSET
from tests.support.cards import SLOT_BYTES, SLOTS, Driver, random_keys, slab_card

OK, ABSENT, CORRUPT = Status.OK, Status.ABSENT, Status.CORRUPT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "card"


def stored(path, keys, sizes, **changes):
    """Write values and close the card."""
    driver = Driver(slab_card(path, **changes))
    assert driver.write(keys, sizes) == [OK] * len(keys)
    driver.close()


def flip(file, offset, mask=0x10):
    with file.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ mask]))


def files_of(path):
    return {f.name: f.read_bytes() for f in path.iterdir() if f.name != "lock"}


def test_reopened_card_has_its_values(path, drive):
    keys, sizes = random_keys(9), [1, 513, 4095, 4096, 70_000, 261120, SLOT_BYTES, 0, 77]
    driver = Driver(slab_card(path))
    driver.write(keys, sizes)
    driver.write(keys[:2], sizes[:2], version=5)
    driver.delete(keys[8:])
    driver.close()
    driver = drive(slab_card(path))
    driver.check(keys[:2], sizes[:2], version=5)
    driver.check(keys[2:8], sizes[2:8])
    assert driver.exist(keys[8:]) == [ABSENT]
    more = random_keys(SLOTS - 7, seed=1)
    assert driver.write(more, [10] * len(more)) == [OK] * len(more)
    driver.check(keys[2:8], sizes[2:8])


def test_second_opener_is_refused_with_path(path, drive):
    drive(slab_card(path))
    with pytest.raises(CardError, match=f"{path}.*another process"):
        slab_card(path).open(lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        pytest.param({"slot_bytes": SLOT_BYTES // 2}, "slot_bytes", id="slot_bytes"),
        pytest.param({"num_databases": 2}, "num_databases", id="num_databases"),
        pytest.param({"capacity_bytes": 99 * SLOT_BYTES}, "capacity_bytes", id="capacity"),
    ],
)
def test_other_geometry_is_refused_and_touches_nothing(path, changes, setting, drive):
    keys = random_keys(3)
    stored(path, keys, [1000] * 3)
    before = files_of(path)
    with pytest.raises(CardError, match=setting):
        slab_card(path, **changes).open(lambda *_: None)
    assert files_of(path) == before
    drive(slab_card(path)).check(keys, [1000] * 3)


def test_flipped_value_bit_is_corrupt_and_deleted(path, drive):
    keys = random_keys(4)
    stored(path, keys, [5000] * 4)
    flip(path / "slab-0000.data", DATA_OFFSET + 2 * SLOT_BYTES + 4999)
    driver = drive(slab_card(path))
    status, _ = driver.read(keys, [5000] * 4)
    assert status == [OK, OK, CORRUPT, OK]
    assert driver.exist(keys) == [OK, OK, ABSENT, OK]
    assert driver.card.stats()["corrupt"] == 1
    driver.close()
    assert drive(slab_card(path)).exist(keys) == [OK, OK, ABSENT, OK]


def test_swapped_slots_are_corrupt(path, drive):
    keys = random_keys(2)
    stored(path, keys, [4096] * 2)
    file = path / "slab-0000.data"
    with file.open("r+b") as f:
        f.seek(DATA_OFFSET)
        first = f.read(4096)
        f.seek(DATA_OFFSET + SLOT_BYTES)
        second = f.read(4096)
        f.seek(DATA_OFFSET)
        f.write(second)
        f.seek(DATA_OFFSET + SLOT_BYTES)
        f.write(first)
    status, _ = drive(slab_card(path)).read(keys, [4096] * 2)
    assert status == [CORRUPT, CORRUPT]


def test_same_bytes_of_another_key_are_corrupt(path, drive):
    """A journal that pairs a key with another key's slot, as misplaced writes would."""
    driver = drive(slab_card(path))
    keys = random_keys(2)
    offset = driver.arena.place(4096)
    driver.run(Op.WRITE, keys, [offset, offset], [4096, 4096])
    table = driver.card._databases[0].table
    slots = table.find(keys)
    table.checksums[slots] = table.checksums[slots[::-1]]
    status, _ = driver.read(keys, [4096] * 2)
    assert status == [CORRUPT, CORRUPT]


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_slab_cut_while_open_is_corrupt(path, drive, engine):
    driver = drive(slab_card(path, io_engine=engine))
    keys = random_keys(3)
    driver.write(keys, [9000] * 3)
    with (path / "slab-0000.data").open("r+b") as f:
        f.truncate(DATA_OFFSET + SLOT_BYTES + 4096)
    status, _ = driver.read(keys, [9000] * 3)
    assert status == [OK, CORRUPT, CORRUPT]


def test_cut_slab_is_refused_at_open(path):
    stored(path, random_keys(1), [10])
    with (path / "slab-0000.data").open("r+b") as f:
        f.truncate(DATA_OFFSET)
    with pytest.raises(CardError, match="its slots need"):
        slab_card(path).open(lambda *_: None)


def test_slabs_in_wrong_order_are_refused(path):
    stored(path, random_keys(1), [10], num_databases=2)
    a, b, c = (path / name for name in ("slab-0000.data", "slab-0001.data", "c"))
    a.rename(c)
    b.rename(a)
    c.rename(b)
    with pytest.raises(CardError, match="not database 0"):
        slab_card(path, num_databases=2).open(lambda *_: None)


def test_flipped_journal_record_forgets_it_and_later(path, drive):
    keys = random_keys(5)
    driver = Driver(slab_card(path))
    for i in range(5):
        driver.write(keys[i : i + 1], [2000])
    driver.close()
    flip(path / "slab-0000.journal", RECORD.itemsize * 3 + 20)  # header, 0, 1, then 2
    driver = drive(slab_card(path))
    assert driver.exist(keys) == [OK, OK, ABSENT, ABSENT, ABSENT]
    driver.check(keys[:2], [2000] * 2)
    assert driver.write(keys[2:], [2000] * 3, version=1) == [OK] * 3
    driver.close()
    driver = drive(slab_card(path))
    driver.check(keys[:2], [2000] * 2)
    driver.check(keys[2:], [2000] * 3, version=1)


def test_journal_rolled_back_never_gives_wrong_bytes(path, drive):
    """The tail is lost although the slots were reused: what a power loss may do."""
    old, new = random_keys(SLOTS), random_keys(SLOTS, seed=1)
    stored(path, old, [3000] * SLOTS)
    size = (path / "slab-0000.journal").stat().st_size
    driver = Driver(slab_card(path))
    driver.delete(old)
    driver.write(new, [3000] * SLOTS)
    driver.close()
    with (path / "slab-0000.journal").open("r+b") as f:
        f.truncate(size)
    driver = drive(slab_card(path))
    status, _ = driver.read(old, [3000] * SLOTS)
    assert status == [CORRUPT] * SLOTS
    assert driver.exist(new) == [ABSENT] * SLOTS


def test_slot_in_a_read_is_not_written(path, drive, monkeypatch):
    """Holds a read's I/O back while its key is overwritten until the card is full."""
    driver = drive(slab_card(path))
    keys = random_keys(1)
    driver.write(keys, [6000])
    engine: IoEngine = driver.card._engine
    submit, held = engine.submit, []
    monkeypatch.setattr(engine, "submit", lambda r: held.append(r) if not r.write else submit(r))
    place = driver.arena.place(6000)
    token = driver.start(Op.READ, keys, [place], [6000])
    while not held:
        threading.Event().wait(0.01)
    others = random_keys(SLOTS - 1, seed=1)
    assert driver.write(others[:-1], [6000] * (SLOTS - 2)) == [OK] * (SLOTS - 2)
    assert driver.write(keys, [6000], version=1) == [OK]  # the last free slot
    assert driver.write(others[-1:], [6000]) == [Status.NO_SPACE]
    submit(held[0])
    assert driver.wait(token).tolist() == [OK]
    driver.arena._next = place
    monkeypatch.undo()
    driver.arena.clear()
    assert driver.write(others[-1:], [6000]) == [OK]
    driver.check(keys, [6000], version=1)


def test_deleted_in_read_still_reads_bytes(path, drive, monkeypatch):
    driver = drive(slab_card(path))
    keys = random_keys(1)
    driver.write(keys, [6000])
    engine = driver.card._engine
    submit, held = engine.submit, []
    monkeypatch.setattr(engine, "submit", lambda r: held.append(r) if not r.write else submit(r))
    place = driver.arena.place(6000)
    token = driver.start(Op.READ, keys, [place], [6000])
    while not held:
        threading.Event().wait(0.01)
    driver.delete(keys)
    new = random_keys(SLOTS, seed=1)
    status = driver.write(new, [6000] * SLOTS)
    assert status.count(Status.NO_SPACE) == 1
    submit(held[0])
    assert driver.wait(token).tolist() == [OK]


def test_failed_io_concerns_its_entry_alone(path, drive, monkeypatch):
    driver = drive(slab_card(path))
    keys = random_keys(4)
    engine = driver.card._engine
    submit = engine.submit

    def second_fails(request):
        def complete(results):
            results[1] = -errno.EIO
            request.on_complete(results)

        submit(dataclasses.replace(request, on_complete=complete))

    monkeypatch.setattr(engine, "submit", second_fails)
    assert driver.write(keys, [100] * 4) == [OK, Status.IO_ERROR, OK, OK]
    monkeypatch.undo()
    assert driver.exist(keys) == [OK, ABSENT, OK, OK]
    assert driver.card.stats()["free_slots"] == SLOTS - 3
    assert driver.card.stats()["io_errors"] == 1


def test_journal_out_of_space_answers_no_space(path, drive, monkeypatch):
    driver = drive(slab_card(path))
    keys = random_keys(3)
    driver.write(keys[:1], [100])

    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gateway.cards.journal._write_all", refuse)
    assert driver.write(keys[1:], [100] * 2) == [Status.NO_SPACE] * 2
    assert driver.run(Op.WRITE, keys[2:], [0], [0]) == [Status.NO_SPACE]
    assert driver.delete(keys[:1]) == [Status.IO_ERROR]
    monkeypatch.undo()
    assert driver.card.stats()["free_slots"] == SLOTS - 1
    driver.check(keys[:1], [100])


def test_no_room_for_the_slab_names_capacity(path):
    with pytest.raises(CardError, match="capacity_bytes"):
        slab_card(path, capacity_bytes=1 << 60).open(lambda *_: None)
    assert (path / "slab-0000.data").stat().st_size == 0
    assert not (path / "card.json").exists()


def test_unfinished_creation_starts_over(path, drive):
    stored(path, random_keys(2), [100] * 2)
    (path / "card.json").unlink()
    driver = drive(slab_card(path))
    assert driver.exist(random_keys(2)) == [ABSENT] * 2
    assert driver.card.stats()["values"] == 0


@pytest.mark.parametrize("content", [b"{", b'{"kind": "other"}'])
def test_unreadable_facts_are_refused(path, content):
    stored(path, random_keys(1), [100])
    (path / "card.json").write_bytes(content)
    with pytest.raises(CardError, match=r"card\.json"):
        slab_card(path).open(lambda *_: None)


def test_newer_format_is_refused(path):
    stored(path, random_keys(1), [100])
    facts = path / "card.json"
    facts.write_text(facts.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CardError, match="format 3"):
        slab_card(path).open(lambda *_: None)


def test_file_as_device_is_refused(path, tmp_path):
    (tmp_path / "notes").write_text("precious")
    with pytest.raises(CardError, match="no block device"):
        slab_card(path, devices=(str(tmp_path / "notes"),)).open(lambda *_: None)
    assert (tmp_path / "notes").read_text() == "precious"


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A file of zeros that passes for a block device."""
    monkeypatch.setattr("gateway.cards.slab_store.stat.S_ISBLK", lambda mode: True)
    file = tmp_path / "device"
    file.write_bytes(bytes(DATA_OFFSET + SLOTS * SLOT_BYTES))
    return file


def test_empty_device_is_taken_and_found_again(path, device, drive):
    keys = random_keys(3)
    stored(path, keys, [5000] * 3, devices=(str(device),))
    driver = drive(slab_card(path, devices=(str(device),)))
    driver.check(keys, [5000] * 3)
    assert not (path / "slab-0000.data").exists()


@pytest.mark.parametrize("offset", [0, 1024, DATA_OFFSET - 1])
def test_device_with_data_is_refused_untouched(path, device, offset):
    flip(device, offset)
    content = device.read_bytes()
    with pytest.raises(CardError, match="holds data"):
        slab_card(path, devices=(str(device),)).open(lambda *_: None)
    assert device.read_bytes() == content


def test_device_of_a_card_elsewhere_is_refused_untouched(path, device, tmp_path):
    """Say on another server, whose lock this one does not see."""
    stored(path, random_keys(3), [5000] * 3, devices=(str(device),))
    content = device.read_bytes()
    card = slab_card(tmp_path / "elsewhere", devices=(str(device),))
    with pytest.raises(CardError, match=r"slab of a card with another path.*format --force"):
        card.open(lambda *_: None)
    assert device.read_bytes() == content


def test_small_device_is_refused_untouched(path, device):
    with device.open("r+b") as f:
        f.truncate(SLOT_BYTES)
    with pytest.raises(CardError, match="slots need"):
        slab_card(path, devices=(str(device),)).open(lambda *_: None)
    assert device.read_bytes() == bytes(SLOT_BYTES)


def test_unchecked_value_is_corrupt_when_checked(path, drive):
    keys = random_keys(1)
    stored(path, keys, [5000], checksums=False)
    assert drive(slab_card(path)).read(keys, [5000])[0] == [CORRUPT]


def test_file_system_without_direct_io_is_served(path, drive, monkeypatch, caplog):
    real = direct_io.os.open

    def no_direct(target, flags, *args):
        if flags & direct_io.os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(target, flags, *args)

    monkeypatch.setattr(direct_io.os, "open", no_direct)
    driver = drive(slab_card(path))
    keys = random_keys(3)
    driver.write(keys, [513] * 3)
    driver.check(keys, [513] * 3)
    assert sum("no O_DIRECT" in r.message for r in caplog.records) == 1


def test_sync_runs_without_being_asked(path, drive, monkeypatch):
    synced = threading.Event()
    driver = drive(slab_card(path, sync_interval_s=0.05))
    journal = driver.card._databases[0].journal
    monkeypatch.setattr(journal, "sync", synced.set)
    driver.write(random_keys(1), [100])
    assert synced.wait(5)


def test_open_twice_is_refused(path, drive):
    driver = drive(slab_card(path))
    with pytest.raises(CardError, match="open already"):
        driver.card.open(lambda *_: None)


def test_values_spread_over_both_databases_slabs(path, drive):
    keys = random_keys(4)
    databases = np.array([0, 1, 0, 1], dtype=np.uint16)
    driver = Driver(slab_card(path, num_databases=2))
    driver.write(keys, [3000] * 4, databases=databases)
    driver.close()
    driver = drive(slab_card(path, num_databases=2))
    driver.check(keys, [3000] * 4, databases=databases)
    assert driver.exist(keys, databases=1 - databases) == [ABSENT] * 4

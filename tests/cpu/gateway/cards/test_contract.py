"""The contract of gateway.cards.base, the same for every card."""

import threading

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards.base import Batch, Op, Status
from tests.support.cards import SLOT_BYTES, SLOTS, Driver, random_keys, value_of
from tests.support.chunks import Chunks

OK, ABSENT, CORRUPT = Status.OK, Status.ABSENT, Status.CORRUPT
SIZES = [1, 511, 512, 513, 4095, 4096, 4097, 261120, SLOT_BYTES]


def test_values_of_odd_sizes_read_exactly(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(len(SIZES))
    assert driver.write(keys, SIZES) == [OK] * len(SIZES)
    driver.check(keys, SIZES)
    driver.check(keys[::-1], SIZES[::-1])


def test_keys_never_written_are_absent(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(6)
    driver.write(keys[:3], [4096] * 3)
    assert driver.exist(keys) == [OK] * 3 + [ABSENT] * 3
    status, _ = driver.read(keys, [4096] * 6)
    assert status == [OK] * 3 + [ABSENT] * 3


def test_keys_that_share_a_word_differ(make_card, drive):
    driver = drive(make_card())
    keys = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2**64 - 1, 0]], dtype=np.uint64)
    driver.write(keys, [4096] * 5)
    driver.check(keys, [4096] * 5)


def test_overwrite_reads_one_of_the_values(make_card, drive, replaces):
    driver = drive(make_card())
    keys = random_keys(4)
    for version in range(3 * SLOTS // 4 + 1):  # more often than there are slots
        driver.arena.clear()
        assert driver.write(keys, [5000] * 4, version) == [OK] * 4
    driver.check(keys, [5000] * 4, version if replaces else 0)
    if replaces:
        assert driver.card.stats()["values"] == 4


def test_deleted_key_is_absent_room_free(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(SLOTS)
    assert driver.write(keys, [64] * SLOTS) == [OK] * SLOTS
    assert driver.delete(keys[:5]) == [OK] * 5
    assert driver.delete(keys[:5]) == [ABSENT] * 5
    assert driver.exist(keys) == [ABSENT] * 5 + [OK] * (SLOTS - 5)
    again = random_keys(5, seed=1)
    assert driver.write(again, [64] * 5) == [OK] * 5
    driver.check(np.concatenate([keys[5:], again]), [64] * SLOTS)


def test_marker_exists_and_moves_no_bytes(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(2 * SLOTS)  # markers take no slot
    nowhere = [0] * len(keys)
    assert driver.run(Op.WRITE, keys, nowhere, nowhere) == [OK] * len(keys)
    assert driver.exist(keys) == [OK] * len(keys)
    assert driver.run(Op.READ, keys, nowhere, nowhere) == [OK] * len(keys)
    assert driver.delete(keys[:1]) == [OK]
    assert driver.run(Op.READ, keys[:2], [0, 0], [0, 0]) == [ABSENT, OK]
    assert (driver.arena.bytes == 0xA5).all()


def test_marker_and_value_replace_each_other(make_card, drive, replaces):
    driver = drive(make_card())
    keys = random_keys(1)
    driver.write(keys, [100])
    driver.run(Op.WRITE, keys, [0], [0])
    if not replaces:  # what is there has another length: it goes, and then there is room
        assert driver.run(Op.READ, keys, [0], [0]) == [CORRUPT]
        driver.run(Op.WRITE, keys, [0], [0])
    assert driver.run(Op.READ, keys, [0], [0]) == [OK]
    if not replaces:
        driver.delete(keys)
    driver.write(keys, [100], version=1)
    driver.check(keys, [100], version=1)


def test_read_of_other_length_is_corrupt(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(2)
    driver.write(keys, [4096, 4096])
    status, _ = driver.read(keys, [4095, 4096])
    assert status == [CORRUPT, OK]
    assert driver.exist(keys) == [ABSENT, OK]
    assert driver.card.stats()["corrupt"] == 1


def test_value_beyond_the_limit_is_too_large(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(3)
    sizes = [10, driver.card.limits.max_value_bytes + 1, 20]
    assert driver.write(keys, sizes) == [OK, Status.TOO_LARGE, OK]
    status, _ = driver.read(keys, sizes)
    assert status == [OK, Status.TOO_LARGE, OK]
    assert driver.exist(keys) == [OK, ABSENT, OK]


def test_full_card_answers_no_space_per_entry(make_card, drive, has_slots):
    driver = drive(make_card())
    keys, size = random_keys(SLOTS + 6), SLOT_BYTES
    status = driver.write(keys, [size] * len(keys))
    assert set(status) == {OK, Status.NO_SPACE}
    if has_slots:
        assert sorted(status) == [OK] * SLOTS + [Status.NO_SPACE] * 6
    stored = np.array(status) == OK
    assert (np.array(driver.exist(keys)) == np.where(stored, OK, ABSENT)).all()
    driver.arena.clear()
    driver.check(keys[stored], [size] * stored.sum())
    driver.delete(keys[stored][:6])
    again = keys[~stored][: 6 if has_slots else 3]
    driver.arena.clear()
    assert driver.write(again, [size] * len(again)) == [OK] * len(again)


def test_key_twice_in_read_fills_both(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(3)
    driver.write(keys, [7000] * 3)
    driver.check(keys[[0, 1, 0, 2, 0]], [7000] * 5)


def test_neighbouring_values_keep_their_bytes(make_card, drive):
    driver = drive(make_card())
    keys, size = random_keys(16), SLOT_BYTES
    source, target = driver.arena.place(16 * size), driver.arena.place(16 * size)
    for i, key in enumerate(keys):
        driver.arena.at(source + i * size, size)[:] = value_of(key, size)
    sources = [source + i * size for i in range(16)]
    assert driver.run(Op.WRITE, keys, sources, [size] * 16) == [OK] * 16
    for order in (range(16), [3, 4, 5, 0, 1, 9, 8, 7], range(15, -1, -1)):
        targets = [target + i * size for i in range(len(order))]
        lengths = [size] * len(order)
        assert driver.run(Op.READ, keys[list(order)], targets, lengths) == [OK] * len(order)
        for i, place in zip(order, targets, strict=True):
            assert np.array_equal(driver.arena.at(place, size), value_of(keys[i], size))


def test_chunk_with_its_marker_comes_and_goes(make_card, drive, replaces):
    chunks = Chunks(drive(make_card(num_databases=2)))
    assert chunks.lookup([0, 1]) == [False, False]
    assert chunks.store(0)
    assert chunks.store(1)
    assert chunks.lookup([0, 1, 2]) == [True, True, False]
    chunks.check(0)
    assert chunks.remove(0) == OK
    assert chunks.lookup([0, 1]) == [False, True]
    assert chunks.store(0, version=1)
    chunks.check(0, version=1 if replaces else 0)
    assert chunks.lookup([0]) == [True]


def test_databases_keep_their_keys_apart(make_card, drive):
    driver = drive(make_card(num_databases=3))
    keys = random_keys(4)
    everywhere = np.repeat(np.arange(3), 4)
    driver.write(np.tile(keys[:2], (3, 1)), [2048] * 6, databases=np.repeat(np.arange(3), 2))
    for database in range(3):
        driver.write(keys[2:], [2048] * 2, version=database, databases=database)
    assert driver.exist(np.tile(keys, (3, 1)), databases=everywhere) == [OK] * 12
    for database in range(3):
        driver.check(keys[:2], [2048] * 2, databases=database)
        driver.check(keys[2:], [2048] * 2, version=database, databases=database)
    assert driver.delete(keys, databases=1) == [OK] * 4
    expected = [OK] * 4 + [ABSENT] * 4 + [OK] * 4
    assert driver.exist(np.tile(keys, (3, 1)), databases=everywhere) == expected


def test_answers_come_from_threads_of_the_card(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(2)
    driver.write(keys, [10, 10])
    driver.exist(keys)
    driver.delete(keys)
    driver.run(Op.WRITE, keys, [0, 0], [0, 0])
    assert threading.get_ident() not in {thread for _, thread in driver.answers.values()}


def test_many_batches_at_once_each_answered_once(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(24)
    sizes = [1 + 997 * i for i in range(24)]
    offsets = [driver.arena.place(size) for size in sizes]
    for key, offset, size in zip(keys, offsets, sizes, strict=True):
        driver.arena.at(offset, size)[:] = value_of(key, size)
    writes = [
        driver.start(Op.WRITE, keys[i : i + 4], offsets[i : i + 4], sizes[i : i + 4])
        for i in range(0, 24, 4)
    ]
    assert all(driver.wait(token).tolist() == [OK] * 4 for token in writes)
    places = [[driver.arena.place(size) for size in sizes] for _ in range(6)]
    reads = [driver.start(Op.READ, keys, place, sizes) for place in places]
    for token, place in zip(reads, places, strict=True):
        assert driver.wait(token).tolist() == [OK] * 24
        for key, offset, size in zip(keys, place, sizes, strict=True):
            assert np.array_equal(driver.arena.at(offset, size), value_of(key, size))
    assert len(driver.answers) == 12


def test_reads_beside_overwrites_never_mix_versions(make_card, drive, replaces):
    driver = drive(make_card())
    keys, size = random_keys(4), 50_000
    known = [{value_of(key, size, v).tobytes() for v in range(8)} for key in keys]
    driver.write(keys, [size] * 4)
    for version in range(1, 8):
        driver.arena.clear()
        sources = [driver.arena.place(size) for _ in keys]
        for key, offset in zip(keys, sources, strict=True):
            driver.arena.at(offset, size)[:] = value_of(key, size, version)
        targets = [[driver.arena.place(size) for _ in keys] for _ in range(4)]
        tokens = [driver.start(Op.READ, keys, targets[i], [size] * 4) for i in (0, 1)]
        write = driver.start(Op.WRITE, keys, sources, [size] * 4)
        tokens += [driver.start(Op.READ, keys, targets[i], [size] * 4) for i in (2, 3)]
        assert driver.wait(write).tolist() == [OK] * 4
        for token, places in zip(tokens, targets, strict=True):
            assert driver.wait(token).tolist() == [OK] * 4
            for place, values in zip(places, known, strict=True):
                assert driver.arena.at(place, size).tobytes() in values
    driver.check(keys, [size] * 4, version=7 if replaces else 0)


def test_registered_memory_reads_and_writes(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(8)
    driver.card.register(driver.arena.base, driver.arena.num_bytes // 2)
    driver.card.register(driver.arena.base + driver.arena.num_bytes // 2, 4096)
    driver.write(keys, [30_000] * 8)
    driver.check(keys, [30_000] * 8)
    driver.card.unregister()
    driver.check(keys, [30_000] * 8)


def test_stats_count_bytes_and_values(make_card, drive):
    driver = drive(make_card())
    keys = random_keys(3)
    driver.write(keys, [1000] * 3)
    driver.read(keys[:2], [1000] * 2)
    stats = driver.card.stats()
    assert stats["values"] == 3
    assert stats["bytes_written"] == 3000
    assert stats["bytes_read"] == 2000
    assert stats["corrupt"] == stats["io_errors"] == 0


def batch(**changes):
    n = 2
    columns = {
        "op": Op.WRITE,
        "token": 1,
        "databases": np.zeros(n, np.uint16),
        "keys": random_keys(n),
        "addresses": np.zeros(n, np.uint64),
        "lengths": np.zeros(n, np.uint32),
    }
    return Batch(**(columns | changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"databases": np.zeros(0, np.uint16)}, "no entries", id="empty"),
        pytest.param({"databases": np.ones(2, np.uint16)}, "databases", id="database"),
        pytest.param({"databases": np.zeros(2, np.int64)}, "databases", id="database-dtype"),
        pytest.param({"keys": np.zeros((3, 2), np.uint64)}, "keys", id="keys-shape"),
        pytest.param({"keys": np.zeros((2, 2), np.uint64)}, "twice", id="key-twice"),
        pytest.param({"addresses": None}, "needs addresses", id="no-addresses"),
        pytest.param({"lengths": np.zeros(2, np.int32)}, "lengths", id="lengths-dtype"),
        pytest.param({"groups": np.zeros(2, np.int64)}, "groups", id="groups-dtype"),
    ],
)
def test_batch_that_breaks_the_contract_is_refused(make_card, drive, changes, field):
    driver = drive(make_card())
    with pytest.raises(CardError, match=field):
        driver.card.submit(batch(**changes))
    assert driver.answers == {}


def test_closed_card_refuses_and_closes_twice(make_card):
    card = make_card()
    with pytest.raises(CardError, match="open"):
        card.submit(batch())
    driver = Driver(card)
    driver.write(random_keys(1), [10])
    card.close()
    card.close()
    with pytest.raises(CardError, match="open"):
        card.submit(batch())


def test_close_answers_what_is_in_flight(make_card):
    driver = Driver(make_card())
    keys = random_keys(SLOTS)
    offsets = [driver.arena.place(200_000) for _ in keys]
    tokens = [
        driver.start(Op.WRITE, keys[i : i + 8], offsets[i : i + 8], [200_000] * 8)
        for i in range(0, SLOTS, 8)
    ]
    driver.close()
    assert set(tokens) == set(driver.answers)

"""What is the memory card's own: values in a row are one copy, shares, a copy that breaks."""

import numpy as np
import pytest

from adp_kv.units import MiB
from gateway.cards import memory
from gateway.cards.base import Op, Status
from gateway.cards.memory import MemorySettings
from tests.support.cards import Arena, Driver, memory_card, random_keys

N = 24
VALUE = 131072  # the stride, so that values in a row are neighbours


@pytest.fixture
def copies(monkeypatch):
    """Sizes of all copies that the card made."""
    made = []
    original = memory._memmove

    def memmove(target, source, num_bytes):
        made.append(num_bytes)
        original(target, source, num_bytes)

    monkeypatch.setattr(memory, "_memmove", memmove)
    return made


@pytest.fixture
def driver():
    card = memory_card(max_value_bytes=VALUE, copy_threads=3, num_databases=2)
    driver = Driver(card, Arena(N * VALUE * 2))
    yield driver
    driver.close()


def in_a_row(driver, op, keys, first=0, databases=0):
    offsets = [first + i * VALUE for i in range(len(keys))]
    return driver.run(op, keys, offsets, [VALUE] * len(keys), databases)


def test_values_in_a_row_are_one_copy_a_share(driver, copies):
    keys = random_keys(N)
    source = driver.arena.bytes[: N * VALUE]
    source[:] = np.random.default_rng(3).integers(0, 256, N * VALUE)
    assert in_a_row(driver, Op.WRITE, keys) == [Status.OK] * N
    assert sorted(copies) == [MiB, MiB, MiB]  # 3 MiB, three copiers
    copies.clear()
    assert in_a_row(driver, Op.READ, keys, N * VALUE) == [Status.OK] * N
    assert sorted(copies) == [MiB, MiB, MiB]
    assert np.array_equal(driver.arena.bytes[N * VALUE :], source)


def test_order_or_database_of_others_breaks_runs_not_bytes(driver, copies):
    keys = random_keys(N)
    source = driver.arena.bytes[: N * VALUE].reshape(N, VALUE)
    source[:] = np.random.default_rng(4).integers(0, 256, source.shape)
    databases = np.arange(N) % 2
    assert in_a_row(driver, Op.WRITE, keys, 0, databases) == [Status.OK] * N
    order = np.random.default_rng(5).permutation(N)
    copies.clear()
    status = in_a_row(driver, Op.READ, keys[order], N * VALUE, databases[order])
    assert status == [Status.OK] * N
    assert sum(copies) == N * VALUE
    assert len(copies) > 3
    assert np.array_equal(driver.arena.bytes[N * VALUE :].reshape(N, VALUE), source[order])


def test_copy_that_breaks_is_io_error_and_leaves_nothing(driver, monkeypatch):
    keys = random_keys(N)
    original = memory._memmove

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(memory, "_memmove", fail)
    assert in_a_row(driver, Op.WRITE, keys) == [Status.IO_ERROR] * N
    assert driver.exist(keys) == [Status.ABSENT] * N
    monkeypatch.setattr(memory, "_memmove", original)
    assert driver.card.stats()["free_slots"] == driver.card._settings.slots_per_database * 2
    assert in_a_row(driver, Op.WRITE, keys) == [Status.OK] * N
    monkeypatch.setattr(memory, "_memmove", fail)
    assert in_a_row(driver, Op.READ, keys) == [Status.IO_ERROR] * N
    monkeypatch.setattr(memory, "_memmove", original)
    assert in_a_row(driver, Op.READ, keys) == [Status.OK] * N
    assert not driver.card._tables[0]._pins.any()


@pytest.mark.parametrize(
    ("lengths", "most", "bounds"),
    [
        ([], 4, [0, 0]),
        ([0, 5], 4, [0, 2]),
        ([MiB] * 4, 2, [0, 2, 4]),
        ([MiB] * 3, 8, [0, 1, 2, 3]),
        ([8 * MiB, MiB, MiB], 2, [0, 1, 3]),
        ([MiB, MiB, 8 * MiB], 2, [0, 3]),
        ([8 * MiB], 4, [0, 1]),
    ],
)
def test_shares_have_about_equal_bytes(lengths, most, bounds):
    assert memory._cut(np.array(lengths, dtype=np.uint32), most) == bounds


def test_default_copiers_follow_the_cores(monkeypatch):
    settings = MemorySettings(capacity_bytes=MiB)
    for cores, copiers in ((1, 1), (2, 1), (8, 6), (16, 12), (64, 12)):
        monkeypatch.setattr(memory.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert settings.num_copiers == copiers
    assert MemorySettings(capacity_bytes=MiB, copy_threads=20).num_copiers == 20

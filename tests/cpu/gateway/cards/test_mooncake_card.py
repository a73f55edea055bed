"""The Mooncake card against a real store that dies, hangs, evicts, fills up and is damaged."""

import importlib
import signal
import sys
import threading
import types

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards.base import Op, Status
from gateway.cards.mooncake import engine as engine_module
from gateway.cards.mooncake import exchanges
from gateway.cards.mooncake.engine import Engine
from gateway.cards.mooncake.settings import parse_master
from tests.support.cards import Driver, mooncake_card, random_keys, value_of
from tests.support.mooncake import MooncakeStore
from tests.support.process import free_port, wait_until

OK, ABSENT, CORRUPT, IO_ERROR = Status.OK, Status.ABSENT, Status.CORRUPT, Status.IO_ERROR
NO_SPACE = Status.NO_SPACE
FAST = {"reconnect_s": 0.05, "io_timeout_s": 1.0, "connect_timeout_s": 1.0}


@pytest.fixture
def store():
    """A store of the test's own, for harm; it soon notices that a holder died."""
    with MooncakeStore(client_ttl=3) as made:
        yield made


@pytest.fixture
def driver(mooncake_store, drive):
    return drive(mooncake_card(mooncake_store.address))


def name_of(key, prefix="adp:"):
    return prefix + key.astype("<u8").tobytes().hex()


def replace(client, name, value):
    assert client.remove(name, True) == 0
    assert client.put(name, value) == 0


def calls_of(monkeypatch, name):
    """Return a list that grows by one with each call of an engine's method."""
    made, inner = [], getattr(Engine, name)

    def spy(self, *arguments):
        made.append(arguments)
        return inner(self, *arguments)

    monkeypatch.setattr(Engine, name, spy)
    return made


# Damage.


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda v: bytes([v[0] ^ 1]) + v[1:], id="checksum"),
        pytest.param(lambda v: v[:12] + b"\x02" + v[13:], id="version"),
        pytest.param(lambda v: v[:14] + b"xx" + v[16:], id="magic"),
        pytest.param(lambda v: v[:8] + b"\x01" + v[9:], id="length"),
        pytest.param(lambda v: v[:-1] + bytes([v[-1] ^ 0x80]), id="last-byte"),
        pytest.param(lambda v: v[:-1], id="short"),
        pytest.param(lambda v: v + b"x", id="long"),
        pytest.param(lambda v: bytes(len(v)), id="zeros"),
        pytest.param(lambda v: v[:8], id="tiny"),
    ],
)
def test_damaged_value_is_corrupt_and_removed(mooncake_store, driver, change):
    keys, sizes = random_keys(3), [5000, 100_000, 5000]
    driver.write(keys, sizes)
    name = name_of(keys[1])
    replace(mooncake_store.client, name, change(mooncake_store.client.get(name)))
    status, values = driver.read(keys, sizes)
    assert status == [OK, CORRUPT, OK]
    for i in (0, 2):
        assert np.array_equal(values[i], value_of(keys[i], sizes[i]))
    assert mooncake_store.client.is_exist(name) == 0
    assert driver.card.stats()["corrupt"] == 1
    assert driver.card.stats()["values"] == 2
    assert driver.write(keys[1:2], sizes[1:2]) == [OK]  # there is room for it again
    driver.check(keys, sizes)


def test_value_of_another_key_is_corrupt(mooncake_store, driver):
    keys, client = random_keys(2), mooncake_store.client
    driver.write(keys, [5000, 5000])
    replace(client, name_of(keys[1]), client.get(name_of(keys[0])))
    assert driver.read(keys, [5000, 5000])[0] == [OK, CORRUPT]


def test_damaged_marker_is_corrupt(mooncake_store, driver):
    keys = random_keys(2)
    assert driver.run(Op.WRITE, keys, [0, 0], [0, 0]) == [OK] * 2
    replace(mooncake_store.client, name_of(keys[0]), bytes(16))
    assert driver.run(Op.READ, keys, [0, 0], [0, 0]) == [CORRUPT, OK]


def test_answer_without_bytes_is_corrupt(driver, monkeypatch):
    """An engine that says that all came, and moved nothing, is not believed."""
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    driver.check(keys, [5000] * 2)  # their headers and bytes lie about now
    whole = np.full(2, 16 + 5000, dtype=np.int64)
    monkeypatch.setattr(Engine, "get", lambda *_: whole)
    assert driver.read(keys, [5000] * 2)[0] == [CORRUPT] * 2


def test_key_twice_with_other_lengths_harms_nobody(driver):
    keys = random_keys(3)
    driver.write(keys, [7000] * 3)
    order, sizes = [0, 1, 0, 2, 0, 0], [7000, 7000, 6999, 7000, 7000, 0]
    status, values = driver.read(keys[order], sizes)
    assert [status[i] for i in (0, 1, 3)] == [OK] * 3
    assert status[2] == CORRUPT
    for i in np.flatnonzero(np.array(status) == OK).tolist():
        assert np.array_equal(values[i], value_of(keys[order[i]], sizes[i]))


def test_keys_of_others_are_left_alone(mooncake_store, drive):
    address = mooncake_store.address
    one, two = drive(mooncake_card(address)), drive(mooncake_card(address, key_prefix="b/"))
    keys = random_keys(2)
    one.write(keys, [5000] * 2)
    assert two.exist(keys) == [ABSENT] * 2
    two.write(keys, [100] * 2)
    assert two.delete(keys) == [OK] * 2
    one.check(keys, [5000] * 2)
    assert mooncake_store.client.is_exist(name_of(keys[0])) == 1


def test_two_cards_share_a_space(mooncake_store, drive):
    one = drive(mooncake_card(mooncake_store.address))
    two = drive(mooncake_card(f"{mooncake_store.address}?space=x", mooncake_store.address))
    keys = random_keys(2)
    one.write(keys, [5000] * 2)
    two.check(keys, [5000] * 2, databases=1)
    assert two.exist(keys, databases=0) == [ABSENT] * 2
    assert two.delete(keys, databases=1) == [OK] * 2
    assert one.exist(keys) == [ABSENT] * 2


# What is moved how.


@pytest.fixture
def copied(monkeypatch):
    """Lengths of the values that went through a copy."""
    lengths, inner = [], exchanges.ctypes.memmove

    def spy(target, source, length):
        lengths.append(length)
        return inner(target, source, length)

    monkeypatch.setattr(exchanges.ctypes, "memmove", spy)
    return lengths


def test_announced_memory_is_moved_in_place(driver, copied):
    keys = random_keys(4)
    half = driver.arena.num_bytes // 2
    driver.card.register(driver.arena.base, half)
    driver.write(keys, [200_000] * 4)
    driver.check(keys, [200_000] * 4)
    assert copied == []
    outside = half + 4096  # behind what was announced
    assert driver.run(Op.READ, keys[:1], [outside], [200_000]) == [OK]
    assert copied == [200_000]
    assert np.array_equal(driver.arena.at(outside, 200_000), value_of(keys[0], 200_000))
    driver.card.unregister()
    driver.check(keys, [200_000] * 4)
    assert len(copied) == 5


def test_memory_that_the_engine_refuses_goes_through_a_copy(driver, copied, caplog):
    base = driver.arena.base
    driver.card.register(base, 4096)
    driver.card.register(base, driver.arena.num_bytes)  # it takes no memory twice
    assert "values are copied" in caplog.text
    keys = random_keys(8)
    driver.write(keys, [200_000] * 8)
    driver.check(keys, [200_000] * 8)
    assert copied == [200_000] * 16


def test_batch_goes_in_few_calls(driver, monkeypatch):
    puts, gets = calls_of(monkeypatch, "put"), calls_of(monkeypatch, "get")
    keys = random_keys(64)
    driver.write(keys, [1000] * 64)
    driver.check(keys, [1000] * 64)
    assert len(puts) == len(gets) == 2  # of 32 rows, on two threads


def test_segment_of_the_gateway_holds_values(store, drive):
    """Values lie in the gateway's own RAM where nobody else gives any."""
    store.kill_holder()
    wait_until(lambda: not store.segments(), 20, "the holder is gone")
    driver = drive(mooncake_card(store.address, segment_bytes=32 << 20))
    keys = random_keys(4)
    wait_until(lambda: driver.write(keys, [5000] * 4) == [OK] * 4, 10, "its segment is known")
    driver.check(keys, [5000] * 4)


# What the store promises.


def test_name_that_nobody_ended_is_not_taken_for_stored(mooncake_store, driver):
    keys = random_keys(2)
    client = mooncake_store.client
    assert client.batch_put_session_start([name_of(keys[0])], [16 + 5000]) == [0]
    assert driver.write(keys, [5000] * 2) == [NO_SPACE, OK]
    assert driver.exist(keys) == [ABSENT, OK]
    assert driver.read(keys, [5000] * 2)[0] == [ABSENT, OK]
    client.batch_put_session_revoke([name_of(keys[0])])
    assert driver.write(keys, [5000] * 2) == [OK] * 2
    driver.check(keys, [5000] * 2)
    assert driver.card.stats()["io_errors"] == 0


def test_evicted_value_is_absent(drive):
    with MooncakeStore(default_kv_lease_ttl=2000) as store:  # milliseconds
        driver = drive(mooncake_card(store.address))
        size, written = 262_144, []

        def more_than_fit():
            driver.arena.clear()
            keys = random_keys(16, seed=len(written))
            status = driver.write(keys, [size] * 16)
            assert set(status) <= {OK, NO_SPACE}
            written.append(keys[np.array(status) == OK])
            return sum(map(len, written)) > 80  # of 56 or so

        wait_until(more_than_fit, 30, "leases run out, and the store evicts")
        keys = np.concatenate(written)[::-1]
        there = 0
        for start in range(0, len(keys), 16):
            driver.arena.clear()
            some = keys[start : start + 16]
            status, values = driver.read(some, [size] * len(some))
            assert set(status) <= {OK, ABSENT}
            for key, state, value in zip(some, status, values, strict=True):
                assert state == ABSENT or np.array_equal(value, value_of(key, size))
            there += status.count(OK)
        assert 0 < there < len(keys)


# Dying and coming back.


def test_holder_killed_under_load_answers_all(store, drive):
    driver = drive(mooncake_card(store.address, **FAST))
    size = 100_000
    sizes, keys = [size] * 16, [random_keys(16, seed=i) for i in range(12)]
    reads, tokens = [], []
    for round_ in range(12):
        offsets = [driver.arena.place(size) for _ in sizes[:4]] * 4
        for key, offset in zip(keys[round_][:4], offsets, strict=False):
            driver.arena.at(offset, size)[:] = value_of(key, size)
        tokens.append(driver.start(Op.WRITE, keys[round_][:4], offsets[:4], sizes[:4]))
        driver.wait(tokens[-1]) if round_ < 2 else None
        places = [driver.arena.place(size) for _ in range(4)]
        reads.append((driver.start(Op.READ, keys[0][:4], places, sizes[:4]), places))
        if round_ == 3:
            store.kill_holder()
    statuses = [driver.wait(token, 40).tolist() for token in tokens]
    assert statuses[0] == [OK] * 4
    assert {s for status in statuses for s in status} <= {OK, IO_ERROR, NO_SPACE}
    for token, places in reads:
        for key, place, state in zip(keys[0], places, driver.wait(token, 40), strict=False):
            assert state in {OK, IO_ERROR, ABSENT}
            if state == OK:
                assert np.array_equal(driver.arena.at(place, size), value_of(key, size))
    store.start_holder()
    # The first values lay in the memory of a process that is gone.
    wait_until(lambda: driver.exist(keys[0][:4]) == [ABSENT] * 4, 20, "the master noticed")
    driver.arena.clear()
    wait_until(lambda: driver.write(keys[0][:4], sizes[:4]) == [OK] * 4, 20, "it stores again")
    driver.check(keys[0][:4], sizes[:4])


def test_master_that_comes_back_is_found_again(store, drive, caplog):
    driver = drive(mooncake_card(store.address, **FAST))
    keys = random_keys(4)
    assert driver.write(keys, [5000] * 4) == [OK] * 4
    store.kill_master()
    assert driver.exist(keys) == [IO_ERROR] * 4
    assert driver.read(keys, [5000] * 4)[0] == [IO_ERROR] * 4
    assert driver.delete(keys) == [IO_ERROR] * 4
    assert driver.card.stats()["masters_lost"] == 1
    assert f"master {store.address}: EXIST failed for 4 of 4 entries" in caplog.text
    store.start_master()
    wait_until(lambda: driver.exist(keys) == [ABSENT] * 4, 20, "the master answers")
    assert driver.read(keys, [5000] * 4)[0] == [ABSENT] * 4
    driver.arena.clear()
    wait_until(lambda: driver.write(keys, [5000] * 4) == [OK] * 4, 20, "the holder joined it")
    driver.check(keys, [5000] * 4)


def test_gone_master_is_asked_once_and_left_alone(store, drive, monkeypatch):
    driver = drive(mooncake_card(store.address, **(FAST | {"reconnect_s": 60})))
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    store.kill_master()
    asked = calls_of(monkeypatch, "exist")
    for _ in range(20):
        assert driver.exist(keys) == [IO_ERROR] * 2
    assert len(asked) == 1


def test_silent_holder_fails_and_writes_nothing_later(store, drive):
    driver = drive(mooncake_card(store.address, **FAST))
    keys, size = random_keys(4), 200_000
    driver.card.register(driver.arena.base, driver.arena.num_bytes)
    driver.write(keys, [size] * 4)
    offsets = [driver.arena.place(size) for _ in keys]
    store.signal(store.holder, signal.SIGSTOP)
    token = driver.start(Op.READ, keys, offsets, [size] * 4)
    assert driver.wait(token, 12).tolist() == [IO_ERROR] * 4
    driver.arena.bytes[:] = 0x77  # ours again: nothing may land here any more
    store.signal(store.holder, signal.SIGCONT)
    again = random_keys(4, seed=1)
    source = [driver.arena.place(size)] * 4
    wait_until(
        lambda: driver.run(Op.WRITE, again, source, [size] * 4) == [OK] * 4, 20, "it is back"
    )
    assert (driver.arena.bytes == 0x77).all()


def test_silent_master_fails_by_the_deadline(store, drive):
    driver = drive(mooncake_card(store.address, **FAST))
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    store.signal(store.master, signal.SIGSTOP)
    assert driver.exist(keys) == [IO_ERROR] * 2
    store.signal(store.master, signal.SIGCONT)
    wait_until(lambda: IO_ERROR not in driver.exist(keys), 20, "the master answers")


def test_close_beside_a_silent_master_answers_all(store):
    driver = Driver(mooncake_card(store.address, close_timeout_s=0.1, io_timeout_s=1.0))
    keys = random_keys(40)
    store.signal(store.master, signal.SIGSTOP)
    tokens = [driver.start(Op.EXIST, keys) for _ in range(4)]
    driver.close()
    assert set(tokens) == set(driver.answers)
    assert all((status == IO_ERROR).all() for status, _ in driver.answers.values())


def test_close_asks_nothing_more_of_the_engine(mooncake_store, monkeypatch):
    driver = Driver(mooncake_card(mooncake_store.address, threads=1, close_timeout_s=0.1))
    keys, go, asked, inner = random_keys(2), threading.Event(), [], Engine.exist

    def slow(self, names):
        asked.append(names)
        assert go.wait(20)
        return inner(self, names)

    monkeypatch.setattr(Engine, "exist", slow)
    tokens = [driver.start(Op.EXIST, keys) for _ in range(5)]
    wait_until(lambda: asked, 5, "the first is under way")
    (lanes,) = driver.card._lanes
    closing = threading.Thread(target=driver.close)
    closing.start()
    wait_until(lambda: lanes._stopping, 5, "close() has given up waiting")
    go.set()
    closing.join(20)
    assert not closing.is_alive()
    assert len(asked) == 1
    answers = [driver.wait(token).tolist() for token in tokens]
    assert answers == [[ABSENT] * 2] + [[IO_ERROR] * 2] * 4


def test_failure_is_said_once_until_it_is_over(driver, monkeypatch, caplog):
    keys = random_keys(2)
    for times in (1, 2):
        with monkeypatch.context() as broken:
            broken.setattr(Engine, "exist", lambda *_: np.full(2, -1, dtype=np.int64))
            for _ in range(5):
                assert driver.exist(keys) == [IO_ERROR] * 2
        said = [r for r in caplog.records if "EXIST failed for 2 of 2" in r.getMessage()]
        assert [r.levelname for r in said].count("WARNING") == times
        assert driver.exist(keys) == [ABSENT] * 2


def test_engine_that_throws_fails_its_part_alone(driver, monkeypatch, caplog):
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    with monkeypatch.context() as broken:
        broken.setattr(Engine, "get", lambda *_: 1 / 0)
        assert driver.read(keys, [5000] * 2)[0] == [IO_ERROR] * 2
    assert "ZeroDivisionError" in caplog.text
    driver.check(keys, [5000] * 2)


# Opening.


def refused(message, **settings):
    card = mooncake_card(*settings.pop("masters", ["127.0.0.1:1"]), **settings)
    with pytest.raises(CardError, match=message):
        card.open(lambda *_: None)
    card.close()


def test_closed_port_is_a_clear_error():
    master = f"127.0.0.1:{free_port()}"
    refused(f"masters: {master}.*[Rr]efused.*mooncake_master running", masters=[master])


def test_unknown_host_is_a_clear_error():
    refused(r"masters: nowhere\.invalid:1: .*is mooncake_master", masters=["nowhere.invalid:1"])


def test_missing_wheel_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    refused(r"mooncake-transfer-engine-non-cuda is missing: pip install 'adp-kv\[mooncake\]'")


def test_missing_library_is_a_clear_error(monkeypatch):
    def fails(_):
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    refused(r"libibverbs\.so\.1: cannot.*apt-get install libibverbs1 libnuma1 libcurl4")


def test_wheel_that_is_too_old_is_a_clear_error(monkeypatch):
    old = types.SimpleNamespace(MooncakeDistributedStore=types.SimpleNamespace(batch_remove=None))
    monkeypatch.setitem(sys.modules, "mooncake.store", old)
    refused(r"no batch_put_from_multi_buffers: pip install.*>=0\.3\.13")


def test_rdma_without_device_is_a_clear_error(mooncake_store, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_module, "_RDMA_DEVICES", tmp_path)
    refused("protocol: rdma.*take tcp", masters=[mooncake_store.address], protocol="rdma")


def test_engine_that_does_not_start_is_a_clear_error(mooncake_store):
    refused(
        "did not start.*metadata_server.*MC_LOG_LEVEL=INFO",
        masters=[mooncake_store.address],
        metadata_server=f"http://127.0.0.1:{free_port()}/metadata",
    )


def test_second_master_that_is_gone_closes_the_first(mooncake_store, monkeypatch):
    closed = calls_of(monkeypatch, "close")
    refused("[Rr]efused", masters=[mooncake_store.address, f"127.0.0.1:{free_port()}"])
    assert len(closed) == 1


def test_masters_of_each_kind_parse():
    one = parse_master("store.example:50051?space=a-1")
    assert (one.address, one.host, one.port, one.space) == (
        "store.example:50051", "store.example", 50051, "a-1",
    )  # fmt: skip
    six = parse_master("[::1]:50051")
    assert (six.address, six.host, six.space) == ("[::1]:50051", "::1", "")

"""The Valkey card against a real server that dies, fills up, refuses and forgets."""

import signal
import time

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards.base import Op, Status
from gateway.cards.resp.connection import SHORT_READ, Reader
from gateway.cards.resp.settings import parse_endpoint
from tests.support.cards import Driver, random_keys, resp_card, value_of
from tests.support.process import free_port
from tests.support.valkey import ValkeyServer

OK, ABSENT, CORRUPT, IO_ERROR = Status.OK, Status.ABSENT, Status.CORRUPT, Status.IO_ERROR
FAST = {"reconnect_s": 0.05, "connect_timeout_s": 2.0}


@pytest.fixture
def server():
    """A server of the test's own, for harm."""
    with ValkeyServer() as made:
        yield made


@pytest.fixture
def driver(valkey, drive):
    return drive(resp_card(valkey.unix))


def name_of(key, prefix=b"adp:"):
    return prefix + key.tobytes()


def wait_until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Damage.


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda v: bytes([v[0] ^ 1]) + v[1:], id="checksum"),
        pytest.param(lambda v: v[:12] + b"\x02" + v[13:], id="version"),
        pytest.param(lambda v: v[:-1] + bytes([v[-1] ^ 0x80]), id="last-byte"),
        pytest.param(lambda v: v[:-1], id="short"),
        pytest.param(lambda v: v + b"x", id="long"),
        pytest.param(lambda v: b"\0" * len(v), id="zeros"),
        pytest.param(lambda v: v[:8], id="tiny"),
        pytest.param(lambda _: b"", id="empty"),
    ],
)
def test_damaged_value_is_corrupt_and_deleted(valkey, driver, change):
    keys, sizes = random_keys(3), [5000, 100_000, 5000]
    driver.write(keys, sizes)
    name = name_of(keys[1])
    valkey.client.set(name, change(valkey.client.get(name)))
    status, values = driver.read(keys, sizes)
    assert status == [OK, CORRUPT, OK]
    for i in (0, 2):  # the replies behind it are in step
        assert np.array_equal(values[i], value_of(keys[i], sizes[i]))
    assert valkey.client.exists(name) == 0
    assert driver.card.stats()["corrupt"] == 1
    assert driver.card.stats()["values"] == 2
    driver.check(keys[[0, 2]], [5000, 5000])


def test_value_of_another_key_is_corrupt(valkey, driver):
    keys = random_keys(2)
    driver.write(keys, [5000, 5000])
    valkey.client.copy(name_of(keys[0]), name_of(keys[1]), replace=True)
    assert driver.read(keys, [5000, 5000])[0] == [OK, CORRUPT]


def test_key_of_another_type_is_an_error(valkey, driver, caplog):
    keys = random_keys(2)
    driver.write(keys, [5000, 5000])
    valkey.client.delete(name_of(keys[0]))
    valkey.client.rpush(name_of(keys[0]), b"x")
    assert driver.read(keys, [5000, 5000])[0] == [IO_ERROR, OK]
    assert "WRONGTYPE" in caplog.text


def test_keys_of_others_are_left_alone(valkey, drive):
    one, two = drive(resp_card(valkey.unix)), drive(resp_card(valkey.tcp, key_prefix="b/"))
    keys = random_keys(2)
    one.write(keys, [5000] * 2)
    assert two.exist(keys) == [ABSENT] * 2
    two.write(keys, [100] * 2)
    assert two.delete(keys) == [OK] * 2
    one.check(keys, [5000] * 2)
    assert valkey.client.dbsize() == 2


# What the server promises.


def test_ttl_is_set_on_values_and_markers(valkey, drive):
    keys = random_keys(2)
    driver = drive(resp_card(valkey.unix, ttl_s=90.5))
    assert driver.write(keys, [5000, 0]) == [OK] * 2
    driver.check(keys, [5000, 0])
    for key in keys:
        assert 80_000 < valkey.client.pttl(name_of(key)) <= 90_500
    forever = drive(resp_card(valkey.unix))
    assert forever.write(keys, [5000, 0]) == [OK] * 2
    assert [valkey.client.ttl(name_of(key)) for key in keys] == [-1, -1]


def test_expired_value_is_absent(valkey, driver):
    keys = random_keys(2)
    driver.write(keys, [5000, 5000])
    valkey.client.pexpire(name_of(keys[0]), 1)
    time.sleep(0.05)
    assert driver.exist(keys) == [ABSENT, OK]
    assert driver.read(keys, [5000, 5000])[0] == [ABSENT, OK]


def test_full_server_says_so_until_it_has_room(server, drive):
    driver = drive(resp_card(server.unix))
    keys = random_keys(8)
    server.client.config_set("maxmemory", 1)
    assert driver.write(keys, [5000] * 8) == [Status.NO_SPACE] * 8
    assert driver.exist(keys) == [ABSENT] * 8
    server.client.config_set("maxmemory", 0)
    assert driver.write(keys, [5000] * 8) == [OK] * 8
    driver.check(keys, [5000] * 8)
    assert driver.card.stats()["io_errors"] == 0


def test_evicted_value_is_absent(server, drive):
    driver = drive(resp_card(server.unix, connections=1))
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 2_000_000)
    keys = random_keys(30)
    assert driver.write(keys, [200_000] * 30) == [OK] * 30
    there = np.array(driver.exist(keys)) == OK
    assert 1 <= there.sum() < 30
    driver.arena.clear()
    status, values = driver.read(keys, [200_000] * 30)  # what it sends takes memory too
    assert set(status) == {OK, ABSENT}
    for key, state, value in zip(keys, status, values, strict=True):
        assert state == ABSENT or np.array_equal(value, value_of(key, 200_000))


# Dying and coming back.


def test_server_killed_under_load_answers_all(server, drive):
    driver = drive(resp_card(server.unix, **FAST))
    keys, size = random_keys(16), 200_000
    offsets = [driver.arena.place(size) for _ in keys]
    for key, offset in zip(keys, offsets, strict=True):
        driver.arena.at(offset, size)[:] = value_of(key, size)
    sizes = [size] * 16
    tokens = []
    for round_ in range(12):
        tokens.append(driver.start(Op.WRITE, keys, offsets, sizes))
        tokens.append(driver.start(Op.EXIST, keys))
        if round_ == 3:
            driver.wait(tokens[0])
            server.kill9()
    statuses = [driver.wait(token).tolist() for token in tokens]
    assert statuses[0] == [OK] * 16
    assert IO_ERROR in statuses[-1]
    assert {s for status in statuses for s in status} <= {OK, ABSENT, IO_ERROR}
    assert driver.card.stats()["io_errors"] > 0
    assert driver.card.stats()["connections_lost"] > 0
    server.start()
    time.sleep(2 * FAST["reconnect_s"])
    assert driver.exist(keys) == [ABSENT] * 16  # it keeps nothing over a restart
    assert driver.run(Op.WRITE, keys, offsets, sizes) == [OK] * 16
    for key, offset in zip(keys, offsets, strict=True):
        driver.arena.at(offset, size)[:] = 0
        assert driver.run(Op.READ, key[None], [offset], [size]) == [OK]
        assert np.array_equal(driver.arena.at(offset, size), value_of(key, size))


def test_restart_while_idle_costs_no_entry(server, drive):
    driver = drive(resp_card(server.unix, connections=1, **FAST))
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    server.kill9()
    server.start()
    assert driver.write(keys, [5000] * 2) == [OK] * 2
    driver.check(keys, [5000] * 2)


def test_gone_server_fails_at_once_and_says_it_once(server, drive, caplog):
    driver = drive(resp_card(server.tcp, connections=1, reconnect_s=30))
    keys = random_keys(2)
    server.kill9()
    for _ in range(5):
        assert driver.exist(keys) == [IO_ERROR] * 2
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert server.tcp in warnings[0].getMessage()


def test_silent_server_fails_by_the_deadline(server, drive):
    driver = drive(resp_card(server.unix, io_timeout_s=0.4, **FAST))
    keys, size = random_keys(4), 200_000
    driver.write(keys, [size] * 4)
    offsets = [driver.arena.place(size) for _ in keys]
    server.signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert driver.run(Op.READ, keys, offsets, [size] * 4) == [IO_ERROR] * 4
    assert time.monotonic() - begun < 5
    driver.arena.bytes[:] = 0x77  # ours again: nothing may land here any more
    server.signal(signal.SIGCONT)
    wait_until(lambda: driver.exist(keys) == [OK] * 4)
    time.sleep(0.1)
    assert (driver.arena.bytes == 0x77).all()


def test_late_replies_answer_nobody_else(server, drive):
    driver = drive(resp_card(server.unix, connections=1, io_timeout_s=0.4, **FAST))
    keys = random_keys(8)
    driver.write(keys[:4], [100] * 4)
    server.signal(signal.SIGSTOP)
    assert driver.exist(keys[:4]) == [IO_ERROR] * 4
    token = driver.start(Op.EXIST, keys[4:])
    time.sleep(0.1)
    server.signal(signal.SIGCONT)
    assert driver.wait(token).tolist() == [ABSENT] * 4


def test_close_beside_a_silent_server_is_short(server):
    driver = Driver(resp_card(server.unix, close_timeout_s=0.1, io_timeout_s=60))
    keys = random_keys(40)
    server.signal(signal.SIGSTOP)
    tokens = [driver.start(Op.EXIST, keys) for _ in range(4)]
    begun = time.monotonic()
    driver.close()
    assert time.monotonic() - begun < 5
    assert set(tokens) == set(driver.answers)
    assert all((status == IO_ERROR).all() for status, _ in driver.answers.values())


# Opening.


def test_closed_port_is_a_clear_error():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(CardError, match=f"{endpoint}.*[Rr]efused.*server running"):
        resp_card(endpoint).open(lambda *_: None)


def test_missing_socket_is_a_clear_error(tmp_path):
    with pytest.raises(CardError, match=r"No such file.*server running"):
        resp_card(f"unix://{tmp_path}/none").open(lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "login", "message"),
    [
        pytest.param({"requirepass": "s3"}, {}, "NOAUTH.*set password", id="none"),
        pytest.param({"requirepass": "s3"}, {"password": "x"}, "WRONGPASS.*wrong", id="wrong"),
        pytest.param({}, {"password": "x"}, "AUTH.*set none", id="not-wanted"),
    ],
)
def test_wrong_login_is_a_clear_error(settings, login, message):
    with ValkeyServer(**settings) as server:
        card = resp_card(server.tcp, **login)
        with pytest.raises(CardError, match=message):
            card.open(lambda *_: None)
        card.close()


def test_login_by_password_file_and_user(tmp_path, drive):
    secret = tmp_path / "secret"
    secret.write_text("s3\n")
    with ValkeyServer(requirepass="s3") as server:
        keys = random_keys(1)
        drive(resp_card(server.tcp, password_file=str(secret))).write(keys, [10])
        server.client.acl_setuser(
            "kv",
            enabled=True,
            passwords=["+pw"],
            keys=["adp:*"],
            commands=["+get", "+set", "+del", "+exists", "+dbsize", "+select", "+ping"],
        )
        user = Driver(resp_card(server.unix, username="kv", password="pw"))
        user.check(keys, [10])
        assert user.delete(keys) == [OK]
        user.close()
    with pytest.raises(CardError, match=r"password_file.*No such file"):
        resp_card("tcp://127.0.0.1:1", password_file=str(tmp_path / "x")).open(lambda *_: None)


def test_database_that_is_not_there_is_refused(valkey):
    with pytest.raises(CardError, match=r"lower \?db="):
        resp_card(valkey.unix, f"{valkey.unix}?db=4000").open(lambda *_: None)
    # The first endpoint's connections are closed again; only the test's own is left.
    wait_until(lambda: len(valkey.client.client_list()) <= 1)


def test_values_land_in_place(valkey, driver, monkeypatch):
    """At most the bytes that came with a reply's first line are copied."""
    copied, into = [], Reader.into

    def spy(reader, target):
        copied.append(len(reader._buffer))
        return into(reader, target)

    keys, size = random_keys(8), 200_000
    driver.write(keys, [size] * 8)
    monkeypatch.setattr(Reader, "into", spy)
    driver.check(keys, [size] * 8)
    assert len(copied) >= 8
    assert max(copied) <= SHORT_READ


def test_endpoints_of_both_kinds_parse():
    tcp = parse_endpoint("tcp://[::1]:6379?db=3")
    assert (tcp.host, tcp.port, tcp.db) == ("::1", 6379, 3)
    unix = parse_endpoint("unix:///run/valkey.sock?db=1")
    assert (unix.host, unix.path, unix.db) == (None, "/run/valkey.sock", 1)

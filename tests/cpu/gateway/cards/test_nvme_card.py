"""What the NVMe card makes of its devices' answers, and of damage."""

import errno
import threading

import numpy as np
import pytest

from gateway.cards.base import Op, Status
from gateway.cards.nvme.frames import FramePool
from tests.support.cards import Driver, nvme_card, nvme_host, random_keys
from tests.support.nvme_device import DELETE, EXIST, RETRIEVE, STORE

OK, ABSENT, CORRUPT, IO_ERROR = Status.OK, Status.ABSENT, Status.CORRUPT, Status.IO_ERROR
SIZES = [0, 1, 2, 3, 4, 4080, 4095, 4096, 4097, 131072, 258048, 262143]


@pytest.fixture(params=["standard", "block"])
def dialect(request):
    return request.param


@pytest.fixture(params=["io_uring", "ioctl"])
def host(request, dialect):
    made = nvme_host(dialect)
    made.engine = request.param
    return made


@pytest.fixture
def device(host):
    return host.devices["/dev/ng0n1"]


@pytest.fixture
def driver(host, drive):
    return drive(nvme_card(host, io_engine=host.engine))


def test_no_value_is_copied_on_the_way(driver, device):
    keys = random_keys(len(SIZES))
    assert driver.write(keys, SIZES) == [OK] * len(SIZES)
    driver.check(keys, SIZES)
    assert driver.card.engine_name
    assert len(device.commands) >= 2 * len(SIZES)
    assert device.bounced == 0


def test_other_gateway_reads_what_one_wrote(host, driver, drive):
    keys = random_keys(len(SIZES))
    driver.write(keys, SIZES)
    other = drive(nvme_card(host, io_engine=host.engine))
    other.check(keys, SIZES)
    assert other.exist(keys) == [OK] * len(SIZES)


@pytest.mark.parametrize("offset", [0, 7, 8, 12, 13, 14, 16, 16 + 4999])
def test_flipped_bit_is_corrupt_and_deleted(driver, device, offset):
    keys = random_keys(2)
    driver.write(keys, [5000, 5000])
    device.damage(offset)
    status, _ = driver.read(keys, [5000, 5000])
    # Another key byte 11 means another key: the entry is not this one's to delete.
    assert status == [ABSENT if offset == 12 else CORRUPT] * 2
    if offset != 12:
        assert device.values == {}
        assert driver.exist(keys) == [ABSENT] * 2
        assert driver.card.stats()["corrupt"] == 2


def test_torn_value_is_corrupt(driver, device):
    keys = random_keys(1)
    driver.write(keys, [9000])
    (name,) = device.values
    device.values[name] = device.values[name][:4096]
    assert driver.read(keys, [9000])[0] == [CORRUPT]


def test_device_that_moves_nothing_is_corrupt(driver, device):
    keys = random_keys(3)
    driver.write(keys, [5000, 5000, 0])
    driver.check(keys, [5000, 5000, 0])  # frames hold good headers now
    device.lies = True
    status, _ = driver.read(keys, [5000, 5000, 0])
    assert status == [CORRUPT] * 3


def test_value_of_another_key_is_corrupt(driver, device):
    keys = random_keys(2)
    keys[1, 1] = keys[0, 1]  # the same key byte 11
    driver.write(keys, [5000, 5000])
    first, second = device.values
    device.values[first], device.values[second] = device.values[second], device.values[first]
    assert driver.read(keys, [5000, 5000])[0] == [CORRUPT] * 2


def test_keys_apart_in_byte_11_never_mix(driver, dialect):
    keys = random_keys(1).repeat(2, axis=0)
    keys[1, 1] ^= np.uint64(1 << 24)
    assert driver.write(keys[:1], [5000]) == [OK]
    assert driver.exist(keys) == [OK, ABSENT]
    assert driver.delete(keys[1:]) == [ABSENT]
    assert driver.write(keys[1:], [5000]) == [OK]
    driver.check(keys[1:], [5000])
    status, _ = driver.read(keys[:1], [5000])
    assert status == [OK if dialect == "standard" else ABSENT]
    assert driver.exist(keys) == [status[0], OK]


@pytest.mark.parametrize(
    ("op", "opcode", "result", "status"),
    [
        pytest.param(Op.WRITE, STORE, 0x4081, Status.NO_SPACE, id="capacity"),
        pytest.param(Op.WRITE, STORE, 0x4085, Status.TOO_LARGE, id="value-size"),
        pytest.param(Op.WRITE, STORE, 0x4086, IO_ERROR, id="key-size"),
        pytest.param(Op.WRITE, STORE, 0x88, IO_ERROR, id="store-unrecovered"),
        pytest.param(Op.WRITE, STORE, 0x371, IO_ERROR, id="aborted"),
        pytest.param(Op.WRITE, STORE, -errno.EINVAL, IO_ERROR, id="kernel"),
        pytest.param(Op.READ, RETRIEVE, 0x87, ABSENT, id="absent"),
        pytest.param(Op.READ, RETRIEVE, 0x4088, CORRUPT, id="unrecovered"),
        pytest.param(Op.READ, RETRIEVE, 0x281, CORRUPT, id="media"),
        pytest.param(Op.READ, RETRIEVE, 0x06, IO_ERROR, id="internal"),
        pytest.param(Op.READ, RETRIEVE, -errno.ENODEV, IO_ERROR, id="gone"),
        pytest.param(Op.DELETE, DELETE, 0x06, IO_ERROR, id="delete"),
    ],
)
def test_result_concerns_its_entry_alone(driver, device, op, opcode, result, status):
    keys = random_keys(5)
    sizes = [3000] * 5
    if op is not Op.WRITE:
        driver.write(keys, sizes)
    device.fail(opcode, result)
    if op is Op.READ:
        found = driver.read(keys, sizes)[0]
    else:
        found = driver.write(keys, sizes) if op is Op.WRITE else driver.delete(keys)
    assert sorted(found) == sorted([status] + [OK] * 4)
    failing = status in (IO_ERROR, CORRUPT, Status.TOO_LARGE)
    assert driver.card.stats()["io_errors"] == failing
    if op is Op.WRITE:
        stored = np.array(found) == OK
        driver.check(keys[stored], [3000] * 4)


def test_lost_value_is_deleted_and_writable(driver, device):
    keys = random_keys(1)
    driver.write(keys, [3000])
    device.fail(RETRIEVE, 0x88)
    assert driver.read(keys, [3000])[0] == [CORRUPT]
    assert driver.exist(keys) == [ABSENT]
    assert driver.write(keys, [3000], version=1) == [OK]
    driver.check(keys, [3000], version=1)


def test_failed_question_is_no_answer(driver, device, dialect):
    keys = random_keys(2)
    driver.write(keys, [0, 0])
    device.fail(EXIST if dialect == "standard" else RETRIEVE, 0x06, count=2)
    assert driver.exist(keys) == [IO_ERROR] * 2
    assert driver.exist(keys) == [OK] * 2


def test_delete_of_absent_is_absent_either_way(driver, device):
    keys = random_keys(2)
    driver.write(keys[:1], [10])
    for device.fails_absent_delete in (True, False):
        assert driver.delete(keys[1:]) == [ABSENT]
    assert driver.delete(keys) == [OK, ABSENT]


def test_refused_short_buffer_is_no_failure(driver, device):
    device.refuses_short_buffers = True
    keys = random_keys(3)
    driver.write(keys, [9000] * 3)
    assert driver.exist(keys) == [OK] * 3
    assert driver.delete(keys[:1]) == [OK]
    assert driver.read(keys[1:], [100, 9000])[0] == [CORRUPT, OK]
    assert driver.exist(keys) == [ABSENT, ABSENT, OK]


def test_immutable_keys_store_once(driver, device):
    keys = random_keys(3)
    driver.write(keys, [1000] * 3)
    stores = [option for opcode, _, option in device.commands if opcode == STORE]
    assert stores == [2] * 3


def test_read_amid_replacement_finds_a_version(drive):
    """In the block dialect the key is absent between two commands of a replacement."""
    host = nvme_host("block")
    driver = drive(nvme_card(host, io_engine="ioctl"))
    (device,) = host.devices.values()
    keys = random_keys(1)
    driver.write(keys, [5000])
    between, go_on, deleted = threading.Event(), threading.Event(), threading.Event()

    def before(opcode, _key):
        if opcode == DELETE:
            deleted.set()
        if opcode == STORE and deleted.is_set():
            between.set()
            assert go_on.wait(10)

    device.before = before
    source = driver.arena.place(5000)
    driver.arena.at(source, 5000)[:] = 7
    write = driver.start(Op.WRITE, keys, [source], [5000])
    assert between.wait(10)
    asked = len(device.commands)
    target = driver.arena.place(5000)
    read = driver.start(Op.READ, keys, [target], [5000])
    exist = driver.start(Op.EXIST, keys)
    while len(device.commands) < asked + 2:
        assert not go_on.wait(0.01)
    assert not {read, exist} & set(driver.answers)
    go_on.set()
    assert driver.wait(write).tolist() == [OK]
    assert driver.wait(exist).tolist() == [OK]
    assert driver.wait(read).tolist() == [OK]
    assert (driver.arena.at(target, 5000) == 7).all()


def test_batch_of_many_parts_is_answered(driver, device):
    device.slots = 1000
    keys = random_keys(1000)
    nowhere = [0] * 1000
    assert driver.run(Op.WRITE, keys, nowhere, nowhere) == [OK] * 1000
    assert driver.exist(keys) == [OK] * 1000
    assert driver.card.stats()["values"] == 1000


def test_frames_are_shared_in_order():
    pool, got = FramePool(1, 4), []
    for name in "abc":
        pool.take(lambda frame, name=name: got.append((name, frame)))
    assert [name for name, _ in got] == ["a"]
    pool.give_back(got[0][1])
    assert [name for name, _ in got] == ["a", "b"]
    pool.abandon()
    assert got[2] == ("c", None)
    pool.give_back(got[1][1])
    assert len(got) == 3


def test_close_answers_what_never_began(dialect):
    host = nvme_host(dialect)
    card = nvme_card(host, io_engine="ioctl", io_threads=1, close_timeout_s=0)
    driver = Driver(card)
    (device,) = host.devices.values()
    device.delay_s = 0.05
    keys = random_keys(1000)
    tokens = [driver.start(op, keys) for op in (Op.EXIST, Op.DELETE)]
    driver.close()
    assert set(tokens) == set(driver.answers)
    assert IO_ERROR in driver.answers[tokens[1]][0]
    assert host.open_fds == {}


def test_command_in_flight_keeps_the_device(dialect, caplog, monkeypatch):
    monkeypatch.setattr("gateway.cards.nvme.card._STOP_TIMEOUT_S", 0.1)
    host = nvme_host(dialect)
    driver = Driver(nvme_card(host, io_engine="ioctl", close_timeout_s=0))
    (device,) = host.devices.values()
    begun, held = threading.Event(), threading.Event()
    device.before = lambda *_: (begun.set(), held.wait(10))
    token = driver.start(Op.EXIST, random_keys(1))
    assert begun.wait(10)
    driver.close()
    assert "memory is in use" in caplog.text
    assert len(host.open_fds) == 1
    held.set()
    assert driver.card.stats()["values"] == 0
    assert token  # its answer may come or not: the process is to end


def test_open_counts_the_keys_by_list(drive):
    host = nvme_host("standard")
    (device,) = host.devices.values()
    keys = random_keys(7000)
    device.values = {key.tobytes(): b"" for key in keys}
    assert drive(nvme_card(host)).card.stats()["values"] == 7000
    assert drive(nvme_card(host, count_timeout_s=0)).card.stats()["values"] == 0


def test_stats_tell_the_devices_room(drive, monkeypatch):
    monkeypatch.setattr("gateway.cards.nvme.card._USAGE_INTERVAL_S", 0)
    driver = drive(nvme_card(nvme_host("standard")))
    driver.write(random_keys(2), [1000] * 2)
    assert driver.card.stats()["size_bytes"] == 1 << 30
    driver.exist(random_keys(1))  # behind the refresh in the queue
    driver.exist(random_keys(1))
    assert driver.card.stats()["used_bytes"] == 2 * 1016

"""Which devices the NVMe card takes, with what limits, and what it says of others."""

import errno
import os

import numpy as np
import pytest

from adp_kv.errors import CardError
from gateway.cards.base import Status
from gateway.cards.nvme import check
from gateway.cards.nvme.card import NvmeKvCard
from gateway.cards.nvme.commands import COMMAND
from gateway.cards.nvme.executors import UringExecutor, run_once
from gateway.cards.nvme.host import (
    ADMIN_COMMAND,
    GET_NAMESPACE_ID,
    IO_COMMAND_VEC,
    KernelHost,
    QueueLimits,
)
from gateway.cards.nvme.settings import NvmeKvSettings
from gateway.cards.uring import probe
from tests.support.cards import nvme_card, nvme_host, random_keys
from tests.support.nvme_device import SoftDevice, SoftHost

PATH = "/dev/ng0n1"
needs_uring = pytest.mark.skipif(probe() is not None, reason=f"no io_uring here: {probe()}")


@pytest.mark.parametrize(
    ("dialect", "changes", "limit"),
    [
        pytest.param("standard", {"max_segments": 200}, 512 * 1024 - 4096, id="value-max"),
        pytest.param("standard", {"value_max": 262144 + 16}, 262144, id="value-max-exact"),
        pytest.param("standard", {"value_max": 262144 + 15}, 262144 - 4096, id="header"),
        pytest.param("standard", {"max_transfer": 131072}, 131072 - 4096, id="mdts"),
        pytest.param("standard", {"max_segments": 34}, 131072, id="segments"),
        pytest.param("block", {}, 266240, id="block"),
        pytest.param("block", {"max_transfer": 131072}, 131072 - 4096, id="block-mdts"),
    ],
)
def test_limit_is_the_least_of_all(dialect, changes, limit, drive):
    host = nvme_host(dialect, **changes)
    card = nvme_card(host)
    assert card.limits.max_value_bytes == limit
    assert card.limits.alignment_bytes == 4096
    assert host.open_fds == {}  # asking leaves nothing open
    driver = drive(card)
    keys = random_keys(2)
    assert driver.write(keys, [limit, limit - 1]) == [Status.OK] * 2
    driver.check(keys, [limit, limit - 1])
    assert host.devices[PATH].bounced == 0


def test_limits_without_sysfs_come_from_identify(caplog):
    host = nvme_host("standard", max_transfer=131072)
    host.sysfs = False
    assert nvme_card(host).limits.max_value_bytes == 131072 - 4096
    host.devices[PATH].identify = lambda cns, csi: (
        None if cns == 1 else SoftDevice.identify(host.devices[PATH], cns, csi)
    )
    assert nvme_card(host).limits.max_value_bytes == 131072 - 4096
    assert "longest transfer" in caplog.text


def test_setting_lowers_the_limit():
    assert nvme_card(nvme_host(), max_value_bytes=65536).limits.max_value_bytes == 65536


def test_smaller_of_two_devices_limits_both():
    host = nvme_host(num_databases=2)
    host.devices["/dev/ng1n1"].value_max = 65536 + 16
    limits = nvme_card(host).limits
    assert (limits.max_value_bytes, limits.num_databases) == (65536, 2)


def test_device_that_shrank_is_refused():
    host = nvme_host()
    card = nvme_card(host)
    assert card.limits.max_value_bytes
    host.devices[PATH].value_max = 65536
    with pytest.raises(CardError, match="the device changed"):
        card.open(lambda *_: None)
    assert host.open_fds == {}


def opening(number):
    return lambda host: host.refuses_open.update({PATH: number})


def answering(request, result):
    return lambda host: host.answers.update({request: result})


def device(**changes):
    return lambda host: [setattr(host.devices[PATH], n, v) for n, v in changes.items()]


@pytest.mark.parametrize(
    ("dialect", "spoil", "message"),
    [
        pytest.param("standard", opening(errno.ENOENT), r"Linux 6\.0.*CNS 08h", id="no-node"),
        pytest.param("standard", opening(errno.EACCES), "CAP_SYS_ADMIN", id="mode"),
        pytest.param("standard", opening(errno.EPERM), "CAP_SYS_ADMIN", id="perm"),
        pytest.param("standard", opening(errno.EBUSY), "another program", id="busy"),
        pytest.param(
            "standard",
            answering(GET_NAMESPACE_ID, -errno.ENOTTY),
            "ENOTTY: this is no NVMe namespace",
            id="no-nvme",
        ),
        pytest.param(
            "standard", answering(ADMIN_COMMAND, -errno.EACCES), "CAP_SYS_ADMIN", id="identify"
        ),
        pytest.param(
            "standard", answering(IO_COMMAND_VEC, -errno.EACCES), "CAP_SYS_ADMIN", id="io-perm"
        ),
        pytest.param(
            "standard", answering(IO_COMMAND_VEC, -errno.ENOTTY), r"Linux 5\.18", id="vectored"
        ),
        pytest.param("standard", device(is_kv=False), "no key-value namespace.*block", id="ssd"),
        pytest.param("standard", device(key_max=8), "at most 8 bytes, 16", id="short-keys"),
        pytest.param("standard", device(value_max=4000), "too short", id="short-values"),
        pytest.param("block", device(is_kv=False), "read of blocks.*no key-value", id="block-ssd"),
        pytest.param(
            "block", answering(IO_COMMAND_VEC, 0x4002), "does not know the block", id="dialect"
        ),
    ],
)
def test_unfit_device_is_refused_with_reason(dialect, spoil, message):
    host = nvme_host(dialect)
    spoil(host)
    card = nvme_card(host)
    for attempt in (lambda: card.limits, lambda: card.open(lambda *_: None)):
        with pytest.raises(CardError, match=f"{PATH}.*{message}"):
            attempt()
    assert host.open_fds == {}
    assert all(opcode != 0x01 for opcode, _, _ in host.devices[PATH].commands)


def test_second_unfit_device_closes_the_first():
    host = nvme_host(num_databases=2)
    host.refuses_open["/dev/ng1n1"] = errno.ENOENT
    with pytest.raises(CardError, match="/dev/ng1n1"):
        nvme_card(host).open(lambda *_: None)
    assert host.open_fds == {}


@pytest.mark.parametrize("rings", [errno.EPERM, errno.EINVAL, -errno.EOPNOTSUPP])
def test_missing_passthrough_falls_back_or_says_so(rings, caplog, drive):
    host = nvme_host()
    host.rings = rings
    with pytest.raises(CardError, match="io_engine='io_uring' does not work"):
        nvme_card(host, io_engine="io_uring").open(lambda *_: None)
    assert host.open_fds == {}
    driver = drive(nvme_card(host))
    assert driver.card.engine_name == "ioctl"
    assert "ioctl threads" in caplog.text
    keys = random_keys(2)
    driver.write(keys, [5000] * 2)
    driver.check(keys, [5000] * 2)


def test_kernel_refuses_what_is_no_device(tmp_path):
    """Against the real kernel: a node without NVMe, and none at all."""
    with pytest.raises(CardError, match="ENOTTY"):
        NvmeKvCard(NvmeKvSettings(devices=("/dev/null",))).open(lambda *_: None)
    with pytest.raises(CardError, match="CNS 08h"):
        NvmeKvCard(NvmeKvSettings(devices=(str(tmp_path / "ng0n1"),))).open(lambda *_: None)


@needs_uring
def test_kernel_takes_the_wide_entries():
    """/dev/null swallows commands of io_uring, so entries and completions have Linux' layout."""
    engine = UringExecutor(KernelHost(), 8)
    descriptor = os.open("/dev/null", os.O_RDWR)
    try:
        fds = np.full(50, descriptor, np.int32)
        fds[::5] = -1
        results = run_once(engine, fds, np.zeros(50, COMMAND))
    finally:
        assert engine.stop(5)
        os.close(descriptor)
    assert set(results[::5].tolist()) == {-errno.EBADF}
    assert set(np.delete(results, slice(None, None, 5)).tolist()) <= {0, -errno.EOPNOTSUPP}


def test_queue_limits_are_read_from_sysfs(tmp_path):
    queue = tmp_path / "block" / "nvme3n1" / "queue"
    queue.mkdir(parents=True)
    (queue / "max_hw_sectors_kb").write_text("128\n")
    (queue / "max_segments").write_text("33\n")
    host = KernelHost(tmp_path)
    for node in ("/dev/ng3n1", "/dev/nvme3n1"):
        assert host.queue_limits(node) == QueueLimits(131072, 33)
    assert host.queue_limits("/dev/ng0n1") == QueueLimits(None, None)
    assert host.queue_limits("/dev/null") == QueueLimits(None, None)


def test_host_without_devices_is_empty():
    with pytest.raises(CardError, match="no such node"):
        nvme_card(SoftHost({PATH: SoftDevice()}), devices=("/dev/ng9n1",)).open(lambda *_: None)


@pytest.mark.parametrize("dialect", ["standard", "block"])
def test_check_passes_and_leaves_nothing(dialect, capsys):
    host = nvme_host(dialect)
    assert check.main(["--dialect", dialect, PATH], host) == 0
    out = capsys.readouterr().out
    assert out.count(" ok\n") == 7
    assert host.devices[PATH].values == {}


def test_check_tells_what_is_wrong(capsys):
    host = nvme_host()
    host.devices[PATH].lies = True
    assert check.main([PATH], host) == 1
    assert "retrieve: 16 of 16, first CORRUPT; retrieve: other bytes" in capsys.readouterr().out
    assert check.main(["/dev/ng9n1"], host) == 2
    assert "no such node" in capsys.readouterr().err

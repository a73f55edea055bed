"""Cards that are elsewhere: key-value and block namespaces over NVMe-oF, Valkey by TCP.

A namespace over NVMe-oF is a device node like a local one; what differs is the length of a
transfer, and that two servers can have the same one. The key-value device is software
(tests/support/nvme_device.py), the block device a loop device of the kernel, Valkey a real one.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from gateway.cards.slab_format import DATA_OFFSET, erase
from tests.support.cards import SLOT_BYTES, nvme_card, nvme_host, slab_card
from tests.support.clients import Team, blocks_of, pools
from tests.support.gateways import Gateway
from tests.support.nvme_device import STORE
from tests.support.process import ChildError, wait_until
from tests.support.serving import Serving, random_chunks
from tests.support.valkey import ValkeyServer

KiB = 1024
CHUNKS, BLOCKS = random_chunks(3), blocks_of(0, 2, 4)
PAGES = (98304, 4096)  # two ranks of two pages: objects of 384 and of 16 KiB
RING = {"shared_memory_size": 16 * 4 * 98304}
REMOTE = RING | {"placement": "remote"}
NUM_SLOTS = 64
POISON = 0xA5


def kept(team):
    return [{c.index: pool.pages(c.index, BLOCKS) for c in pool.caches} for pool in team.pools]


def restores(team, number, want):
    """Return whether all chunks come back into pages that held something else."""
    for pool in team.pools:
        pool.clear()
    if any(job.failed_chunks.any() for job in team.restore(number, CHUNKS, BLOCKS)):
        return False
    found = kept(team)
    return all(
        np.array_equal(pages, rank[index])
        for rank, others in zip(found, want, strict=True)
        for index, pages in others.items()
    )


def team_of(address, **how):
    return Team(address, pools(2, sizes=PAGES), timeout_s=15.0, **how)


@pytest.mark.parametrize(
    ("placement", "max_transfer", "fragment_size", "num_fragments"),
    [
        pytest.param("remote", 256 * KiB, 131072, 3, id="remote"),
        pytest.param("remote", 128 * KiB, 126976, 4, id="remote, MDTS of 128 KiB"),
        pytest.param("local", 512 * KiB, 258048, 2, id="local"),
    ],
)
@pytest.mark.parametrize("engine", ["io_uring", "ioctl"])
def test_fragments_fit_the_placement_and_the_device(
    placement, max_transfer, fragment_size, num_fragments, engine
):
    """131072 follows from placement = remote; what the device takes less of lowers it."""
    host = nvme_host(num_databases=2)
    for device in host.devices.values():
        device.max_transfer = max_transfer
        device.slots = NUM_SLOTS
    card = nvme_card(host, io_engine=engine)
    with Serving(card, kind="nvme_kv", placement=placement, **RING) as serving:
        assert serving.server._store.fragment_size == fragment_size
        with team_of(serving.address).start() as team:
            want = kept(team)
            team.save(1, CHUNKS, BLOCKS)
            assert restores(team, 2, want)
    values = [value for device in host.devices.values() for value in device.values.values()]
    assert max(map(len, values)) <= max_transfer
    # A large and a small object a chunk, and its commit record.
    assert len(values) == len(CHUNKS) * (num_fragments + 1 + 1)
    assert all(device.values for device in host.devices.values()), "spread over the databases"


def test_two_servers_share_a_key_value_namespace():
    """Both connect the same namespace: what one stored the other restores, also at once."""
    host = nvme_host()
    (device,) = host.devices.values()
    device.slots = NUM_SLOTS
    with (
        Serving(nvme_card(host), kind="nvme_kv", **REMOTE) as first,
        Serving(nvme_card(host), kind="nvme_kv", **REMOTE) as second,
        team_of(first.address, engine="one").start() as one,
        team_of(second.address, engine="two").start() as two,
    ):
        want = kept(one)
        one.save(1, CHUNKS, BLOCKS)
        assert two.stored(CHUNKS) == [True] * 3
        stores = sum(opcode == STORE for opcode, _, _ in device.commands)
        two.save(1, CHUNKS, BLOCKS)
        assert sum(opcode == STORE for opcode, _, _ in device.commands) == stores
        assert restores(two, 2, want)


def losetup(*arguments):
    return subprocess.run(
        ["losetup", *arguments], capture_output=True, text=True, timeout=20, check=True
    ).stdout.strip()


def why_no_loop_device():
    """Return why this machine lets us make no loop device, None if it does."""
    try:
        losetup("--find")
        Path("/dev/loop-control").open("r+b", buffering=0).close()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


no_loop = why_no_loop_device()
needs_loop = pytest.mark.skipif(no_loop is not None, reason=f"no loop device: {no_loop}")


@pytest.fixture
def loop_devices(tmp_path):
    """Two block devices with one content, zeros: a namespace as two servers see it."""
    file = tmp_path / "device"
    with file.open("wb") as made:
        made.truncate(DATA_OFFSET + NUM_SLOTS * SLOT_BYTES)
    made = []
    try:
        for _ in range(2):
            made.append(losetup("--find", "--show", str(file)))
        yield made
    finally:
        for device in made:
            losetup("--detach", device)


def device_gateway(path, device):
    options = {
        "path": path,
        "devices": device,
        "capacity_bytes": NUM_SLOTS * SLOT_BYTES,
        "lock_wait_s": 0.1,
    }
    return Gateway.serve("slab", options, **REMOTE)


@needs_loop
def test_slab_on_a_block_device(tmp_path, loop_devices):
    """Values on the device, journals in the path; another path does not get round the lock."""
    device, _ = loop_devices
    with device_gateway(tmp_path / "a", device) as gateway:
        assert f"fragment_size {SLOT_BYTES}" in gateway.log()  # the block layer cuts commands
        with team_of(gateway.address).start() as team:
            want = kept(team)
            team.save(1, CHUNKS, BLOCKS)
            assert restores(team, 2, want)
            with pytest.raises(ChildError, match=f"{device}: another process has this card open"):
                device_gateway(tmp_path / "b", device)
        gateway.kill9()
    assert not (tmp_path / "a" / "slab-0000.data").exists()
    with device_gateway(tmp_path / "a", device) as gateway:
        with team_of(gateway.address).start() as team:
            assert restores(team, 1, want)
        gateway.stop()


@needs_loop
def test_two_servers_on_one_block_namespace_miss_and_read_nothing_wrong(tmp_path, loop_devices):
    """The second is refused. Formatted by force, both lose chunks and no more: no lock is seen."""
    one_device, other_device = loop_devices
    with (
        device_gateway(tmp_path / "a", one_device) as a,
        team_of(a.address, engine="one").start() as one,
    ):
        want = kept(one)
        one.save(1, CHUNKS, BLOCKS)
        with pytest.raises(ChildError, match="slab of a card with another path"):
            device_gateway(tmp_path / "b", other_device)
        erase(tmp_path / "b", (str(other_device),))  # as `card format --force` does
        with (
            device_gateway(tmp_path / "b", other_device) as b,
            team_of(b.address, engine="two").start() as two,
        ):
            for number, pool in enumerate(two.pools):
                pool.fill(100 + number)
            assert two.stored(CHUNKS) == [False] * 3
            two.save(1, CHUNKS, BLOCKS)
            for pool in one.pools:
                pool.clear()
            jobs = one.restore(2, CHUNKS, BLOCKS)
            assert all(job.failed_chunks.any() for job in jobs), "overwritten, and found out"
            for pool, pages in zip(one.pools, want, strict=True):
                for index, right in pages.items():
                    rows = zip(pool.pages(index, BLOCKS), right, strict=True)
                    assert all(np.array_equal(p, r) or (p == POISON).all() for p, r in rows)
        a.kill9()
    with pytest.raises(ChildError, match=f"{one_device}: not database 0 of this card"):
        device_gateway(tmp_path / "a", one_device)


def test_slab_on_a_file_that_passes_for_a_block_device(tmp_path, monkeypatch):
    """The same, in this process, where no loop device can be made."""
    monkeypatch.setattr("gateway.cards.slab_store.stat.S_ISBLK", lambda mode: True)
    device = tmp_path / "device"
    device.write_bytes(bytes(DATA_OFFSET + NUM_SLOTS * SLOT_BYTES))
    options = {"devices": (str(device),), "capacity_bytes": NUM_SLOTS * SLOT_BYTES}
    want = None
    for _ in range(2):
        card = slab_card(tmp_path / "a", **options)
        with (
            Serving(card, kind="slab", **REMOTE) as serving,
            team_of(serving.address).start() as team,
        ):
            assert serving.server._store.fragment_size == SLOT_BYTES
            if want is None:
                want = kept(team)
                team.save(1, CHUNKS, BLOCKS)
            assert restores(team, 2, want)


def test_valkey_elsewhere_goes_and_comes_back_empty():
    """Misses while it is gone, nobody turns off; what is saved later is found."""
    with ValkeyServer() as valkey:
        options = {"endpoints": valkey.tcp, "reconnect_s": 0.1}
        with (
            Gateway.serve("resp", options, quarantine_s=0.2, **REMOTE) as gateway,
            team_of(gateway.address).start() as team,
        ):
            assert "fragment_size 131072" in gateway.log()
            want = kept(team)
            team.save(1, CHUNKS, BLOCKS)
            assert restores(team, 2, want)
            valkey.kill9()
            assert team.stored(CHUNKS) == [False] * 3
            assert not restores(team, 3, want)
            valkey.start()
            assert team.stored(CHUNKS) == [False] * 3, "it keeps nothing by itself"
            for pool, pages in zip(team.pools, want, strict=True):
                for index, right in pages.items():
                    pool.memory[index][BLOCKS.reshape(-1), : right.shape[1]] = right
            numbers = iter(range(4, 1000))

            def saved():
                team.submit_saves(jobs := team.jobs(next(numbers), CHUNKS, BLOCKS))
                wait_until(lambda: all(job.finished for job in jobs), 5, "the save has ended")
                return all(team.stored(CHUNKS))

            wait_until(saved, 20, "stored again")
            assert restores(team, 1001, want)
            assert not any(client.off for client in team.clients)

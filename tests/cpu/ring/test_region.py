"""The ring file: reserve, publish, attach, and what a kill leaves."""

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from adp_kv.errors import RingError
from adp_kv.ring import region
from adp_kv.ring.region import RingFile, attach, ring_path, sweep
from tests.support.gateways import own_name
from tests.support.process import REPO, SHM, mapped_inodes, wait_until

SIZE = 16 * 4096
_numbers = itertools.count()


@pytest.fixture
def name():
    return own_name(f"test-ring-{os.getpid()}-{next(_numbers)}")


def published(name, io_size=4096):
    ring = RingFile(name, SIZE)
    ring.divide(io_size)
    ring.publish()
    return ring


def test_ring_has_no_name_until_published(name):
    path = ring_path(name)
    with RingFile(name, SIZE) as ring:
        assert not path.exists()
        mapping = ring.divide(4096)
        assert not path.exists()
        ring.publish()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size == mapping.num_bytes == SIZE + 4096
        ring.withdraw()
        assert not path.exists()
        ring.withdraw()
    ring.close()
    assert ring.mapping is None


def test_attached_ring_is_the_same_memory(name):
    with published(name) as ring:
        theirs = attach(str(ring.path), ring.generation)
        ring.withdraw()
        theirs.data[4096:8192] = 7
        assert (ring.mapping.data[4096:8192] == 7).all()
        slots = np.array([0, 7], dtype=np.uint32)
        for ours, other in (
            (ring.mapping.read_addresses(slots), theirs.read_addresses(slots)),
            (ring.mapping.write_addresses(slots), theirs.write_addresses(slots)),
        ):
            assert (ours - ring.mapping.address).tolist() == (other - theirs.address).tolist()
        assert theirs.read_addresses(slots).tolist() == [
            theirs.address + 4096,
            theirs.address + 8 * 4096,
        ]
        assert int(theirs.write_addresses(slots)[1]) == theirs.address + 16 * 4096
        for addresses in (theirs.read_addresses, theirs.write_addresses):
            with pytest.raises(RingError, match="slot 8 is outside"):
                addresses(np.array([1, 8], dtype=np.uint32))
    theirs.data[:] = 1  # the gateway's side is gone, this one lives on
    theirs.close()
    theirs.close()
    with pytest.raises(RingError, match="closed"):
        _ = theirs.data


def test_full_shm_names_what_is_needed(name, monkeypatch):
    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(region.os, "statvfs", lambda _path: Full)
    with pytest.raises(RingError, match=rf"{SIZE + 4096} bytes.*shared_memory_size.*--shm-size"):
        RingFile(name, SIZE)


def open_files():
    return set(Path("/proc/self/fd").iterdir())


def test_shm_that_fills_up_meanwhile_is_an_error(name, monkeypatch):
    def full(_fd, _offset, _length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(region.os, "posix_fallocate", full)
    before = open_files()
    with pytest.raises(RingError, match=f"{SIZE + 4096} bytes"):
        RingFile(name, SIZE)
    assert open_files() == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EOPNOTSUPP, errno.EMFILE])
def test_folder_that_takes_no_file_is_an_error(name, monkeypatch, number):
    def refuse(*_args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(region.os, "open", refuse)
    with pytest.raises(RingError, match=os.strerror(number)):
        RingFile(name, SIZE)


def test_missing_folder_is_an_error(name, tmp_path):
    with pytest.raises(RingError, match="mount a tmpfs"):
        RingFile(name, SIZE, tmp_path / "nothing")


def test_objects_too_large_leave_nothing(name):
    with RingFile(name, SIZE) as ring, pytest.raises(RingError, match="at least"):
        ring.divide(SIZE)
    assert not ring_path(name).exists()


def test_other_generation_is_refused(name):
    with published(name) as ring, pytest.raises(RingError, match="generation"):
        attach(ring.path, ring.generation + 1)


def test_other_user_s_file_is_refused(name, monkeypatch):
    with published(name) as ring:
        monkeypatch.setattr(region.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(RingError, match="uid"):
            attach(ring.path, ring.generation)


@pytest.mark.parametrize("left", [0, 10, 4096, SIZE])
def test_too_small_file_is_refused(name, left):
    with published(name) as ring:
        os.truncate(ring.path, left)
        with pytest.raises(RingError):
            attach(ring.path, ring.generation)


def test_damaged_header_is_refused(name):
    with published(name) as ring:
        ring.mapping.data[20] ^= 1
        with pytest.raises(RingError, match="damaged"):
            attach(ring.path, ring.generation)


def test_what_is_no_file_is_refused(name, tmp_path):
    (tmp_path / "pipe").parent.joinpath("folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with published(name) as ring:
        (tmp_path / "link").symlink_to(ring.path)
        for wrong in ("nothing", "folder", "pipe", "link"):
            with pytest.raises(RingError):
                attach(tmp_path / wrong, ring.generation)
            assert wrong == "pipe" or not sweep(tmp_path / wrong)
        assert (tmp_path / "link").is_symlink()
        attach(ring.path, ring.generation).close()


def test_living_gateway_keeps_its_name(name):
    with published(name) as ring:
        assert not sweep(ring.path)
        with pytest.raises(RingError, match="ring_name"):
            published(name)
        assert ring.path.exists()
        attach(ring.path, ring.generation).close()


CHILD = """
import sys, time
from adp_kv.ring.region import RingFile
ring = RingFile({name!r}, {size})
ring.divide(4096)
for step in {steps!r}:
    getattr(ring, step)()
print(ring.generation, flush=True)
sys.stdin.read()
"""


def creator(name, *steps):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(name=name, size=SIZE, steps=steps)],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("steps", "left"), [((), False), (("publish",), True), (("publish", "withdraw"), False)]
)
def test_killed_creator_is_cleaned_up(name, steps, left):
    with creator(name, *steps) as child:
        generation = int(child.stdout.readline())
        path = ring_path(name)
        mapping = attach(path, generation) if left else None
        assert not sweep(path)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.exists() is left
    with published(name) as successor:
        assert successor.generation != generation
        if mapping is not None:
            mapping.data[:] = 9  # a rank that still writes into the old ring
            mapping.close()
        attach(path, successor.generation).close()
    assert not path.exists()


def test_dead_file_is_swept(name):
    with creator(name, "publish") as child:
        child.stdout.readline()
        child.kill()
        child.wait()
    assert sweep(ring_path(name))
    assert not ring_path(name).exists()
    assert not sweep(ring_path(name))


def test_sweep_spares_a_successor_that_came_meanwhile(name, monkeypatch):
    path = ring_path(name)
    path.write_bytes(b"left by a dead gateway")
    rings = []
    flock = fcntl.flock

    def late(fd, operation):
        if not rings:  # between opening and locking: another one sweeps and publishes
            rings.append(None)
            sweep(path)
            rings[0] = published(name)
        flock(fd, operation)

    monkeypatch.setattr(region.fcntl, "flock", late)
    sweep(path)
    monkeypatch.undo()
    with rings[0] as successor:
        attach(path, successor.generation).close()


def test_withdraw_spares_a_successor(name):
    path = ring_path(name)
    old = published(name)
    path.unlink()  # somebody tidied up by hand
    with published(name) as successor:
        old.close()
        attach(path, successor.generation).close()


def test_racing_publishers_have_one_winner(name):
    winners = []
    for _ in range(20):
        rings = [RingFile(name, SIZE) for _ in range(4)]
        ready = threading.Barrier(len(rings))
        won = []

        def run(ring, ready=ready, won=won):
            ring.divide(4096)
            ready.wait()
            try:
                ring.publish()
            except RingError:
                return
            won.append(ring)

        threads = [threading.Thread(target=run, args=(ring,)) for ring in rings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        attach(ring_path(name), won[0].generation).close()
        winners += won
        for ring in rings:
            ring.close()
        assert not ring_path(name).exists()


def test_racing_processes_have_one_winner(name):
    ring_path(name).write_bytes(b"left by a dead gateway")
    children = [creator(name, "publish") for _ in range(3)]
    try:
        said = [child.stdout.readline() for child in children]
        winners = [int(line) for line in said if line]
        assert len(winners) == 1
        attach(ring_path(name), winners[0]).close()
    finally:
        for child in children:
            child.kill()
            child.communicate()
        sweep(ring_path(name))


def test_close_frees_the_memory(name):
    """A file without a name is gone with the last process that maps it or has it open."""
    before = mapped_inodes(os.getpid())
    ring = RingFile(name, 64 << 20)
    ring.divide(4096)
    (file,) = mapped_inodes(os.getpid()) - before
    assert file[0] == SHM.stat().st_dev
    assert not ring.path.exists()
    ring.close()
    wait_until(lambda: file not in mapped_inodes(os.getpid()), 5, "nobody has it any more")


def test_name_makes_the_path():
    assert ring_path("a-5557") == Path("/dev/shm/adp_kv-a-5557.ring")


def test_ring_that_others_may_open_is_refused(name):
    with published(name) as ring:
        ring.path.chmod(0o660)
        with pytest.raises(RingError, match="can be opened by other users"):
            attach(ring.path, ring.generation)

"""Ranks that form groups at start: all stop after the same round, or none does."""

import contextlib
import gc
import logging
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from adp_kv.errors import TransferError  # noqa: E402
from adp_kv.fanout import start  # noqa: E402
from adp_kv.fanout.flags import flags_bytes, open_memory  # noqa: E402
from adp_kv.fanout.settings import FanoutSettings  # noqa: E402
from adp_kv.transfer.host_mover import HostMover  # noqa: E402


class Meeting:
    """Ranks as threads; counts the rounds of each."""

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks, timeout=10)
        self.said = [b""] * num_ranks
        self.rounds = [0] * num_ranks
        self.results = [None] * num_ranks

    def everyone_of(self, rank):
        def everyone(text):
            self.said[rank] = text
            self.rounds[rank] += 1
            self.barrier.wait()
            heard = list(self.said)
            self.barrier.wait()
            return heard

        return everyone

    def start(self, movers=None, obstacles=None):
        def one(rank):
            mover = movers[rank] if movers else HostMover()
            everyone = self.everyone_of(rank)
            obstacle = obstacles[rank] if obstacles else None
            self.results[rank] = start.start_fanout(
                mover, rank, everyone, FanoutSettings(), obstacle
            )

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(self.said))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return self.results


class Made:
    """Stands for a Fanout."""

    def __init__(self, group, place, unique_id):
        self.ranks, self.place, self.unique_id = group, place, unique_id
        self.closed = False

    def close(self, grace_s):
        self.closed = True


class Rig:
    """Hosts and links instead of devices.

    Attributes:
        fails: (step, rank) whose attempt fails.
    """

    def __init__(self, monkeypatch, reach):
        self.made = {}
        self.fails = set()
        rig = self

        class Library:
            def unique_id(self):
                return bytes([threading.get_ident() % 251] * 128)

        def facts(mover):
            rig.check("facts", mover)
            return ["host", mover]

        def row(found, rank):
            rig.check("row", rank)
            return reach[rank]

        def make(mover, joined, settings):
            rig.check("make", mover)
            num_bytes = flags_bytes(settings.max_ahead, len(joined.group))
            words = open_memory(joined.path, num_bytes)
            words[joined.place] = mover + 1
            rig.made[mover] = Made(joined.group, joined.place, joined.unique_id)
            rig.made[mover].words = words
            return rig.made[mover]

        monkeypatch.setattr(start, "_facts", facts)
        monkeypatch.setattr(start, "_row", row)
        monkeypatch.setattr(start, "_make", make)
        monkeypatch.setattr(start, "NcclLibrary", Library)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))

    def check(self, step, rank):
        if (step, rank) in self.fails:
            raise TransferError(f"{step} failed here")


def open_memories():
    """Return how many descriptors of groups' memories are open; a mapping holds one."""
    gc.collect()  # mappings of other tests
    targets = []
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            targets.append(str(link.readlink()))
    return sum(target.startswith("/dev/shm/") for target in targets)


def blocks(num, size):
    return [[a // size == b // size for b in range(num)] for a in range(num)]


@pytest.mark.parametrize(("num", "size"), [(2, 2), (4, 4), (8, 8), (8, 4), (8, 2), (5, 4)])
def test_groups_get_their_leader_s_id(monkeypatch, num, size, caplog):
    caplog.set_level(logging.INFO, logger="adp_kv")
    rig, meeting = Rig(monkeypatch, blocks(num, size)), Meeting(num)
    results = meeting.start(list(range(num)))
    assert set(meeting.rounds) == {6}
    for rank, made in enumerate(results):
        group = tuple(r for r in range(num) if r // size == rank // size)
        if len(group) == 1:
            assert made is None
            continue
        assert (made.ranks, made.place) == (group, group.index(rank))
        assert made.unique_id == rig.made[group[0]].unique_id
        assert made.words[: len(group)].tolist() == [r + 1 for r in group], "not the same memory"
        assert len(made.unique_id) == 128
    assert "beside gpu_memory_utilization" in caplog.text
    assert open_memories() == len(rig.made), "a leader's descriptor stays open"


def test_no_links_is_off_with_one_line(monkeypatch, caplog):
    Rig(monkeypatch, blocks(4, 1))
    meeting = Meeting(4)
    assert meeting.start(list(range(4))) == [None] * 4
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert lines[0].endswith("no two ranks reach each other over NVLink")


def test_no_gpu_is_off_with_one_line(caplog):
    meeting = Meeting(3)
    assert meeting.start() == [None] * 3
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "NVLink fan-out is off" in lines[0]
    assert "NVIDIA" in lines[0]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("step", "rounds"), [("facts", 2), ("row", 3), ("make", 6)])
def test_failure_of_one_rank_ends_all_after_the_same_round(monkeypatch, step, rounds, rank, caplog):
    rig, meeting = Rig(monkeypatch, blocks(3, 3)), Meeting(3)
    rig.fails = {(step, rank)}
    assert meeting.start(list(range(3))) == [None] * 3
    assert meeting.rounds == [rounds] * 3
    assert all(made.closed for made in rig.made.values())
    assert open_memories() == len(rig.made)
    assert f"rank {rank}: {step} failed here" in caplog.text


def test_obstacle_of_one_rank_is_everybody_s(monkeypatch, caplog):
    Rig(monkeypatch, blocks(2, 2))
    meeting = Meeting(2)
    assert meeting.start([0, 1], obstacles=[None, "one hardware queue"]) == [None] * 2
    assert meeting.rounds == [1, 1]
    assert "rank 1: one hardware queue" in caplog.text

"""Compaction of a journal in use: over appends, flushes, kills, failures and power loss."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from gateway.cards import journal as journal_module
from tests.support.journals import Owner, live_of, put


@pytest.fixture
def path(tmp_path):
    return tmp_path / "j"


def test_compaction_leaves_dead_records_behind(path):
    owner = Owner(path)
    for i in range(100):
        owner.put(i % 5, i)
    owner.delete(4)
    assert owner.compact()
    assert path.stat().st_size == 64 * 5
    owner.put(50, 50)
    assert owner.journal.num_records == 5
    owner.journal.sync()
    owner.journal.close()
    assert live_of(path) == owner.live == {0: 95, 1: 96, 2: 97, 3: 98, 50: 50}
    assert [f.name for f in path.parent.iterdir()] == ["j"]


@pytest.mark.parametrize("seed", range(4))
def test_compaction_beside_appends_loses_nothing(path, monkeypatch, seed):
    """Every key is changed at random between the pieces, and the result is replayed."""
    monkeypatch.setattr(journal_module, "_PIECE_RECORDS", 16)
    monkeypatch.setattr(journal_module, "_LAST_RECORDS", 8)
    rng, owner = np.random.default_rng(seed), Owner(path)
    slots = iter(range(1000))

    def change():
        for number in rng.integers(0, 12, 6).tolist():
            if number in owner.live and rng.random() < 0.4:
                owner.delete(number)
            else:
                owner.put(number, next(slots))

    for _ in range(60):
        change()
    rounds = iter(range(12))
    assert owner.compact(lambda: change() if next(rounds, None) is not None else None)
    change()
    owner.journal.close()
    assert live_of(path) == owner.live
    again = Owner(path)
    assert again.compact()
    again.journal.close()
    assert live_of(path) == owner.live


def test_kill_amid_a_compaction_leaves_a_whole_journal(path, monkeypatch):
    owner = Owner(path)
    for i in range(60):
        owner.put(i % 7, i)
    moments = []
    real = journal_module._write_all

    def watched(descriptor, data, offset):
        real(descriptor, data[: len(data) // 2], offset)
        moments.append(path.read_bytes())
        real(descriptor, data, offset)
        moments.append(path.read_bytes())

    monkeypatch.setattr(journal_module, "_write_all", watched)
    assert owner.compact()
    moments.append(path.read_bytes())
    owner.journal.close()
    monkeypatch.undo()
    assert len(moments) >= 5
    for content in moments:
        path.write_bytes(content)
        assert live_of(path) == owner.live


def test_remains_of_a_compaction_go_at_the_next_open(path):
    owner = Owner(path)
    owner.put(1, 1)
    owner.journal.close()
    path.with_suffix(".tmp").write_bytes(bytes(1000))
    assert live_of(path) == {1: 1}
    assert [f.name for f in path.parent.iterdir()] == ["j"]


def test_compaction_that_should_end_changes_nothing(path):
    owner = Owner(path)
    for i in range(30):
        owner.put(1, i)
    content = path.read_bytes()
    assert not owner.compact(lambda: True)
    assert path.read_bytes() == content
    owner.put(2, 2)
    owner.journal.close()
    assert live_of(path) == {1: 29, 2: 2}


def test_compaction_without_room_keeps_the_journal(path, monkeypatch):
    owner = Owner(path)
    for i in range(20):
        owner.put(1, i)
    content = path.read_bytes()

    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_write_all", refuse)
        assert not owner.compact()
    assert path.read_bytes() == content
    owner.put(2, 2)
    owner.journal.close()
    assert live_of(path) == {1: 19, 2: 2}
    assert [f.name for f in path.parent.iterdir()] == ["j"]


def test_nobody_waits_for_the_device_under_the_owners_lock(path, monkeypatch):
    """On a slow disk that is seconds, in which no get of any database would begin."""
    owner, held = Owner(path), []

    def watch(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args: (held.append((name, owner.lock.locked())), real(*args))[1]
        )

    for i in range(30):
        owner.put(1, i)
    for name in ("fsync", "fdatasync", "close"):
        watch(os, name)
    watch(journal_module, "sync_directory")
    assert owner.compact()
    assert {name for name, _ in held} == {"fsync", "fdatasync", "close", "sync_directory"}
    assert not any(locked for _, locked in held)
    monkeypatch.undo()
    owner.journal.close()
    assert live_of(path) == {1: 29}


def is_copy(descriptor):
    """Return whether a descriptor is of the file that a compaction writes."""
    return Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tmp"


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def during_last_fsync(monkeypatch, do):
    """Call do() when a compaction waits for the device the last time before its rename."""
    real, seen = os.fsync, []

    def fsync(descriptor):
        if is_copy(descriptor):
            seen.append(1)
            if len(seen) == 2:
                do()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_what_was_flushed_survives_the_rename(path, monkeypatch):
    """A power loss right at the rename leaves of the new file what was synced: enough."""
    owner, synced, promised, after = Owner(path), {}, {}, []
    reals = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
    meanwhile = iter(range(3))

    def watched(name, descriptor):
        there = os.fstat(descriptor)
        temporary = is_copy(descriptor)
        # Whatever is appended while a sync runs is not of it.
        if name == "fsync" and temporary and (n := next(meanwhile, None)) is not None:
            owner.put(100 + n, 100 + n)
            owner.delete(n)
            owner.journal.sync()
            promised.update(owner.live)
            promised.pop(n, None)
            owner.put(200 + n, 200 + n)  # of no flush
        reals[name](descriptor)
        synced[there.st_ino] = max(synced.get(there.st_ino, 0), there.st_size)

    real_replace = Path.replace

    def replace(self, target):
        cut = path.with_name("cut")
        cut.write_bytes(self.read_bytes()[: synced.get(self.stat().st_ino, 0)])
        after.append(live_of(cut))
        cut.unlink()
        return real_replace(self, target)

    for i in range(60):
        owner.put(i % 6, i)
    owner.journal.sync()
    with monkeypatch.context() as patch:
        for name in reals:
            patch.setattr(os, name, lambda fd, name=name: watched(name, fd))
        patch.setattr(Path, "replace", replace)
        assert owner.compact()
    (left,) = after
    assert {101, 3, 4, 5} <= promised.keys() <= left.keys()
    assert {n: left[n] for n in promised} == promised
    assert not {0, 1} & left.keys()  # deleted before the flush
    owner.put(300, 300)
    owner.journal.close()
    assert live_of(path) == owner.live


def test_records_of_the_shadow_phase_are_in_the_new_file(path, monkeypatch):
    owner = Owner(path)
    for i in range(50):
        owner.put(i % 5, i)

    def change():
        owner.put(7, 70)
        owner.delete(4)
        owner.put(3, 71)

    during_last_fsync(monkeypatch, change)
    assert owner.compact()
    assert path.stat().st_size == 64 * (1 + 5 + 3) == owner.journal.size_bytes
    writes, real = [], journal_module._write_all
    monkeypatch.setattr(
        journal_module, "_write_all", lambda fd, *rest: (writes.append(fd), real(fd, *rest))
    )
    owner.put(8, 80)
    assert len(writes) == 1  # there is no shadow any more
    owner.journal.close()
    assert live_of(path) == owner.live == {0: 45, 1: 46, 2: 47, 3: 71, 7: 70, 8: 80}


def refuse_for_copies(real):
    """Return a function on descriptors that fails for those of a compaction's file."""

    def call(descriptor, *args):
        if is_copy(descriptor):
            raise OSError(5, "Input/output error")
        return real(descriptor, *args)

    return call


@pytest.mark.parametrize("what", ["write", "half a write", "sync", "fsync"])
def test_shadow_that_fails_undoes_the_compaction_alone(path, monkeypatch, what):
    owner = Owner(path)
    for i in range(50):
        owner.put(i % 5, i)
    real_write, real_sync = journal_module._write_all, os.fdatasync

    def half(descriptor, data, offset):
        if is_copy(descriptor):
            real_write(descriptor, data[:40], offset)
        refuse_for_copies(real_write)(descriptor, data, offset)

    def change():
        if what == "sync":
            monkeypatch.setattr(os, "fdatasync", refuse_for_copies(real_sync))
        elif what == "fsync":
            owner.put(7, 70)
            raise OSError(5, "Input/output error")
        else:
            broken = half if what == "half a write" else refuse_for_copies(real_write)
            monkeypatch.setattr(journal_module, "_write_all", broken)
        owner.put(7, 70)
        owner.journal.sync()
        monkeypatch.setattr(journal_module, "_write_all", real_write)
        monkeypatch.setattr(os, "fdatasync", real_sync)
        owner.put(8, 80)

    if what == "fsync":
        owner.live[8] = 80
        put(owner.journal, [8], [80])
    during_last_fsync(monkeypatch, change)
    assert not owner.compact()
    monkeypatch.undo()
    expected = {0: 45, 1: 46, 2: 47, 3: 48, 4: 49, 7: 70, 8: 80}
    assert owner.live == expected
    assert path.stat().st_size == 64 * (1 + 50 + 2)
    assert [f.name for f in path.parent.iterdir()] == ["j"]
    with path.with_name("other").open("w+b") as other:  # has the number of the copy's descriptor
        owner.put(9, 90)
        owner.journal.sync()
        assert not other.read()
    assert owner.compact()
    owner.journal.close()
    assert live_of(path) == owner.live == expected | {9: 90}


def test_flush_that_fails_for_what_became_the_journal_says_so(path, monkeypatch):
    owner, failed = Owner(path), []
    for i in range(30):
        owner.put(1, i)
    waits, go_on = threading.Event(), threading.Event()
    real = os.fdatasync

    def fdatasync(descriptor):
        if is_copy(descriptor):
            waits.set()
            assert go_on.wait(30)
            raise OSError(5, "Input/output error")
        real(descriptor)

    def flush():
        try:
            owner.journal.sync()
        except OSError as error:
            failed.append(error.errno)

    thread = threading.Thread(target=flush)

    def begin():
        thread.start()
        assert waits.wait(30)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    during_last_fsync(monkeypatch, begin)
    assert owner.compact()
    go_on.set()
    thread.join(30)
    assert failed == [5]
    owner.journal.close()
    assert live_of(path) == {1: 29}


def test_compactions_and_flushes_leave_no_descriptor(path, monkeypatch):
    owner, before = Owner(path), num_descriptors()
    for i in range(30):
        owner.put(1, i)
    during_last_fsync(monkeypatch, owner.journal.sync)
    assert owner.compact()
    assert num_descriptors() == before
    owner.journal.close()


def test_flush_beside_a_flush_waits_for_the_directory_itself(path, monkeypatch):
    """Until it is on the device, a power loss brings the old file back, without the new records."""
    owner, asked = Owner(path), []
    for i in range(30):
        owner.put(1, i)
    real = journal_module.sync_directory

    def sync_directory(directory):
        asked.append(1)
        if len(asked) == 1:  # the compaction's; a flush begins and ends meanwhile
            owner.put(2, 31)
            owner.journal.sync()
            assert len(asked) == 2
        real(directory)

    monkeypatch.setattr(journal_module, "sync_directory", sync_directory)
    assert owner.compact()
    owner.journal.sync()
    assert len(asked) == 2
    owner.journal.close()


def test_compacted_journal_is_used_though_the_directory_can_not_be_synced(path, monkeypatch):
    """Its descriptor is in use by then: closed, its number would be another file's."""
    owner, asked = Owner(path), []
    for i in range(30):
        owner.put(1, i)

    def refuse(_path):
        asked.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "sync_directory", refuse)
        assert owner.compact()
        with pytest.raises(OSError, match="Too many"):
            owner.journal.sync()
    assert len(asked) == 2
    owner.journal.sync()
    owner.put(2, 31)
    owner.journal.close()
    assert live_of(path) == {1: 29, 2: 31}

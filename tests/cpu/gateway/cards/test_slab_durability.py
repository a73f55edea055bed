"""What a slab card of chunks keeps over kills, power cuts and damage: never wrong bytes.

A kill keeps every write, in order; a power cut keeps what was synced and any part of the
rest. Keys are written in several versions here, so that bytes of another time are found.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gateway.cards import io_engine, journal
from gateway.cards.base import Status
from gateway.cards.slab_format import DATA_OFFSET
from gateway.cards.uring import probe
from tests.support.cards import value_of
from tests.support.chunk_writer import NUM_CHUNKS, SLOT_BYTES, open_chunks
from tests.support.chunks import marker_key

FIRST_VERSION = 100  # no Status is equal to it
ROOT = Path(__file__).parents[4]
needs_uring = pytest.mark.skipif(probe() is not None, reason=f"no io_uring here: {probe()}")


def run_until_killed(path, engine, seed, version):
    """Return the lines that a writer said before it was killed."""
    command = [sys.executable, "-m", "tests.support.chunk_writer"]
    with subprocess.Popen(
        [*command, str(path), engine, str(seed), str(version)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        text=True,
    ) as writer:
        assert writer.stdout.readline() == "ready\n"
        time.sleep(random.Random(seed).uniform(0.05, 0.6))
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read()
    return [(kind, int(v), int(n)) for kind, v, n in map(str.split, said.split("\n")[:-1])]


def versions_of(chunks, number, candidates):
    """Load a chunk; return a version for each value, ABSENT or CORRUPT as they are.

    Fails on bytes of no version.
    """
    keys, _, lengths, _ = chunks.columns(number)
    status, values = chunks.load(number)
    found = []
    for key, length, one, value in zip(keys, lengths, status, values, strict=True):
        if one in (Status.ABSENT, Status.CORRUPT):
            found.append(Status(one))
            continue
        assert one == Status.OK
        same = [v for v in candidates if np.array_equal(value, value_of(key, length, v))]
        assert same, f"chunk {number}: bytes that were never written there"
        found.append(same[-1])
    return found


def check_after_kill(path, written):
    """Every hit loads, in a version that was written; return the hits."""
    chunks = open_chunks(path, evict_above=1.0)
    numbers = range(NUM_CHUNKS)
    hits = [number for number, hit in enumerate(chunks.lookup(numbers)) if hit]
    for number in numbers:
        found = versions_of(chunks, number, written.get(number, []))
        assert Status.CORRUPT not in found
        if number in hits:
            assert Status.ABSENT not in found, f"chunk {number} was offered"
        else:
            assert set(found) == {Status.ABSENT}, f"chunk {number}: values without a marker"
    free = chunks.driver.card.stats()["free_slots"]
    assert free == 96 - sum(chunks.count(n) for n in hits)
    chunks.driver.close()
    return hits


@pytest.mark.parametrize("engine", [pytest.param("io_uring", marks=needs_uring), "threads"])
@pytest.mark.timeout(600)
def test_killed_card_offers_nothing_broken(tmp_path, engine):
    written, version, answered, seed = {}, FIRST_VERSION, 0, 0
    before = set()
    while answered < 1000:
        seed += 1
        lines = run_until_killed(tmp_path / "card", engine, seed, version)
        for kind, v, number in lines:
            written.setdefault(number, []).append(v)
            answered += kind == "W"
            version = max(version, v)
        hits = set(check_after_kill(tmp_path / "card", written))
        # The last chunk that was committed can't have been evicted before its elders.
        if lines and lines[-1][0] == "C":
            assert lines[-1][2] in hits
        before |= hits
    assert len(before) > 20


class Tape:
    """The writes of a card to its files, in order, with what was synced and renamed when.

    Attributes:
        entries: (kind, file, offset, data); files go by the name they had first, the copies
            of compactions by a number too.
        meanwhile: called when the sync of a copy has ended, before its compaction goes on.
    """

    def __init__(self, monkeypatch):
        self.entries = []
        self.meanwhile = lambda: None
        self._files = {}  # by name, of those that were renamed
        self._num_copies = 0
        real_pwrite, real_write_all = io_engine._pwrite, journal._write_all
        real_sync, real_fsync, real_replace = os.fdatasync, os.fsync, Path.replace

        def pwrite(fd, address, length, offset):
            done = real_pwrite(fd, address, length, offset)
            data = bytes(io_engine.ctypes.string_at(address, length))
            self.entries.append(("write", self._file(fd), offset, data))
            return done

        def write_all(fd, data, offset):
            real_write_all(fd, data, offset)
            self.entries.append(("write", self._file(fd), offset, bytes(data)))

        def fdatasync(fd):
            file = self._file(fd)
            real_sync(fd)
            self.entries.append(("sync", file, 0, b""))

        def fsync(fd):
            real_fsync(fd)
            if Path(f"/proc/self/fd/{fd}").is_dir():
                self.entries.append(("directory", "", 0, b""))
                return
            self.entries.append(("sync", self._file(fd), 0, b""))
            self.meanwhile()

        def replace(path, target):
            real_replace(path, target)
            file = self._files[target.name] = f"{path.name}{self._num_copies}"
            self._num_copies += 1
            self.entries.append(("rename", file, 0, target.name))

        monkeypatch.setattr(io_engine, "_pwrite", pwrite)
        monkeypatch.setattr(journal, "_write_all", write_all)
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "replace", replace)

    def _file(self, fd):
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        return self._files.get(name, f"{name}{self._num_copies}" if ".tmp" in name else name)

    def replay(self, start, path, end, rng=None):
        """Make `path` what `start` was, plus the writes up to `end`.

        With `rng`, writes that no sync followed are there, torn or lost at random, and the
        last of the renames that no sync of the directory followed are lost.
        """
        shutil.copytree(start, path)
        entries = self.entries[:end]
        last_sync = {name: i for i, (kind, name, _, _) in enumerate(entries) if kind == "sync"}
        renames = [i for i, entry in enumerate(entries) if entry[0] == "rename"]
        if rng is not None:
            directory = max((i for i, e in enumerate(entries) if e[0] == "directory"), default=-1)
            surely = sum(i < directory for i in renames)
            renames = renames[: int(rng.integers(surely, len(renames) + 1))]
        for i, (kind, name, offset, data) in enumerate(entries):
            if kind != "write":
                continue
            kept = len(data)
            if rng is not None and i > last_sync.get(name, -1):
                fate = rng.random()
                if fate < 0.3:
                    continue
                if fate < 0.6:
                    kept = int(rng.integers(0, len(data)))
            (path / name).touch()
            with (path / name).open("r+b") as file:
                file.seek(offset)
                file.write(data[:kept])
        for _, name, _, target in (entries[i] for i in renames):
            (path / name).touch()
            (path / name).replace(path / target)
        for copy in path.glob("*.tmp*"):
            copy.replace(copy.with_suffix(".tmp"))


@pytest.fixture
def tape(tmp_path, monkeypatch):
    """A workload on tape: the chunks' versions, acknowledgements and full syncs by position."""
    path = tmp_path / "card"
    chunks = open_chunks(path, sync_interval_s=3600.0)
    chunks.driver.close()
    shutil.copytree(path, tmp_path / "start")
    tape = Tape(monkeypatch)
    chunks = open_chunks(path, sync_interval_s=3600.0, sync_bytes=1 << 40, scrub_bytes_per_s=0)
    rng = np.random.default_rng(2)
    tape.written, tape.acknowledged, tape.synced, tape.compactions = {}, [], [], []
    databases = chunks.driver.card._databases
    versions = iter(range(FIRST_VERSION, FIRST_VERSION + 300))

    def flush():
        for database in databases:
            database.sync()
        tape.synced.append(len(tape.entries))

    def save():
        version, number = next(versions), int(rng.integers(NUM_CHUNKS))
        tape.written.setdefault(number, []).append(version)
        stored = chunks.store(number, version)
        if not stored:
            chunks.driver.card._evictor.round()  # this workload does not wait for room
        tape.acknowledged.append((len(tape.entries), number, version if stored else None))
        return stored

    def meanwhile():
        while not save():
            pass
        flush()
        save()

    for _ in range(150):
        save()
        if rng.random() < 0.1:
            flush()
        if rng.random() < 0.05:
            database = databases[int(rng.integers(len(databases)))]
            tape.meanwhile = meanwhile
            begin = len(tape.entries)
            assert database.journal.compact(database.table.lock, database.are_live, lambda: False)
            tape.meanwhile = lambda: None
            tape.compactions.append((begin, len(tape.entries)))
    assert chunks.driver.card.stats()["evicted_chunks"] > 10
    tape.evicted = chunks.driver.card.stats()["evicted_chunks"]
    chunks.driver.close()
    monkeypatch.undo()
    return tape


def test_every_prefix_of_the_writes_is_whole(tape, tmp_path):
    ends = range(0, len(tape.entries), max(1, len(tape.entries) // 60))
    hits = 0
    for end in ends:
        path = tmp_path / "prefix"
        tape.replay(tmp_path / "start", path, end)
        hits += len(check_after_kill(path, tape.written))
        shutil.rmtree(path)
    assert hits > 10 * len(ends)


def test_power_cut_loses_no_more_than_promised(tape, tmp_path):
    """Acknowledged before the last full sync: there, unless it was evicted or written over."""
    rng = np.random.default_rng(7)
    promised_in_all = corrupt = 0
    ends = rng.integers(1, len(tape.entries), 40).tolist()
    assert len(tape.compactions) >= 4
    for begin, end in tape.compactions:
        ends += [int(rng.integers(begin, end)), *[end - 2] * 6, end - 1]  # renamed, not synced
    for end in ends:
        path = tmp_path / "cut"
        tape.replay(tmp_path / "start", path, end, rng)
        chunks = open_chunks(path, evict_above=1.0)
        hits = chunks.lookup(range(NUM_CHUNKS))
        found = {
            number: versions_of(chunks, number, tape.written.get(number, []))
            for number in range(NUM_CHUNKS)
        }
        corrupt += sum(Status.CORRUPT in versions for versions in found.values())
        for number in promised(tape, end):
            promised_in_all += 1
            assert hits[number], f"chunk {number} was promised"
            assert not {Status.ABSENT, Status.CORRUPT} & set(found[number])
        chunks.driver.close()
        shutil.rmtree(path)
    assert promised_in_all > 40
    assert corrupt > 0  # unsynced writes did get lost, and were seen through


def promised(tape, end):
    """Return chunks stored before the last full sync that nothing has touched since."""
    full = max((s for s in tape.synced if s <= end), default=0)
    last = {number: (at, version) for at, number, version in tape.acknowledged if at <= full}
    began = 0  # a save's writes lie between the answer before it and its own
    touched = set()
    for at, number, _ in tape.acknowledged:
        if at > full and began < end:
            touched.add(number)
        began = at
    # What was evicted says so in the journals: a DELETE of its keys before the cut.
    deleted = {
        record["key"].tobytes(): i
        for i, (kind, name, _, data) in enumerate(tape.entries[:end])
        if kind == "write" and not name.endswith(".data")
        for record in np.frombuffer(data, dtype=journal.RECORD)
        if record["kind"] == 3
    }
    return [
        n
        for n, (at, version) in last.items()
        if version and n not in touched and deleted.get(marker_key(n), -1) < at
    ]


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_never_give_wrong_bytes(tmp_path, seed):
    """Flipped bits and cut ends, in slabs and journals."""
    path, rng = tmp_path / "card", np.random.default_rng(seed)
    chunks = open_chunks(path, evict_above=1.0)
    stored = [n for n in range(NUM_CHUNKS) if chunks.store(n, FIRST_VERSION)]
    chunks.driver.close()
    used = DATA_OFFSET + 30 * SLOT_BYTES
    for file in sorted(path.glob("slab-*")):
        content = bytearray(file.read_bytes())
        first, last = (DATA_OFFSET, used) if file.suffix == ".data" else (64, len(content))
        for _ in range(int(rng.integers(1, 12)) if file.suffix == ".data" else seed % 2):
            content[int(rng.integers(first, last))] ^= 1 << int(rng.integers(8))
        if file.suffix == ".journal" and seed % 3 == 0:
            del content[int(rng.integers(64, len(content))) :]
        file.write_bytes(content)
    chunks = open_chunks(path, evict_above=1.0)
    for number in stored:
        found = versions_of(chunks, number, [FIRST_VERSION])
        if {Status.ABSENT, Status.CORRUPT} & set(found):
            assert chunks.lookup([number]) == [False]  # not offered again
    assert sum(chunks.lookup(stored)) < len(stored)
    chunks.driver.close()

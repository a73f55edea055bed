import os
import threading

import numpy as np
import pytest
import xxhash

from adp_kv.errors import CardError
from gateway.cards import journal as journal_module
from gateway.cards.journal import Journal
from gateway.cards.journal_records import (
    RECORD,
    JournalIdentity,
    Kind,
    delete_records,
    put_records,
    record_checksums,
)

ME = JournalIdentity(card_id=77, database=3, num_slots=1000, slot_bytes=4096)


def keys_of(*numbers):
    return np.array([(n, n + 1) for n in numbers], dtype=np.uint64).reshape(-1, 2)


def put(journal, numbers, slots, kind=Kind.PUT):
    n = len(numbers)
    lengths, sums = np.full(n, 9, np.uint32), np.array(numbers, np.uint64) * np.uint64(7)
    if kind is Kind.DELETE:
        journal.append(delete_records(keys_of(*numbers)))
        return
    groups = np.zeros(n, np.uint64)
    slots = np.array(slots, np.int64)
    journal.append(put_records(keys_of(*numbers), slots, lengths, sums, groups))


def live_of(path):
    journal = Journal(path, ME)
    live = {int(r["key"][0]): int(r["slot"]) for r in journal.live}
    journal.close()
    return live


@pytest.fixture
def path(tmp_path):
    return tmp_path / "j"


def filled(path, n=20):
    journal = Journal(path, ME)
    for i in range(n):
        put(journal, [i], [i])
    journal.close()
    return path.read_bytes()


@pytest.mark.parametrize("n", [0, 1, 50, 512, 513, 2000])  # one by one, and by the column
def test_record_checksum_is_xxh64(n):
    records = np.frombuffer(np.random.default_rng(0).bytes(64 * n), dtype=RECORD)
    for seed in (0, 77, 2**63 + 5):
        expected = [xxhash.xxh64_intdigest(r.tobytes()[:56], seed) for r in records]
        assert record_checksums(records, seed).tolist() == expected


def test_replay_gives_each_keys_last_word(path):
    journal = Journal(path, ME)
    put(journal, [1, 2, 3], [10, 20, 30])
    put(journal, [2], [21])
    put(journal, [3], [30], Kind.DELETE)
    put(journal, [4], [30])
    journal.close()
    assert live_of(path) == {1: 10, 2: 21, 4: 30}


def test_any_cut_replays_a_prefix(path):
    content = filled(path)
    for cut in range(0, len(content), 29):
        path.write_bytes(content[:cut])
        whole = max(0, cut // 64 - 1)
        assert live_of(path) == {i: i for i in range(whole)}
        assert path.stat().st_size == max(64, cut // 64 * 64)


def test_any_flipped_byte_replays_a_prefix(path):
    content = filled(path)
    for position in range(64, len(content), 37):
        damaged = bytearray(content)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        assert live_of(path) == {i: i for i in range(position // 64 - 1)}


def test_damaged_header_starts_empty(path):
    content = bytearray(filled(path))
    content[3] ^= 1
    path.write_bytes(content)
    assert live_of(path) == {}
    assert path.stat().st_size == 64


def test_records_out_of_sequence_end_the_replay(path):
    content = filled(path)
    path.write_bytes(content[: 64 * 5] + content[64 * 9 :])
    assert live_of(path) == {i: i for i in range(4)}


def test_append_after_a_cut_goes_on_there(path):
    content = filled(path)
    path.write_bytes(content[: 64 * 5 + 17])
    journal = Journal(path, ME)
    put(journal, [99], [99])
    journal.close()
    assert live_of(path) == {0: 0, 1: 1, 2: 2, 3: 3, 99: 99}


def test_slot_of_two_keys_keeps_later(path):
    journal = Journal(path, ME)
    put(journal, [1, 2], [10, 1000])
    put(journal, [3, 4], [10, 1000])
    journal.close()
    assert live_of(path) == {3: 10, 2: 1000, 4: 1000}  # 1000 = no slot


@pytest.mark.parametrize(
    "changes", [{"card_id": 78}, {"database": 2}, {"num_slots": 999}, {"slot_bytes": 8192}]
)
def test_journal_of_another_card_is_refused_untouched(path, changes):
    content = filled(path)
    facts = {name: getattr(ME, name) for name in ME.__slots__}
    with pytest.raises(CardError, match="belongs to"):
        Journal(path, JournalIdentity(**(facts | changes)))
    assert path.read_bytes() == content


class Owner:
    """A journal in use: what is live, and appends under a lock."""

    def __init__(self, path):
        self.journal = Journal(path, ME)
        self.lock = threading.Lock()
        self.live = {int(r["key"][0]): int(r["slot"]) for r in self.journal.live}

    def put(self, number, slot):
        with self.lock:
            put(self.journal, [number], [slot])
            self.live[number] = slot

    def delete(self, number):
        with self.lock:
            put(self.journal, [number], [0], Kind.DELETE)
            del self.live[number]

    def are_live(self, records):
        assert self.lock.locked()
        return np.array([self.live.get(int(r["key"][0])) == int(r["slot"]) for r in records])

    def compact(self, between=lambda: None):
        return self.journal.compact(self.lock, self.are_live, lambda: bool(between()))


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


def test_journal_of_the_format_before_says_so(path):
    header = bytearray(filled(path, 0))
    header[24:32] = (1).to_bytes(8, "little")
    path.write_bytes(header)
    with pytest.raises(CardError, match="journal format 1"):
        Journal(path, ME)
    assert path.read_bytes() == header


def test_keys_that_share_a_word_replay_apart(path):
    keys = np.array([[1, 1], [1, 2], [2, 1], [1, 1]], dtype=np.uint64)
    journal = Journal(path, ME)
    n = len(keys)
    slots, zeros = np.arange(n), np.zeros(n, np.uint64)
    journal.append(put_records(keys, slots, np.full(n, 9, np.uint32), zeros, zeros))
    journal.close()
    journal = Journal(path, ME)
    assert [(*r["key"].tolist(), int(r["slot"])) for r in journal.live] == [
        (1, 2, 1),
        (2, 1, 2),
        (1, 1, 3),
    ]
    journal.close()


def test_failed_append_leaves_no_record(path, monkeypatch):
    journal = Journal(path, ME)
    put(journal, [1], [1])
    real = journal_module._write_all

    def half(descriptor, data, offset):
        real(descriptor, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_write_all", half)
        with pytest.raises(OSError, match="No space"):
            put(journal, [2, 3, 4, 5], [2, 3, 4, 5])
    put(journal, [6], [6])
    journal.close()
    assert live_of(path) == {1: 1, 6: 6}

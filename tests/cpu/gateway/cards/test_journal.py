import numpy as np
import pytest
import xxhash

from adp_kv.errors import CardError
from gateway.cards import journal as journal_module
from gateway.cards.journal import RECORD, Journal, JournalIdentity, Kind, record_checksums

ME = JournalIdentity(card_id=77, database=3, num_slots=1000, slot_bytes=4096)


def keys_of(*numbers):
    return np.array([(n, n + 1) for n in numbers], dtype=np.uint64).reshape(-1, 2)


def put(journal, numbers, slots, kind=Kind.PUT):
    n = len(numbers)
    lengths, sums = np.full(n, 9, np.uint32), np.array(numbers, np.uint64) * np.uint64(7)
    journal.append(kind, keys_of(*numbers), np.array(slots, np.int64), lengths, sums)


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


def test_record_checksum_is_xxh64():
    records = np.frombuffer(np.random.default_rng(0).bytes(64 * 50), dtype=RECORD)
    expected = [xxhash.xxh64_intdigest(r.tobytes()[:56]) for r in records]
    assert record_checksums(records).tolist() == expected


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


def test_dead_records_are_compacted_at_open(path, monkeypatch):
    monkeypatch.setattr(journal_module, "_COMPACT_SLACK", 50)
    journal = Journal(path, ME)
    for i in range(100):
        put(journal, [i % 5], [i])
    journal.close()
    assert path.stat().st_size == 64 * 101
    assert live_of(path) == {i: 95 + i for i in range(5)}
    assert path.stat().st_size == 64 * 6
    journal = Journal(path, ME)
    put(journal, [50], [50])
    journal.close()
    assert live_of(path) == {i: 95 + i for i in range(5)} | {50: 50}


def test_compaction_without_room_keeps_the_journal(path, monkeypatch):
    monkeypatch.setattr(journal_module, "_COMPACT_SLACK", 5)
    journal = Journal(path, ME)
    for i in range(20):
        put(journal, [1], [i])
    journal.close()
    content = path.read_bytes()

    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_write_all", refuse)
        assert live_of(path) == {1: 19}
    assert path.read_bytes() == content
    assert [f.name for f in path.parent.iterdir()] == ["j"]


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

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
    put_records,
    record_checksums,
)
from tests.support.journals import ME, live_of, put


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

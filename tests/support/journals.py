"""A journal of a slab card, and an owner that keeps what must be live in it."""

import threading

import numpy as np

from gateway.cards.journal import Journal
from gateway.cards.journal_records import JournalIdentity, Kind, delete_records, put_records

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

"""Chunks on a card, as the gateway stores them: values of a group, then its marker.

chunks = Chunks(driver)
chunks.store(7); chunks.lookup([7, 8]); chunks.load(7)
"""

import numpy as np

from adp_kv.wire.keys import commit_keys
from gateway.cards.base import Op, Status
from tests.support.cards import value_of

_WORDS = np.random.default_rng(11).integers(1, 2**63, (4096, 2), dtype=np.uint64)


def marker_key(number):
    """Return the key of a chunk's marker: 16 bytes."""
    return commit_keys(_WORDS[number : number + 1])[0].tobytes()


class Chunks:
    """Chunks by number; values of a chunk and version are always the same bytes."""

    def __init__(self, driver, num_values=3, length=500, namespace=0):
        self.driver = driver
        self.num_values = num_values
        self.length = length
        self.namespace = namespace
        self._num_databases = driver.card.limits.num_databases

    def count(self, number):
        """Return how many values a chunk has."""
        return self.num_values if isinstance(self.num_values, int) else self.num_values(number)

    def columns(self, number):
        """Return keys, databases, lengths and groups of a chunk's values."""
        n = self.count(number)
        keys = np.repeat(_WORDS[number][None], n, axis=0)
        keys[:, 1] ^= np.arange(1, n + 1, dtype=np.uint64)
        databases = (keys[:, 1] % np.uint64(self._num_databases)).astype(np.uint16)
        return keys, databases, [self.length] * n, np.full(n, _WORDS[number][0])

    def write(self, number, version=0):
        """Write a chunk's values without its marker; return their statuses."""
        keys, databases, lengths, groups = self.columns(number)
        return self.driver.write(
            keys, lengths, version, databases, groups=groups, namespace=self.namespace
        )

    def commit(self, number):
        return self._marker(Op.WRITE, [number])[0]

    def store(self, number, version=0):
        """Write a chunk and, if every value was taken, its marker; return whether it was."""
        self.driver.arena._next = 0
        if self.write(number, version) != [Status.OK] * self.count(number):
            return False
        return self.commit(number) == Status.OK

    def lookup(self, numbers):
        """Return which chunks' markers are there."""
        return [status == Status.OK for status in self._marker(Op.EXIST, numbers)]

    def remove(self, number):
        return self._marker(Op.DELETE, [number])[0]

    def load(self, number):
        """Return the statuses and bytes of a chunk's values."""
        keys, databases, lengths, _ = self.columns(number)
        self.driver.arena._next = 0
        return self.driver.read(keys, lengths, databases)

    def check(self, number, version=0):
        """Assert that a chunk is there, exactly."""
        keys, _, _, _ = self.columns(number)
        status, values = self.load(number)
        assert status == [Status.OK] * len(keys), f"chunk {number}: {status}"
        for key, value in zip(keys, values, strict=True):
            assert np.array_equal(value, value_of(key, self.length, version))

    def _marker(self, op, numbers):
        keys = commit_keys(_WORDS[numbers])
        nowhere = [0] * len(numbers)
        return self.driver.run(
            op,
            keys,
            nowhere,
            nowhere,
            (keys[:, 0] % np.uint64(self._num_databases)).astype(np.uint16),
            groups=_WORDS[numbers][:, 0],
            namespace=self.namespace,
        )

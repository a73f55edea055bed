"""What cards that cut batches into parts have in common, with lanes that a test steers."""

import threading

import numpy as np
import pytest

from adp_kv.errors import CardError
from adp_kv.units import MiB
from gateway.cards.base import Batch, Op, Status
from gateway.cards.parts import PART_BYTES, LaneCard, Lanes, Part
from gateway.cards.settings import LaneSettings
from tests.support.cards import random_keys
from tests.support.process import wait_until

OK, IO_ERROR = Status.OK, Status.IO_ERROR
FOREVER_S = 3600.0


class HeldLanes(Lanes):
    """Lanes that keep what they get until a test says how it ended."""

    def __init__(self, on_end):
        self.parts = []
        self.stopped_with = None
        self._on_end = on_end

    def put(self, part):
        self.parts.append(part)

    def end(self, part, status=OK):
        part.status[:] = status
        self._on_end(part)

    def stop(self, timeout_s):
        self.stopped_with = len(self.parts)
        while self.parts:
            self._on_end(self.parts.pop())
        return True


class HeldCard(LaneCard):
    """A card of such lanes; `refuses` is the database that can't be opened."""

    def __init__(self, databases=1, refuses=None, **settings):
        shared = LaneSettings(max_value_bytes=4 * MiB, **settings)
        how = {"databases": databases, "lanes": 2, "rows": 32, "stop_timeout_s": 1}
        super().__init__("held", shared, Part, **how)
        self.made = []
        self._refuses = refuses

    def _connect(self):
        for number in range(self.limits.num_databases):
            if number == self._refuses:
                raise CardError("no such server")
            self.made.append(HeldLanes(self._ended))
            yield self.made[-1]


@pytest.fixture
def answers():
    return {}


def opened(answers, **settings):
    card = HeldCard(**settings)
    card.open(lambda token, status: answers.update({token: status.tolist()}))
    return card


def batch(lengths, op=Op.READ, token=1, databases=None):
    n = len(lengths)
    return Batch(
        op,
        token,
        np.zeros(n, np.uint16) if databases is None else np.array(databases, np.uint16),
        random_keys(n),
        np.zeros(n, np.uint64),
        np.array(lengths, np.uint32),
    )


def test_close_waits_for_batches_and_no_longer(answers):
    card = opened(answers, close_timeout_s=FOREVER_S)
    card.submit(batch([100] * 2))
    (lanes,) = card.made
    closing = threading.Thread(target=card.close, daemon=True)
    closing.start()
    wait_until(lambda: not card._is_open, 10, "close() has begun")
    lanes.end(lanes.parts.pop())
    closing.join(10)
    assert not closing.is_alive()
    assert answers == {1: [OK] * 2}
    assert lanes.stopped_with == 0


def test_close_abandons_what_does_not_end(answers):
    card = opened(answers, close_timeout_s=0.01)
    card.submit(batch([100] * 2))
    card.close()
    assert card.made[0].stopped_with == 1
    assert answers == {1: [IO_ERROR] * 2}
    with pytest.raises(CardError, match="held card: not open"):
        card.submit(batch([100]))


def test_batch_is_answered_with_its_last_part_and_counted_by_entry(answers):
    card = opened(answers, databases=2, close_timeout_s=0)
    card.submit(batch([100, 200, 300], databases=[0, 1, 0]))
    first, second = (lanes.parts.pop() for lanes in card.made)
    assert (first.rows.tolist(), second.rows.tolist()) == ([0, 2], [1])
    card.made[0].end(first, [OK, Status.CORRUPT])
    assert answers == {}
    card.made[1].end(second, IO_ERROR)
    assert answers == {1: [OK, IO_ERROR, Status.CORRUPT]}
    counted = {"bytes_read": 100, "bytes_written": 0, "corrupt": 1, "io_errors": 1}
    assert {name: card.stats()[name] for name in counted} == counted
    card.close()


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([100] * 10, [8, 2]),  # not worth a lane each
        ([100] * 40, [20, 20]),
        ([100] * 100, [32, 32, 32, 4]),
        ([PART_BYTES // 4] * 10, [4, 4, 2]),
        ([3 * MiB] * 3, [2, 1]),
        ([PART_BYTES] * 10, [2] * 5),  # too large anyway: as the longest that is not
    ],
)
def test_parts_have_few_rows_and_few_bytes(answers, lengths, rows):
    card = opened(answers, close_timeout_s=0)
    card.submit(batch(lengths))
    assert [len(part.rows) for part in card.made[0].parts] == rows
    card.close()


def test_lanes_opened_before_one_that_fails_are_stopped(answers):
    card = HeldCard(databases=3, refuses=2)
    with pytest.raises(CardError, match="no such server"):
        card.open(lambda *_: None)
    assert [lanes.stopped_with for lanes in card.made] == [0, 0]
    with pytest.raises(CardError, match="not open"):
        card.submit(batch([100]))
    assert answers == {}

"""When the words of a pinned table are written again."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from adp_kv.transfer.tables import TablePool, table_words  # noqa: E402
from tests.support.fake_cuda import FakeDevice, FakeEvent  # noqa: E402

MAX_PAGES = 32
NUM_CHUNKS = 3


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def pool(device):
    return TablePool(device, MAX_PAGES, NUM_CHUNKS)


def fill(device, pool, num_chunks, stream=1):
    """Take tables of whole chunks, each with an event of its own; return the events."""
    ends = []
    for _ in range(2 * num_chunks):  # a chunk holds two of the largest
        ends.append(FakeEvent(device))
        addrs = np.arange(MAX_PAGES, dtype=np.int64)
        pool.take(addrs, addrs).hold_until(ends[-1], stream)
    return ends


def test_chunks_whose_tables_were_read_are_used_again(device, pool):
    for _ in range(5):
        for end in fill(device, pool, NUM_CHUNKS):
            end.happened = True
    assert pool.num_chunks == NUM_CHUNKS


def test_chunk_is_added_while_one_stream_may_still_read_the_oldest(device, pool):
    slow, fast = FakeEvent(device), FakeEvent(device)
    addrs = np.arange(MAX_PAGES, dtype=np.int64)
    held = pool.take(addrs, addrs)
    held.hold_until(slow, 1)
    pool.take(addrs, addrs).hold_until(fast, 2)  # the other half of the chunk
    fast.happened = True
    for end in fill(device, pool, NUM_CHUNKS - 1, 2):
        end.happened = True
    later = pool.take(-addrs, -addrs)
    assert pool.num_chunks == NUM_CHUNKS + 1
    assert held.words[held.first : held.first + MAX_PAGES].tolist() == addrs.tolist()
    assert later.words is not held.words


def test_tables_share_no_line_of_memory(pool):
    one = np.arange(1, dtype=np.int64)
    tables = [pool.take(one, one) for _ in range(4)]
    starts = {(table.first, table.first + table.row_words) for table in tables}
    assert not any(word * 8 % 128 for pair in starts for word in pair)
    assert len(starts) == 4
    assert tables[0].words.numel() == 2 * table_words(MAX_PAGES)

"""Ranks that exchange replicated caches: real clients and gateway, devices that are fakes.

A device runs only while somebody asks for an event of it, its streams in any order.
"""

import threading

import numpy as np
import pytest

from tests.support.fake_cuda import FakeDevice, FakeEvent

torch = pytest.importorskip("torch")
from adp_kv.errors import TransferError  # noqa: E402
from adp_kv.fanout import fanout as fanout_module  # noqa: E402
from adp_kv.fanout.fanout import Fanout  # noqa: E402
from adp_kv.fanout.flags import Flags, flags_bytes  # noqa: E402
from adp_kv.fanout.settings import FanoutSettings  # noqa: E402
from adp_kv.transfer.copy_engine import CopyEngine  # noqa: E402
from adp_kv.transfer.cuda_mover import CudaMover  # noqa: E402
from adp_kv.transfer.registration import RingRegistration  # noqa: E402
from adp_kv.transfer.settings import MoverSettings  # noqa: E402
from gateway.cards.base import Op, Status  # noqa: E402
from gateway.cards.faulty import Fault, FaultyCard  # noqa: E402
from tests.support.cards import memory_card  # noqa: E402
from tests.support.clients import Team, blocks_of, finish, pools  # noqa: E402
from tests.support.exchanges import LocalGroup  # noqa: E402
from tests.support.process import wait_until  # noqa: E402
from tests.support.serving import Serving, random_chunks  # noqa: E402

SIZES = (41_984, 8_448, 41_984)  # a latent cache and an indexer's: pages of two sizes
LEAST_BYTES = 70_000  # the largest batch of indexer pages is smaller


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(fanout_module, "least_bytes", lambda _num: LEAST_BYTES)


class Group(Team):
    """A team whose ranks exchange."""

    def __init__(self, address, num_ranks, seed=0, timeout_s=5.0):
        self.devices = [FakeDevice(seed * 7 + rank) for rank in range(num_ranks)]
        movers = []
        for device in self.devices:
            engine = CopyEngine(device, device)
            registration = RingRegistration(device, 0)
            movers.append(
                CudaMover(device, engine, registration, MoverSettings(staging_bytes=1 << 20))
            )
        super().__init__(
            address, pools(num_ranks, "replicated", SIZES), timeout_s=5.0, movers=movers
        )
        self.exchanges = LocalGroup(num_ranks).exchanges(self.devices)
        settings = FanoutSettings(1 << 20, num_buffers=2, max_ahead=4, timeout_s=timeout_s)
        words = np.zeros(flags_bytes(settings.max_ahead, num_ranks) // 8, np.int64)
        for rank, mover, exchange in zip(self.ranks, movers, self.exchanges, strict=True):
            flags = Flags(words, exchange.rank, num_ranks)
            ranks = tuple(range(num_ranks))
            rank.fanout = Fanout(mover.hardware, exchange, flags, settings, ranks)

    def begin(self, number, chunks, blocks, timeout_s=10.0):
        """Ask for a restore on all ranks; return the jobs."""
        jobs = self.jobs(number, chunks, blocks, timeout_s)
        self.submit_restores(jobs)
        return jobs

    def settle(self, jobs):
        """Wait as a forward pass does, to the end of its step, on every rank at once."""

        def one_rank(job):
            for cache in job.caches:
                tickets = job.wait_cache(cache.index)
                job.wait_proven(tickets)

        threads = [threading.Thread(target=one_rank, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


RING = {"shared_memory_size": 2 * 12 * 86_016}


@pytest.fixture
def stored():
    """Return a group of three with four chunks stored, pages cleared, and what they held."""
    chunks, blocks = random_chunks(4), blocks_of(0, 8, 2, 30)
    card = FaultyCard(memory_card())
    with (
        Serving(card, batch_bytes=3 * 86_016, **RING) as serving,
        Group(serving.address, 3).start() as group,
    ):
        group.save(1, chunks, blocks)
        held = {index: group.pools[0].pages(index, blocks) for index in group.pools[0].memory}
        for pool in group.pools:
            pool.clear()
        yield group, card, chunks, blocks, held


def holds(group, blocks, held):
    return [
        all(np.array_equal(pool.pages(index, blocks), held[index]) for index in held)
        for pool in group.pools
    ]


def test_every_rank_has_every_page_and_read_its_share(stored):
    group, _, chunks, _, held = stored
    elsewhere = blocks_of(20, 40, 50, 4)
    jobs = group.begin(2, chunks, elsewhere)
    group.settle(jobs)
    finish(jobs)
    assert holds(group, elsewhere, held) == [True] * 3
    assert not any(job.failed_chunks.any() for job in jobs)
    exchanged = {rank.counts["bytes_exchanged"] for rank in group.ranks}
    assert exchanged == {2 * 4 * 2 * 41_984}, "latent pages are exchanged, the indexer's are not"
    calls = [exchange.calls for exchange in group.exchanges]
    assert calls[0] == calls[1] == calls[2]
    assert len(calls[0]) >= 4


def test_unwanted_pages_are_not_written(stored):
    group, _, chunks, _, held = stored
    wanted = np.array([[20, -1], [-1, -1], [22, 23], [-1, 25]])
    jobs = group.begin(2, chunks, wanted)
    group.settle(jobs)
    finish(jobs)
    for pool in group.pools:
        memory = pool.memory[0][:, : SIZES[0]]
        changed = np.flatnonzero((memory != 0xA5).any(axis=1)).tolist()
        assert changed == [20, 22, 23, 25]
        assert np.array_equal(pool.pages(0, [20, 22, 23, 25]), held[0][[0, 4, 5, 7]])


@pytest.mark.parametrize("rank", [0, 2])
def test_rank_that_gave_up_fails_the_load_on_all(stored, rank):
    group, _, chunks, blocks, _ = stored
    jobs = group.jobs(2, chunks, blocks)
    client = group.ranks[rank]
    ask = client._ask_all

    def ask_and_give_up(job, kind, mark):
        ask(job, kind, mark)
        job.abandon("this rank gave up")

    client._ask_all = ask_and_give_up
    group.submit_restores(jobs)
    group.settle(jobs)
    finish(jobs)
    assert [job.failed_blocks for job in jobs] == [set(blocks.reshape(-1).tolist())] * 3
    client._ask_all = ask
    memory = group.pools[rank].memory.values()
    assert all((pages == 0xA5).all() for pages in memory), "it writes pages it has given up"
    again(group, chunks)


def test_copy_that_fails_on_one_rank_fails_the_load_on_all(stored):
    group, _, chunks, blocks, _ = stored
    client = group.ranks[1]
    slices = client._slices

    def fail(transfer, *picked):
        if transfer.is_put:
            return slices(transfer, *picked)
        raise TransferError("no such block")

    client._slices = fail
    jobs = group.begin(2, chunks, blocks)
    group.settle(jobs)
    finish(jobs)
    assert [job.failed_blocks for job in jobs] == [set(blocks.reshape(-1).tolist())] * 3
    client._slices = slices
    again(group, chunks)


def test_object_that_is_missing_fails_alike_and_the_order_holds(stored):
    group, card, chunks, blocks, held = stored
    hit = []

    def second_only(keys):
        hit.append(1)
        return np.arange(len(keys)) == 1 if len(hit) == 1 else np.zeros(len(keys), bool)

    card.faults = [Fault(Status.ABSENT, {Op.READ}, when=second_only)]
    jobs = group.begin(2, chunks, blocks)
    group.settle(jobs)
    finish(jobs)
    failed = [job.failed_chunks.tolist() for job in jobs]
    assert failed == [[False, True, False, False]] * 3
    good = [0, 1, 4, 5, 6, 7]
    rows = blocks.reshape(-1)[good]
    for pool in group.pools:
        assert np.array_equal(pool.pages(0, rows), held[0][good])
        assert (pool.pages(0, blocks[1]) == 0xA5).all(), "a slot that was not filled was copied"


def again(group, chunks):
    """Restore once more, elsewhere, and see that nothing is out of step."""
    elsewhere = blocks_of(20, 40, 50, 4)
    jobs = group.begin(3, chunks, elsewhere)
    group.settle(jobs)
    finish(jobs)
    assert not any(job.failed_chunks.any() for job in jobs), [job.reason for job in jobs]
    first = group.pools[0]
    for pool in group.pools[1:]:
        for index in pool.memory:
            assert np.array_equal(pool.pages(index, elsewhere), first.pages(index, elsewhere))


def test_rank_delayed_is_waited_for(stored):
    group, _, chunks, blocks, held = stored
    gate = threading.Event()
    group.ranks[1].call(lambda: gate.wait(20))
    jobs = group.begin(2, chunks, blocks)
    fast = threading.Thread(target=group.settle, args=(jobs,))
    fast.start()
    fast.join(0.5)
    assert fast.is_alive()
    gate.set()
    fast.join(20)
    finish(jobs)
    assert holds(group, blocks, held) == [True] * 3


def test_rank_gone_between_grant_and_exchange_ends_in_a_failed_load(stored):
    group, _, chunks, blocks, _ = stored
    victim = group.ranks[2]
    stopped = threading.Event()

    def hang(*_):
        stopped.wait(30)
        raise TransferError("gone")

    victim.fanout.restore = hang
    for rank in group.ranks[:2]:
        rank.fanout._settings = FanoutSettings(1 << 20, 2, max_ahead=4, timeout_s=0.5)
    jobs = group.begin(2, chunks, blocks)
    try:
        for job in jobs[:2]:
            for cache in job.caches:
                job.wait_proven(job.wait_cache(cache.index))
            assert job.failed_blocks == set(blocks.reshape(-1).tolist())
        wait_until(lambda: all(rank.off for rank in group.ranks[:2]), 5, "off")
        reasons = [rank.off_reason for rank in group.ranks[:2]]
        assert any("did not end within" in reason for reason in reasons), reasons
    finally:
        stopped.set()

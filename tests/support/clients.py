"""SDK clients over pages in host memory, against a real gateway.

with Serving() as serving:
    team = Team(serving.address, pools(2, kind="sharded"))
    team.start(); team.save(1, chunks, blocks); team.restore(2, chunks, blocks)
"""

import os
import time

import numpy as np

from adp_kv.layout.geometry import CacheGeometry
from adp_kv.sdk.jobs import Job
from adp_kv.sdk.lookup import LookupClient
from adp_kv.sdk.rank_client import RESTORE, SAVE_REST, RankClient, declare
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello
from tests.support.movers import FakeMover
from tests.support.process import wait_until

NUM_BLOCKS = 64
BLOCKS_PER_CHUNK = 2


class Pool:
    """One rank's pages: caches with a stride wider than a page.

    Args:
        caches: (index, page_bytes) of each cache.
        place: slice_idx, num_slices, replica_idx, num_replicas of all of them.
    """

    def __init__(self, caches, place=(0, 1, 0, 1)):
        self.memory, self.caches = {}, []
        for index, page_bytes in caches:
            stride = page_bytes + 64
            memory = np.zeros((NUM_BLOCKS, stride), dtype=np.uint8)
            self.memory[index] = memory
            self.caches.append(
                CacheGeometry(
                    index,
                    f"layer.{index}",
                    memory.ctypes.data,
                    stride,
                    page_bytes,
                    NUM_BLOCKS,
                    BLOCKS_PER_CHUNK,
                    *place,
                )
            )
        self.scratch = np.zeros(1 << 16, dtype=np.uint8)

    def pages(self, index, blocks):
        """Return a copy of blocks' pages: uint8 [blocks, page_bytes]."""
        page_bytes = self.memory[index].shape[1] - 64
        return self.memory[index][np.asarray(blocks).reshape(-1), :page_bytes].copy()

    def fill(self, seed):
        for index, memory in self.memory.items():
            memory[:] = np.random.default_rng([seed, index]).integers(0, 256, memory.shape)

    def clear(self):
        for memory in self.memory.values():
            memory[:] = 0xA5


def pools(world_size, kind="sharded", sizes=(1000, 1000, 2048)):
    """Return the pools of an engine's ranks, filled as such ranks would be."""
    every = []
    for rank in range(world_size):
        caches = list(enumerate(sizes))
        place = (rank, world_size, 0, 1)
        if kind == "replicated":
            place = (0, 1, rank, world_size)
        elif kind == "staged":
            place = (0, 1, 0, 1)
            caches = [c for c in caches if c[0] % world_size == rank]
        every.append(Pool(caches, place))
        every[-1].fill(7 if kind == "replicated" else rank)
    return every


def blocks_of(*first_blocks):
    """Return int64 [n, BLOCKS_PER_CHUNK] of chunks whose blocks start there."""
    starts = np.array(first_blocks, dtype=np.int64)
    return starts[:, None] + np.arange(BLOCKS_PER_CHUNK)


class Team:
    """The clients of one engine: ranks, and the scheduler side."""

    def __init__(
        self, address, pools, engine="team", timeout_s=2.0, connect_timeout_s=30.0, movers=None
    ):
        self.pools = pools
        self.movers = movers or [FakeMover() for _ in pools]
        facts = {
            "version": PROTOCOL_VERSION,
            "release": "test",
            "engine": engine,
            "world_size": len(pools),
            "namespace": bytes(16),
            "pid": os.getpid(),
        }
        self.ranks = [
            RankClient(
                Hello(rank=rank, caches=declare(pool.caches), **facts),
                pool.caches,
                mover,
                pool.scratch.ctypes.data,
                address,
                timeout_s,
                connect_timeout_s,
            )
            for rank, (pool, mover) in enumerate(zip(pools, self.movers, strict=True))
        ]
        self.lookup = LookupClient(
            Hello(rank=-1, caches=[], **facts), address, timeout_s, connect_timeout_s
        )
        self.clients = [*self.ranks, self.lookup]

    def start(self, *, settle=True):
        for client in self.clients:
            client.start()
        if settle:
            for client in self.clients:
                assert client.wait_settled(), client.off_reason
        return self

    def stored(self, chunks):
        ticket = self.lookup.ask(chunks, 5.0)
        wait_until(lambda: ticket.stored is not None, 5, "the lookup is answered")
        return ticket.stored.tolist()

    def jobs(self, number, chunks, blocks, timeout_s=10.0):
        """Return a job for each rank over all of its caches."""
        return [Job(number, chunks, blocks, pool.caches, timeout_s) for pool in self.pools]

    def submit_saves(self, jobs):
        for rank, job in zip(self.ranks, jobs, strict=True):
            rank.submit_save(job, SAVE_REST, job.caches, rank.mover.mark())

    def submit_restores(self, jobs):
        for rank, job in zip(self.ranks, jobs, strict=True):
            rank.submit_restore(job, RESTORE, rank.mover.mark())

    def save(self, number, chunks, blocks):
        """Save on all ranks and wait until the gateway has it."""
        jobs = self.jobs(number, chunks, blocks)
        self.submit_saves(jobs)
        finish(jobs)
        assert not any(job.failed_chunks.any() for job in jobs)
        wait_until(lambda: all(self.stored(chunks)), 5, "stored")

    def restore(self, number, chunks, blocks):
        """Restore on all ranks, cache by cache; return the jobs."""
        jobs = self.jobs(number, chunks, blocks)
        self.submit_restores(jobs)
        for job in jobs:
            for cache in job.caches:
                for ticket in job.wait_cache(cache.index):
                    ticket.fence()
        finish(jobs)
        return jobs

    def close(self):
        """Close all clients; none may take long."""
        for mover in self.movers:
            if isinstance(mover, FakeMover):
                mover.gate.set()
        for client in self.clients:
            began = time.monotonic()
            client.close()
            assert time.monotonic() - began < 3, "a client is slow to close"
            assert not client._thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()


def finish(jobs, timeout_s=10.0):
    """Wait until nothing of the jobs touches a page any more."""
    wait_until(lambda: all(job.finished for job in jobs), timeout_s, "the jobs have ended")

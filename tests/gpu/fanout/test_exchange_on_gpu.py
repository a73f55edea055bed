"""NCCL keeps the contract of exchanges, on as many devices as there are."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks._ranks import Ranks
from tests.support.exchange_contract import ExchangeContract, Member

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


class NcclMember(Member):
    """A rank on its own device, in a process of its own."""

    def __init__(self, rank, num_ranks, everyone):
        import torch

        from adp_kv.fanout.nccl import NcclLibrary, open_nccl

        self.torch = torch
        torch.cuda.set_device(rank)
        library = NcclLibrary()
        said = everyone(library.unique_id() if rank == 0 else b"")
        super().__init__(
            open_nccl(
                library,
                said[0],
                rank,
                num_ranks,
                bind_device=lambda: torch.cuda.set_device(rank),
                max_ctas=16,
                timeout_s=60.0,
            )
        )
        self.one_stream = torch.cuda.Stream()

    def allocate(self, num_bytes):
        return self.torch.zeros(num_bytes, dtype=self.torch.uint8, device="cuda")

    def address(self, memory):
        return memory.data_ptr()

    def write(self, memory, at, data):
        memory[at : at + data.size] = self.torch.from_numpy(data).cuda()
        self.torch.cuda.current_stream().synchronize()

    def read(self, memory):
        return np.asarray(memory.cpu())

    def stream(self):
        return self.one_stream.cuda_stream

    def wait(self, limit_s):
        end, deadline = self.one_stream.record_event(), time.monotonic() + limit_s
        while not end.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


class Group:
    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.ranks = Ranks(NcclMember, num_ranks)

    def each(self, name, *args):
        return self.ranks.call(name, *args)


class TestNcclExchange(ExchangeContract):
    @pytest.fixture
    def group(self):
        import torch

        group = Group(min(8, torch.cuda.device_count()))
        yield group
        group.ranks.close()

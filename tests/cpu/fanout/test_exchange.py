"""The group in one process keeps the contract of exchanges; NCCL's by tests/gpu/fanout."""

import ctypes
import time

import numpy as np
import pytest

from adp_kv.fanout import nccl
from adp_kv.fanout.exchange import ExchangeError
from tests.support.exchange_contract import ExchangeContract, Member
from tests.support.exchanges import LocalGroup
from tests.support.fake_cuda import FakeDevice


class LocalMember(Member):
    """A rank whose device runs while it waits."""

    def __init__(self, exchange, device, others):
        super().__init__(exchange)
        self.device, self.others = device, others
        self.one_stream = device.stream(0)

    def allocate(self, num_bytes):
        return self.device.allocate(num_bytes).numpy()

    def address(self, memory):
        return memory.ctypes.data

    def write(self, memory, at, data):
        memory[at : at + data.size] = data

    def read(self, memory):
        return memory

    def stream(self):
        return self.one_stream.cuda_stream

    def wait(self, limit_s):
        end, deadline = self.device.record(self.one_stream), time.monotonic() + min(limit_s, 2)
        while not end.query():
            for device in self.others:
                device.step(1)
            if time.monotonic() > deadline:
                return False
        return True


class Local:
    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        devices = [FakeDevice(rank) for rank in range(num_ranks)]
        exchanges = LocalGroup(num_ranks).exchanges(devices)
        self.members = [
            LocalMember(exchange, device, devices)
            for exchange, device in zip(exchanges, devices, strict=True)
        ]

    def each(self, name, *args):
        return [getattr(member, name)(*args) for member in self.members]


class TestLocalExchange(ExchangeContract):
    @pytest.fixture(params=[2, 3, 8])
    def group(self, request):
        return Local(request.param)


class Calls:
    """A library that notes what is called."""

    def __init__(self):
        self.names = []

    def call(self, name, *args):
        self.names.append((name, *args))


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 2), (0, 4), (3, 4), (5, 8)])
def test_nccl_is_asked_for_every_region(rank, num_ranks):
    library = Calls()
    exchange = nccl.NcclExchange(library, ctypes.c_void_p(1), rank, num_ranks)
    exchange.all_gather(10_000, 256, 7)
    names = [name for name, *_ in library.names]
    mine = 10_000 + rank * 256
    if num_ranks == 2:
        assert library.names == [("ncclAllGather", mine, 10_000, 256, 1, exchange._comm, 7)]
        return
    assert (names[0], names[-1]) == ("ncclGroupStart", "ncclGroupEnd")
    sent = {args[4]: args[1] for args in library.names if args[0] == "ncclSend"}
    received = {args[4]: args[1] for args in library.names if args[0] == "ncclRecv"}
    peers = set(range(num_ranks)) - {rank}
    assert sent == dict.fromkeys(peers, mine)
    assert received == {peer: 10_000 + peer * 256 for peer in peers}


class Failing(Calls):
    """A library of which one function does not succeed."""

    def __init__(self, name):
        super().__init__()
        self.fails = name

    def call(self, name, *args):
        super().call(name, *args)
        if name == self.fails:
            raise ExchangeError(f"{name}: unhandled system error (2)")


def test_nccl_group_that_can_not_be_queued_is_closed():
    """A group left open would swallow what this thread calls next."""
    library = Failing("ncclSend")
    exchange = nccl.NcclExchange(library, ctypes.c_void_p(1), 0, 4)
    with pytest.raises(ExchangeError, match="ncclSend"):
        exchange.all_gather(10_000, 256, 7)
    assert [name for name, *_ in library.names] == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]


def test_nccl_communicator_is_aborted_once_and_then_left_alone(caplog):
    library = Failing("ncclCommAbort")
    exchange = nccl.NcclExchange(library, ctypes.c_void_p(1), 0, 2)
    exchange.abort()
    exchange.abort()
    with pytest.raises(ExchangeError, match="aborted"):
        exchange.all_gather(10_000, 256, 7)
    assert library.names == [("ncclCommAbort", exchange._comm)]
    assert "unhandled system error" in caplog.text


def test_nccl_config_has_the_layout_of_2_18():
    offsets = [getattr(nccl._Config, name).offset for name, _ in nccl._Config._fields_]
    assert offsets == [0, 8, 12, 16, 20, 24, 28, 32, 40]
    assert ctypes.sizeof(nccl._Config) == 48


class Slow(Calls):
    def call(self, name, *args):
        time.sleep(0.5)


def test_communicator_that_nobody_joins_is_given_up():
    with pytest.raises(ExchangeError, match=r"within 0\.05 s"):
        nccl.open_nccl(
            Slow(), bytes(128), 0, 2, bind_device=lambda: None, max_ctas=8, timeout_s=0.05
        )


def test_device_that_can_not_be_bound_is_an_exchange_error():
    def bind():
        raise RuntimeError("no such device")

    with pytest.raises(ExchangeError, match="no such device"):
        nccl.open_nccl(Calls(), bytes(128), 0, 2, bind_device=bind, max_ctas=8, timeout_s=5.0)


def test_regions_are_random():
    """The contract would hold for nothing if all regions were alike."""
    member = Member(None)
    assert not np.array_equal(member.region(0, 0, 256), member.region(0, 1, 256))

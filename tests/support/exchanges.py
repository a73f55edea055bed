"""A group of ranks in one process, on devices whose streams run in any order (fake_cuda).

What the contract of adp_kv.fanout.exchange says, without NCCL: an exchange is queued on a
stream, publishes the rank's region when the stream gets there, and lets the stream go on
when every rank's has been published, or after abort().
"""

import ctypes
import threading

from typing_extensions import override

from adp_kv.fanout.exchange import Exchange, ExchangeError
from tests.support.fake_cuda import FakeEvent


class LocalGroup:
    """What the ranks of a group share."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.lock = threading.Lock()
        self.published = {}  # (call, rank): bytes of the region

    def exchanges(self, devices):
        return [LocalExchange(self, rank, device) for rank, device in enumerate(devices)]


class _AllThere(FakeEvent):
    def __init__(self, exchange, call):
        self._exchange = exchange
        self._call = call

    @property
    def happened(self):
        group = self._exchange.group
        with group.lock:
            there = all((self._call, rank) in group.published for rank in range(group.num_ranks))
        return there or self._exchange.aborted


class LocalExchange(Exchange):
    """One rank's end.

    Attributes:
        fail_next: how many of the next calls can't be queued.
        calls: region_bytes of every call.
    """

    def __init__(self, group, rank, device):
        super().__init__(rank, group.num_ranks)
        self.group = group
        self.device = device
        self.aborted = False
        self.fail_next = 0
        self.calls = []

    @override
    def all_gather(self, address, region_bytes, stream):
        if self.aborted:
            raise ExchangeError("aborted")
        if self.fail_next:
            self.fail_next -= 1
            raise ExchangeError("the fake can't queue it")
        call = len(self.calls)
        self.calls.append(region_bytes)
        queue = self.device.stream_of(stream)
        queue.add(lambda: self._publish(call, address, region_bytes))
        queue.wait_event(_AllThere(self, call))
        queue.add(lambda: self._take(call, address, region_bytes))

    def _publish(self, call, address, region_bytes):
        mine = ctypes.string_at(address + self.rank * region_bytes, region_bytes)
        with self.group.lock:
            self.group.published[call, self.rank] = mine

    def _take(self, call, address, region_bytes):
        if self.aborted:
            return  # whatever lies there
        for rank in range(self.num_ranks):
            theirs = self.group.published[call, rank]
            assert len(theirs) == region_bytes, "ranks exchange regions of different sizes"
            ctypes.memmove(address + rank * region_bytes, theirs, region_bytes)

    @override
    def abort(self):
        self.aborted = True

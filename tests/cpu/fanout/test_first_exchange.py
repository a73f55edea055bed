"""Ranks that make a communicator try it: what does not work is aborted, and nobody waits on."""

import threading

import pytest

from tests.support.fake_cuda import FakeDevice, FakeEvent

torch = pytest.importorskip("torch")
from adp_kv.errors import TransferError  # noqa: E402
from adp_kv.fanout import start  # noqa: E402
from adp_kv.fanout.fanout import Fanout  # noqa: E402
from adp_kv.fanout.flags import flags_bytes, shared_memory  # noqa: E402
from adp_kv.transfer.copy_engine import CopyEngine  # noqa: E402
from adp_kv.transfer.cuda_mover import CudaMover  # noqa: E402
from adp_kv.transfer.registration import RingRegistration  # noqa: E402
from adp_kv.transfer.settings import MoverSettings  # noqa: E402
from tests.support.exchanges import LocalExchange, LocalGroup  # noqa: E402
from tests.support.fanouts import SMALL  # noqa: E402

RANKS = (3, 5)


class Rig:
    """Two ranks whose communicator is a group in this process."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(start, "NcclLibrary", lambda: None)
        monkeypatch.setattr(start, "open_nccl", self._open)
        self.devices = [FakeDevice(rank) for rank in range(len(RANKS))]
        self.exchanges = LocalGroup(len(RANKS)).exchanges(self.devices)
        self.max_ctas = set()

    def _open(self, _library, _id, place, num_ranks, *, bind_device, max_ctas, timeout_s):
        assert num_ranks == len(RANKS)
        self.max_ctas.add(max_ctas)
        return self.exchanges[place]

    def make(self, places):
        """Let ranks make their fan-out, all at once; return what came, or the error."""
        came = {}
        with shared_memory(flags_bytes(SMALL.max_ahead, len(RANKS))) as path:

            def one(place):
                device = self.devices[place]
                mover = CudaMover(
                    device, CopyEngine(device, device), RingRegistration(device, 0), MoverSettings()
                )
                try:
                    joined = start._Joined(RANKS, place, bytes(128), path)
                    came[place] = start._make(mover, joined, SMALL)
                except TransferError as error:
                    came[place] = error

            threads = [threading.Thread(target=one, args=(place,)) for place in places]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        return [came[place] for place in places]


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_ranks_that_exchanged_have_their_fan_out(rig):
    made = rig.make([0, 1])
    assert all(isinstance(one, Fanout) and one.ranks == RANKS for one in made)
    assert not any(exchange.aborted for exchange in rig.exchanges)
    assert rig.max_ctas == {SMALL.max_ctas}
    for one in made:
        one.close(0.0)


def test_exchange_that_brings_something_else_is_not_used(rig, monkeypatch):
    publish = LocalExchange._publish

    def publish_zeros(self, call, address, region_bytes):
        publish(self, call, address, region_bytes)
        if self.rank:
            self.group.published[call, self.rank] = bytes(region_bytes)

    monkeypatch.setattr(LocalExchange, "_publish", publish_zeros)
    for error in rig.make([0, 1]):
        assert isinstance(error, TransferError)
        assert "the first exchange brought [1, 0]" in str(error)
    assert all(exchange.aborted for exchange in rig.exchanges)


def test_rank_that_nobody_meets_gives_up(rig, monkeypatch):
    monkeypatch.setattr(start, "JOIN_TIMEOUT_S", 0.05)
    (error,) = rig.make([1])
    assert isinstance(error, TransferError)
    assert "did not end within" in str(error)
    assert rig.exchanges[1].aborted, "its kernel would wait for ever"

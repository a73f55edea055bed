# ruff: noqa: N802  # the stub's names are cupy's
import threading

import pytest

from adp_kv.errors import TransferError
from adp_kv.transfer.registration import RingRegistration

BASE = 1 << 30


class StubRuntime:
    """cudart as far as registration sees it; refuses the addresses in `refuse`."""

    def __init__(self, refuse=()):
        self.refuse = refuse
        self.registered = {}
        self.errors_cleared = 0
        self.devices = set()
        self._lock = threading.Lock()

    def setDevice(self, device):
        self.devices.add(device)

    def hostRegister(self, ptr, size, flags):
        if ptr in self.refuse:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        with self._lock:
            self.registered[ptr] = size

    def hostUnregister(self, ptr):
        if ptr not in self.registered:
            raise RuntimeError("cudaErrorHostMemoryNotRegistered")
        del self.registered[ptr]

    def getLastError(self):
        self.errors_cleared += 1


def test_register_covers_ring_in_pieces():
    runtime = StubRuntime()
    ring = RingRegistration(runtime, 3, piece_bytes=8192)
    ring.register(BASE, 20_000)
    assert runtime.registered == {BASE: 8192, BASE + 8192: 8192, BASE + 16384: 20_000 - 16384}
    assert ring.borders.tolist() == [BASE + 8192, BASE + 16384]
    assert ring.covers(BASE, BASE + 20_000)
    assert not ring.covers(BASE, BASE + 20_001)
    assert runtime.devices == {3}


def test_register_failure_names_remedy_and_undoes():
    runtime = StubRuntime(refuse=[BASE + 8192])
    ring = RingRegistration(runtime, 0, piece_bytes=8192)
    with pytest.raises(TransferError, match=r"ulimit -l.*shared_memory_size"):
        ring.register(BASE, 20_000)
    assert runtime.registered == {}
    assert runtime.errors_cleared == 1
    assert not ring.covers(BASE, BASE + 1)
    runtime.refuse = ()
    ring.register(BASE, 20_000)
    assert ring.covers(BASE, BASE + 1)


def test_unregister_twice_and_after_loss():
    runtime = StubRuntime()
    ring = RingRegistration(runtime, 0)
    ring.register(BASE, 4096)
    runtime.registered.clear()  # the device is gone
    ring.unregister()
    ring.unregister()
    assert runtime.errors_cleared == 1
    assert ring.borders.size == 0


@pytest.mark.parametrize("num_bytes", [0, -4096])
def test_register_nothing_raises(num_bytes):
    with pytest.raises(TransferError):
        RingRegistration(StubRuntime(), 0).register(BASE, num_bytes)


def test_register_twice_raises():
    ring = RingRegistration(StubRuntime(), 0)
    ring.register(BASE, 4096)
    with pytest.raises(TransferError, match="already"):
        ring.register(BASE, 4096)

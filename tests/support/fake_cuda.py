# ruff: noqa: N802  # the runtime's names are cupy's
"""A CUDA device whose streams run their work late and in any order that events allow.

Device memory is host memory. What is queued runs when step() or an event's query picks
its stream at random, so memory that is reused too early shows up as wrong bytes.
"""

import collections
import ctypes
import random
import threading
import weakref

import numpy as np
import torch

from adp_kv.kernels.reference import copy_pages_reference


class FakeEvent:
    def __init__(self, device):
        self._device = device
        self.happened = False
        self.cuda_event = device.handle_of(self)

    def query(self):
        self._device.step(3)
        return self.happened


class ReusedEvent:
    """An event that is recorded again and again: who waits, waits for the last time before.

    It has a handle from the first time on, as torch's have.
    """

    def __init__(self, device):
        self._device = device
        self.last = None
        self.cuda_event = 0

    def record(self, stream):
        self.last = self._device.record(stream)
        self.cuda_event = self.cuda_event or self._device.handle_of(self)

    def query(self):
        return self.last.query()


class Exemption:
    """A CaptureSafe: used again and again, by one thread at a time and not within itself."""

    def __init__(self, threads):
        self._threads = threads
        self._is_entered = False

    def __enter__(self):
        assert not self._is_entered
        self._is_entered = True
        self._threads.append(threading.get_ident())

    def __exit__(self, *_):
        self._threads.remove(threading.get_ident())
        self._is_entered = False


class FakeStream:
    def __init__(self, device, number):
        self._device = device
        self.cuda_stream = number
        self.queue = []

    def wait_event(self, event):
        self._device.counts["wait"] += 1
        self.queue.append(event.last if isinstance(event, ReusedEvent) else event)

    def add(self, work):
        self.queue.append(work)

    def synchronize(self):
        while self.queue:
            self._device.step(1)


class FakeDevice:
    """Stands for TorchDevice, cupy's runtime and the batched copy at once."""

    index = 0

    def __init__(self, seed=0):
        self._random = random.Random(seed)
        self._lock = threading.RLock()  # polled by more threads than one
        self._streams = {}
        self._memory = []  # what is allocated stays, as a device's staging does
        self._events = weakref.WeakValueDictionary()
        self._num_events = 0
        self._exempt = []
        self._bound = set()
        self.main = self.stream(0)
        self.fail_copies = False
        self.fail_batches = False
        self.calls = []
        self.counts = collections.Counter()  # of waits and records
        self.name = "a device"
        self.registered = set()

    def step(self, count):
        """Run up to count queued works on streams that may run."""
        with self._lock:
            self._step(count)

    def _step(self, count):
        for _ in range(count):
            ready = [s for s in self._streams.values() if s.queue and self._may_run(s.queue[0])]
            if not ready:
                return
            work = self._random.choice(ready).queue.pop(0)
            if not isinstance(work, FakeEvent):
                work()

    def _may_run(self, work):
        return not isinstance(work, FakeEvent) or work.happened

    def _allocate(self, count, dtype):
        self._memory.append(torch.zeros(count, dtype=dtype))
        return self._memory[-1]

    # TorchDevice
    def machine(self):
        return self.name

    def bind(self):
        self._bound.add(threading.get_ident())

    def is_bound(self):
        """Return whether it is the calling thread's device."""
        return threading.get_ident() in self._bound

    def capture_safe(self):
        return Exemption(self._exempt)

    def is_exempt(self):
        """Return whether the calling thread's calls end nobody's capture."""
        return threading.get_ident() in self._exempt

    def stream(self, _priority):
        stream = FakeStream(self, len(self._streams) + 1)
        self._streams[stream.cuda_stream] = stream
        return stream

    def is_idle(self):
        """Return whether no stream has anything to do but the compute stream."""
        return not any(s.queue for s in self._streams.values() if s is not self.main)

    def stream_of(self, handle):
        return self._streams[handle]

    def current_stream(self):
        return self.main

    def record(self, stream):
        self.counts["record"] += 1
        event = FakeEvent(self)
        stream.add(lambda: setattr(event, "happened", True))
        return event

    def event(self):
        return ReusedEvent(self)

    def handle_of(self, event):
        self._num_events += 1
        self._events[self._num_events] = event
        return self._num_events

    def prepare(self):
        pass

    def launch_prepared(
        self, stream, src_addrs, dst_addrs, num_pages, page_bytes, *, align, num_programs
    ):
        # Read when the kernel runs, as on a device.
        tables = src_addrs[:num_pages], dst_addrs[:num_pages]
        self.launch(stream, *tables, page_bytes, align=align, num_programs=num_programs)

    def launch_table(self, stream, table, page_bytes, *, align, num_programs):
        words, first, row_words, num_pages, _ = table
        assert first % 2 == row_words % 2 == words.data_ptr() % 16 == 0, "not as it was compiled"
        rows = words[first:], words[first + row_words :]
        self.launch_prepared(
            stream, *rows, num_pages, page_bytes, align=align, num_programs=num_programs
        )

    def allocate(self, num_bytes):
        return self._allocate(num_bytes, torch.uint8)

    def allocate_pinned(self, num_words):
        return self._allocate(num_words, torch.int64)

    def launch(self, stream, src_addrs, dst_addrs, page_bytes, *, align, num_programs):
        self.calls.append(("launch", align, num_programs))

        def run():
            src, dst = src_addrs.numpy(), dst_addrs.numpy()
            assert all(not (table % align).any() for table in (src, dst, np.array([page_bytes])))
            copy_pages_reference(src, dst, page_bytes)

        stream.add(run)

    # cupy.cuda.runtime
    def setDevice(self, device):
        assert device == 0

    def hostRegister(self, ptr, size, flags):
        self.registered.add(ptr)

    def hostUnregister(self, ptr):
        self.registered.remove(ptr)

    def memcpyAsync(self, dst, src, size, kind, stream):
        self._copy("1-D", stream, lambda: ctypes.memmove(dst, src, size))

    def memcpy2DAsync(  # noqa: PLR0913, PLR0917
        self, dst, dpitch, src, spitch, width, height, kind, stream
    ):
        def run():
            for row in range(height):
                ctypes.memmove(dst + row * dpitch, src + row * spitch, width)

        self._copy("2-D", stream, run)

    def streamWaitEvent(self, stream, event):
        self._streams[stream].wait_event(self._events[event])

    # BatchCopy
    def copy(self, dst_addrs, src_addrs, sizes, stream):
        copies = list(zip(dst_addrs.tolist(), src_addrs.tolist(), sizes.tolist(), strict=True))
        if self.fail_batches:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        self._copy("batch", stream, lambda: [ctypes.memmove(*copy) for copy in copies])

    def _copy(self, name, stream, run):
        if self.fail_copies:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        self.calls.append((name,))
        self._streams[stream].add(run)

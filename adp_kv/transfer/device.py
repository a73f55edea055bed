"""One CUDA device as the mover uses it: streams, events, memory, launches.

CUDA forbids some calls (event queries, allocations) in every thread while any thread
captures a graph in the default mode; whoever makes one ends that capture. So calls that
may fall into a capture run inside capture_safe(), which exempts the calling thread.
Failure scope: errors of a lost device are RuntimeError and stay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from adp_kv.transfer.runtime import CudaRuntime

if TYPE_CHECKING:
    from adp_kv.kernels.prepared import PreparedCopy

_CAPTURE_RELAXED = 2
_WORD_BYTES = 8


class CaptureSafe:
    """A context in which the calling thread's calls end nobody's capture.

    It may be used again, by one thread at a time and not within itself.
    """

    __slots__ = ("_exchange", "_mode", "_reference")

    def __init__(self, exchange: Callable[[object], object]) -> None:
        self._exchange = exchange
        self._mode = ctypes.c_int()
        self._reference = ctypes.byref(self._mode)

    def __enter__(self) -> None:
        self._mode.value = _CAPTURE_RELAXED
        self._exchange(self._reference)  # swaps: it now holds what was set before

    def __exit__(self, *_: object) -> None:
        self._exchange(self._reference)


class Table(NamedTuple):
    """int64 [2, row_words]: sources and targets of num_pages copies; valid until its event.

    Attributes:
        words: where it lies, beside others.
        first: the word at which it starts.
        row_words: words from one row to the next.
        num_pages: words used of each row.
        ends: of what reads the pinned words: by stream, the last.
    """

    words: torch.Tensor
    first: int
    row_words: int
    num_pages: int
    ends: dict[int, torch.cuda.Event]

    def hold_until(self, event: torch.cuda.Event, stream: int) -> None:
        """Keep the pinned table until the event has happened; called before the next take().

        Args:
            event: recorded on the stream, behind what reads the table.
            stream: handle.
        """
        self.ends[stream] = event


class TorchDevice:
    """A CUDA device, through torch."""

    def __init__(self, device: torch.device, runtime: CudaRuntime) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        self.index = index
        self._device = torch.device("cuda", index)
        self._runtime = runtime
        self._prepared: dict[int, PreparedCopy | None] = {}
        self._current: tuple[object, torch.cuda.Stream | None] = (None, None)
        self._exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode

    def bind(self) -> None:
        """Make this the calling thread's device, for torch and for cupy."""
        torch.cuda.set_device(self.index)
        self._runtime.setDevice(self.index)

    def capture_safe(self) -> CaptureSafe:
        """Let the calling thread use CUDA while another thread captures a graph."""
        return CaptureSafe(self._exchange)

    def machine(self) -> str:
        """Return what a measurement holds for: the device, its driver, torch's CUDA."""
        found = torch.cuda.get_device_properties(self.index)
        driver = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
        return f"{found.name}, {found.uuid}, driver {driver.value}, CUDA {torch.version.cuda}"

    def stream(self, priority: int) -> torch.cuda.Stream:
        """Return a new stream; a lower priority runs first."""
        return torch.cuda.Stream(self._device, priority)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream on this device.

        As torch does, but without a new object each time: most of a fence and of a mark.
        """
        name = torch._C._cuda_getCurrentStream(self.index)  # noqa: SLF001
        known, stream = self._current
        if stream is None or name != known:
            stream = torch.cuda.current_stream(self.index)
            self._current = name, stream  # as one: other threads have streams of their own
        return stream

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return a new event that happens when the stream has got here."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def event(self) -> torch.cuda.Event:
        """Return an event to record again and again; who waits, waits for the last time before.

        It has a handle (cuda_event) from the first time on.
        """
        return torch.cuda.Event()

    def prepare(self) -> None:
        """Compile the page kernels for launch_prepared() and launch_table()."""
        from adp_kv.kernels.prepared import prepare  # noqa: PLC0415  # imports Triton

        scratch = self.allocate(256)
        for align in (16, 8, 1):
            self._prepared[align] = prepare(scratch, self.current_stream(), align)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def allocate_pinned(self, num_words: int) -> torch.Tensor:
        """Return int64 [num_words] in host memory that the device reads at the same address."""
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def launch(
        self,
        stream: torch.cuda.Stream,
        src_addrs: torch.Tensor,
        dst_addrs: torch.Tensor,
        page_bytes: int,
        *,
        align: int,
        num_programs: int,
    ) -> None:
        """Launch copy_pages on a stream."""
        from adp_kv.kernels.launch import copy_pages  # noqa: PLC0415  # imports Triton

        with torch.cuda.stream(stream):
            copy_pages(src_addrs, dst_addrs, page_bytes, align=align, num_programs=num_programs)

    def launch_prepared(
        self,
        stream: torch.cuda.Stream,
        src_addrs: torch.Tensor,
        dst_addrs: torch.Tensor,
        num_pages: int,
        page_bytes: int,
        *,
        align: int,
        num_programs: int,
    ) -> None:
        """As launch(), for the first num_pages of whole tables, and quickly once prepare() ran."""
        prepared = self._prepared.get(align)
        if prepared is None:
            sources, targets = src_addrs[:num_pages], dst_addrs[:num_pages]
            self.launch(
                stream, sources, targets, page_bytes, align=align, num_programs=num_programs
            )
            return
        prepared.launch(
            stream.cuda_stream,
            src_addrs.data_ptr(),
            dst_addrs.data_ptr(),
            num_pages,
            page_bytes,
            num_programs,
        )

    def launch_table(
        self,
        stream: torch.cuda.Stream,
        table: Table,
        page_bytes: int,
        *,
        align: int,
        num_programs: int,
    ) -> None:
        """As launch_prepared(), for the pages of a table in pinned or in the device's memory."""
        words, first, row_words, num_pages, _ = table
        prepared = self._prepared.get(align)
        if prepared is None:
            sources = words[first : first + num_pages]
            targets = words[first + row_words : first + row_words + num_pages]
            self.launch(
                stream, sources, targets, page_bytes, align=align, num_programs=num_programs
            )
            return
        source = words.data_ptr() + first * _WORD_BYTES
        target = source + row_words * _WORD_BYTES
        prepared.launch(stream.cuda_stream, source, target, num_pages, page_bytes, num_programs)

"""The mover of a CUDA device (see base for the contract).

Owning thread: the client's; mark() and a ticket's fence() may be called by the thread
that runs the forward pass. Streams: two a direction, its own. In steady state nothing is
allocated on the device, nothing synchronises, and other threads may capture graphs.
CUDA's queue of a stream is finite, and a caller that fills it waits inside CUDA.
Failure scope: a transfer; a lost device fails every later call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from adp_kv.errors import TransferError
from adp_kv.transfer.base import Mark, Mover, SliceCopy, Ticket
from adp_kv.transfer.copy_engine import BatchCopy, CopyEngine, open_batch
from adp_kv.transfer.device import TorchDevice
from adp_kv.transfer.hardware import Hardware
from adp_kv.transfer.pipes import Pipe
from adp_kv.transfer.plan import Limits, Thresholds, check_copy, make_plan
from adp_kv.transfer.registration import RingRegistration
from adp_kv.transfer.runtime import load_runtime
from adp_kv.transfer.settings import MoverSettings
from adp_kv.transfer.tuning import tune

logger = logging.getLogger(__name__)

_DRAIN_S = 10.0
"""How long transfers in flight may take to end: gigabytes, unless the device hangs."""


class CudaTicket(Ticket):
    """Ends when its event has happened; None is a transfer of nothing."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: TorchDevice, event: torch.cuda.Event | None) -> None:
        self._device = device
        self._event = event

    @override
    def done(self) -> bool:
        if self._event is None:
            return True
        try:
            with self._device.capture_safe():
                return bool(self._event.query())
        except RuntimeError as error:
            raise TransferError(f"the device failed during a transfer: {error}") from error

    @override
    def fence(self) -> None:
        if self._event is not None:
            self._device.current_stream().wait_event(self._event)


class HangingTicket(Ticket):
    """A transfer that failed, of which the device still has something to run.

    Its pages and slices are in use until the events behind all that was queued have happened.
    """

    def __init__(self, device: TorchDevice, ends: Sequence[torch.cuda.Event], problem: str) -> None:
        self._device = device
        self._ends = ends
        self._problem = problem

    @override
    def done(self) -> bool:
        try:
            with self._device.capture_safe():
                if not all(end.query() for end in self._ends):
                    return False
        except RuntimeError as error:
            raise TransferError(self._problem) from error
        raise TransferError(self._problem)

    @override
    def fence(self) -> None:
        return  # nothing to wait for: proven() says so

    @override
    def proven(self) -> bool:
        raise TransferError(self._problem)


class CudaMover(Mover):
    """Moves slices between the ring and one device's pages."""

    def __init__(
        self,
        device: TorchDevice,
        engine: CopyEngine,
        ring: RingRegistration,
        settings: MoverSettings,
    ) -> None:
        self._device = device
        self._engine = engine
        self._ring = ring
        self._settings = settings
        self._thresholds = (settings.restore, settings.save)
        self._capture_safe = device.capture_safe()  # of _start(), which never is within itself
        self._restores = Pipe(device, engine, settings, to_device=True)
        self._saves = Pipe(device, engine, settings, to_device=False)
        self._limits = self._new_limits()
        self._is_closed = False

    def use(self, restore: Thresholds, save: Thresholds) -> None:
        """Choose ways by other thresholds from the next transfer on."""
        self._thresholds = (restore, save)

    @property
    def hardware(self) -> Hardware:
        """What others that work on the same device and ring may use."""
        return Hardware(self._device, self._engine, self._ring)

    @override
    def register_ring(self, address: int, num_bytes: int) -> None:
        self._check_open()
        with self._device.capture_safe():
            self._device.bind()
            self._ring.register(address, num_bytes, self._device.capture_safe)

    def release_ring(self) -> None:
        """Wait for transfers in flight and unregister the ring; another may follow.

        Raises:
            TransferError: They did not end in time; the ring stays registered.
        """
        if not self._drain():
            raise TransferError(f"transfers did not end within {_DRAIN_S:g} s")
        with self._device.capture_safe():
            self._ring.unregister()

    @override
    def mark(self) -> Mark:
        return self._device.record(self._device.current_stream())

    @override
    def restore(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        return self._start(self._restores, self._thresholds[0], copy, after)

    @override
    def save(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        return self._start(self._saves, self._thresholds[1], copy, after)

    @override
    def close(self) -> None:
        self._is_closed = True
        self.release_ring()

    def _start(
        self, pipe: Pipe, thresholds: Thresholds, copy: SliceCopy, after: Mark | None
    ) -> Ticket:
        self._check_open()
        if not copy.page_addrs.size:
            check_copy(copy)
            return CudaTicket(self._device, None)
        assert after is None or isinstance(after, torch.cuda.Event)
        if self._limits.borders is not self._ring.borders:
            self._limits = self._new_limits()
        plan = make_plan(copy, self._limits, thresholds)
        # An address outside the ring would end the process's CUDA context.
        if not self._ring.covers(plan.low, plan.high):
            raise TransferError("slices lie outside the registered ring")
        try:
            with self._capture_safe:
                self._device.bind()
                return CudaTicket(self._device, pipe.start(plan, after))
        except (TransferError, RuntimeError) as error:
            # What was queued still reads and writes the caller's memory: the one wait
            # outside close(), since the caller will use that memory again.
            problem = f"a transfer of {copy.total_bytes} bytes failed: {error}"
            if self._drain():
                raise TransferError(problem) from error
            self._is_closed = True
            with self._capture_safe:
                ends = [*self._restores.ends(), *self._saves.ends()]
            return HangingTicket(self._device, ends, problem)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("the mover is closed")

    def _new_limits(self) -> Limits:
        return Limits(
            borders=self._ring.borders,
            staging_bytes=self._restores.buffer_bytes,
            direct_bytes=self._settings.direct_bytes,
            max_pages=self._settings.max_pages,
            has_batch=self._engine.has_batch,
        )

    def _drain(self) -> bool:
        """Wait; return whether nothing that was queued can run any more."""
        deadline = time.monotonic() + _DRAIN_S
        try:
            with self._device.capture_safe():
                self._device.bind()
                return self._restores.drain(deadline) and self._saves.drain(deadline)
        except RuntimeError:
            logger.exception("the device failed while its transfers were awaited")
            return True


def open_cuda_mover(device: torch.device, settings: MoverSettings) -> CudaMover:
    """Open a mover and compile its kernels, so that no transfer does.

    Raises:
        TransferError: cupy is missing or the device can't be used.
    """
    runtime = load_runtime()
    try:
        api = TorchDevice(device, runtime)
        api.bind()
        engine = CopyEngine(runtime, _probe_batch(api))
        api.prepare()
        ring = RingRegistration(
            runtime,
            api.index,
            piece_bytes=settings.register_piece_bytes,
            num_threads=settings.register_threads,
        )
        mover = CudaMover(api, engine, ring, settings)
    except (OSError, RuntimeError) as error:
        raise TransferError(f"{device} can't be used for transfers: {error}") from error
    if settings.tuning_folder is not None:
        tune(mover, api, settings.tuning_folder, has_batch=engine.has_batch)
    return mover


def _probe_batch(api: TorchDevice) -> BatchCopy | None:
    """Return batched copies if the driver has them and they move bytes."""
    batch = open_batch()
    if batch is None:
        return None
    stream = api.stream(0)
    source, target = api.allocate(64), api.allocate(64)
    source.fill_(7)
    target.fill_(0)
    api.current_stream().synchronize()
    steps = np.arange(4, dtype=np.int64) * 16
    sizes = np.full(4, 16, dtype=np.int64)
    try:
        batch.copy(target.data_ptr() + steps, source.data_ptr() + steps, sizes, stream.cuda_stream)
    except TransferError as error:
        logger.info("batched copies are not used: %s", error)
        return None
    stream.synchronize()
    return batch if torch.equal(source, target) else None

"""Copies of the copy engine: rows, strided rows and batches, between host and device.

Owning thread: the mover's. Streams are handles. Failure scope: an error names one copy;
what was queued before it still runs.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import TransferError
from adp_kv.transfer.extents import Extents, OneCopy
from adp_kv.transfer.runtime import CudaRuntime

_TO_DEVICE = 1
_TO_HOST = 2
BATCH_ENTRIES = 128
"""Entries of a batched call. H200, copies from 64 KiB on: 0.91 to 0.97 at 128, 0.85 at 1024."""
_FEW = 3
"""Copies up to this number go by a call each."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access in stream order, beside compute, locations not hinted."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """Many one-dimensional copies in one driver call."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        """Find the call in libcuda.

        Raises:
            AttributeError: The driver is older than CUDA 12.8.
        """
        self._has_fail_idx = not hasattr(driver, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._has_fail_idx else "cuMemcpyBatchAsync_v2"
        self._call = getattr(driver, name)
        self._attributes = _Attributes(src_access_order=1, flags=1)
        self._first = ctypes.c_size_t(0)
        self._fail_idx = ctypes.c_size_t(0)

    def copy(
        self,
        dst_addrs: NDArray[np.int64],
        src_addrs: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue the copies; the tables are read before this returns.

        Raises:
            TransferError: The driver refused them.
        """
        tables = [np.ascontiguousarray(table) for table in (dst_addrs, src_addrs, sizes)]
        fail_idx = [ctypes.byref(self._fail_idx)] if self._has_fail_idx else []
        status = self._call(
            *(ctypes.c_void_p(table.ctypes.data) for table in tables),
            ctypes.c_size_t(dst_addrs.size),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            *fail_idx,
            ctypes.c_void_p(stream),
        )
        if status != 0:
            raise TransferError(f"cuMemcpyBatchAsync of {dst_addrs.size} copies: error {status}")


def open_batch() -> BatchCopy | None:
    """Return batched copies if the driver has them, else None."""
    try:
        return BatchCopy(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


class CopyEngine:
    """Queues the copies of a piece, in as few calls as they allow."""

    def __init__(self, runtime: CudaRuntime, batch: BatchCopy | None) -> None:
        self._runtime = runtime
        self._batch = batch

    @property
    def runtime(self) -> CudaRuntime:
        """The calls underneath, for copies that no method here makes."""
        return self._runtime

    @property
    def has_batch(self) -> bool:
        """Whether many copies are one call."""
        return self._batch is not None

    def upload(self, dst_addr: int, src_addr: int, num_bytes: int, stream: int) -> None:
        """Queue one copy from pinned host memory to the device."""
        self._runtime.memcpyAsync(dst_addr, src_addr, num_bytes, _TO_DEVICE, stream)

    def copy(
        self, extents: Extents | OneCopy, device_base: int, *, to_device: bool, stream: int
    ) -> None:
        """Queue copies between the ring and device_base + their offsets.

        Raises:
            TransferError, RuntimeError: A copy was refused; earlier ones are queued.
        """
        if isinstance(extents, OneCopy):
            self._copy_one(*extents, device_base, to_device, stream)
            return
        num = extents.rows.size
        if self._batch is not None and num > _FEW and np.count_nonzero(extents.rows == 1) == num:
            self._copy_batch(self._batch, extents, device_base, to_device=to_device, stream=stream)
            return
        for host, pitch, width, rows, offset in zip(
            extents.host_addrs.tolist(),
            extents.pitches.tolist(),
            extents.widths.tolist(),
            extents.rows.tolist(),
            extents.offsets.tolist(),
            strict=True,
        ):
            self._copy_one(host, pitch, width, rows, offset, device_base, to_device, stream)

    def _copy_one(  # noqa: PLR0913, PLR0917
        self,
        host: int,
        pitch: int,
        width: int,
        rows: int,
        offset: int,
        device_base: int,
        to_device: bool,  # noqa: FBT001
        stream: int,
    ) -> None:
        device = device_base + offset
        kind = _TO_DEVICE if to_device else _TO_HOST
        if rows == 1:
            dst, src = (device, host) if to_device else (host, device)
            self._runtime.memcpyAsync(dst, src, width, kind, stream)
        elif to_device:
            self._runtime.memcpy2DAsync(device, width, host, pitch, width, rows, kind, stream)
        else:
            self._runtime.memcpy2DAsync(host, pitch, device, width, width, rows, kind, stream)

    def _copy_batch(
        self, batch: BatchCopy, extents: Extents, device_base: int, *, to_device: bool, stream: int
    ) -> None:
        devices = extents.offsets + device_base
        dsts, srcs = (devices, extents.host_addrs) if to_device else (extents.host_addrs, devices)
        for first in range(0, dsts.size, BATCH_ENTRIES):
            part = slice(first, first + BATCH_ENTRIES)
            batch.copy(dsts[part], srcs[part], extents.widths[part], stream)

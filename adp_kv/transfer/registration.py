"""Register the mapped ring with the device, in pieces and from several threads.

Registration locks and maps pages: about 50 ms a GiB, 15 % less from two threads. A copy
call may not cross two registrations, so the borders are known to the planner.
Owning thread: the mover's; helpers live for the call. Failure scope: the mover.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import TransferError
from adp_kv.transfer.runtime import CudaRuntime
from adp_kv.units import PAGE_BYTES, GiB, align_up, format_bytes

_PORTABLE_MAPPED = 3


class RingRegistration:
    """Owns the registration of one ring; unregister() may be called at any time, twice."""

    def __init__(
        self,
        runtime: CudaRuntime,
        device_idx: int,
        *,
        piece_bytes: int = GiB,
        num_threads: int = 2,
    ) -> None:
        assert piece_bytes > 0
        self._runtime = runtime
        self._device_idx = device_idx
        self._piece_bytes = align_up(piece_bytes, PAGE_BYTES)
        self._num_threads = num_threads
        self._address = 0
        self._num_bytes = 0
        self._pieces: list[int] = []
        self._borders: list[int] = []
        self._border_array = np.zeros(0, dtype=np.int64)

    @property
    def borders(self) -> NDArray[np.int64]:
        """Sorted addresses at which one piece ends and the next begins; a ring's own array."""
        return self._border_array

    @property
    def border_list(self) -> list[int]:
        """The borders as plain numbers; not to be changed."""
        return self._borders

    def covers(self, first: int, end: int) -> bool:
        """Return whether [first, end) is registered."""
        return self._address <= first and end <= self._address + self._num_bytes

    def register(
        self,
        address: int,
        num_bytes: int,
        capture_safe: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Register [address, address + num_bytes).

        Args:
            address: where the ring is mapped.
            num_bytes: of the ring.
            capture_safe: in which each helper calls CUDA: it exempts a thread, not the caller's.

        Raises:
            TransferError: A piece can't be registered, or a ring already is; nothing
                stays registered by this call.
        """
        if self._pieces:
            raise TransferError("a ring is registered already; close the mover first")
        if num_bytes <= 0:
            raise TransferError(f"a ring of {num_bytes} bytes can't be registered")
        end = address + num_bytes
        first_border = align_up(address + 1, PAGE_BYTES) - PAGE_BYTES + self._piece_bytes
        pieces = [address, *range(first_border, end, self._piece_bytes)]
        sizes = np.diff([*pieces, end]).tolist()
        with ThreadPoolExecutor(self._num_threads, "adp-register") as pool:
            errors = list(pool.map(self._try_register, pieces, sizes, repeat(capture_safe)))
        done = [piece for piece, error in zip(pieces, errors, strict=True) if error is None]
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            self._unregister(done)
            raise TransferError(_explain(failed, num_bytes)) from failed
        self._address, self._num_bytes, self._pieces = address, num_bytes, done
        self._borders = done[1:]
        self._border_array = np.array(self._borders, dtype=np.int64)

    def unregister(self) -> None:
        """Give the ring back; errors are dropped, since a lost device has nothing registered."""
        pieces, self._pieces = self._pieces, []
        self._address = self._num_bytes = 0
        self._unregister(pieces)

    def _try_register(
        self,
        address: int,
        num_bytes: int,
        capture_safe: Callable[[], AbstractContextManager[object]],
    ) -> RuntimeError | None:
        try:
            self._runtime.setDevice(self._device_idx)
            with capture_safe():
                self._runtime.hostRegister(address, num_bytes, _PORTABLE_MAPPED)
        except RuntimeError as error:
            clear_last_error(self._runtime)
            return error
        return None

    def _unregister(self, pieces: list[int]) -> None:
        for address in pieces:
            try:
                self._runtime.hostUnregister(address)
            except RuntimeError:
                clear_last_error(self._runtime)


def clear_last_error(runtime: CudaRuntime) -> None:
    """Clear a runtime's sticky last error where cupy leaves that to its caller."""
    clear = getattr(runtime, "getLastError", None)
    if clear is not None:
        clear()


def _explain(error: RuntimeError, num_bytes: int) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return (
        f"the ring of {format_bytes(num_bytes)} can't be registered with the device: {error}. "
        f"Locked memory is limited to {limit}: raise it (`ulimit -l unlimited`, or "
        "`--ulimit memlock=-1` for a container), or make shared_memory_size smaller"
    )

# ruff: noqa: N802  # the names are cupy's
"""The part of the CUDA runtime that moves and registers memory and orders streams, in cupy's names.

Its functions raise RuntimeError and clear the runtime's last error before they do.
"""

from __future__ import annotations

from typing import Protocol

from adp_kv.errors import TransferError


class CudaRuntime(Protocol):
    """What this package uses of cupy.cuda.runtime; streams and events are handles."""

    def setDevice(self, device: int, /) -> None:
        """Choose the calling thread's device."""

    def hostRegister(self, ptr: int, size: int, flags: int, /) -> None:
        """Lock and map host memory."""

    def hostUnregister(self, ptr: int, /) -> None:
        """Undo hostRegister."""

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int, /) -> None:
        """Copy bytes on a stream."""

    def memcpy2DAsync(  # noqa: PLR0913, PLR0917
        self,
        dst: int,
        dpitch: int,
        src: int,
        spitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
        /,
    ) -> None:
        """Copy rows on a stream."""

    def streamWaitEvent(self, stream: int, event: int, /) -> None:
        """Let a stream wait for the last time that the event was recorded, once at least."""


def load_runtime() -> CudaRuntime:
    """Import cupy's runtime.

    Raises:
        TransferError: cupy is not installed, or finds no CUDA.
    """
    try:
        from cupy.cuda import runtime  # noqa: PLC0415  # only a CUDA device needs it
    except ImportError as error:
        raise TransferError(
            f"cupy can't be imported ({error}): install cupy-cuda12x or cupy-cuda13x, whichever "
            "fits torch's CUDA"
        ) from error
    loaded: CudaRuntime = runtime
    return loaded

"""What NVML knows of the links between devices.

Owning thread: the caller's; asked once at start. Failure scope: TransferError, and fan-out is off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from adp_kv.errors import TransferError

_READ, _WRITE, _NVLINK = 0, 1, 2
_NOT_FOUND = 6


class Nvml:
    """NVML, until close().

    Raises:
        TransferError: There is no NVML, as on other vendors' devices.
    """

    def __init__(self) -> None:
        try:
            self._dll = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise TransferError(f"NVML is not there ({error}): not an NVIDIA device?") from error
        self._call("nvmlInit_v2")

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._dll, name)(*args)
        if status != 0:
            raise TransferError(f"{name}: NVML error {status}")

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        status = self._dll.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        if status == _NOT_FOUND:
            return None  # not visible in this container
        if status != 0:
            raise TransferError(f"nvmlDeviceGetHandleByUUID({uuid}): NVML error {status}")
        return handle

    def reached(self, mine: str, others: Sequence[str]) -> list[bool]:
        """Return which devices one device reaches over NVLink, itself included.

        Args:
            mine: UUID of the device, "GPU-...".
            others: UUIDs of all.

        Raises:
            TransferError: NVML does not know the device.
        """
        handle = self._handle(mine)
        if handle is None:
            raise TransferError(f"NVML does not know device {mine}")
        return [uuid == mine or self._linked(handle, self._handle(uuid)) for uuid in others]

    def _linked(self, one: ctypes.c_void_p, other: ctypes.c_void_p | None) -> bool:
        if other is None:
            return False
        status = ctypes.c_int(-1)
        for capability in (_READ, _WRITE, _NVLINK):
            answer = self._dll.nvmlDeviceGetP2PStatus(one, other, capability, ctypes.byref(status))
            if answer != 0 or status.value != 0:
                return False
        return True

    def close(self) -> None:
        """Let go of NVML."""
        self._dll.nvmlShutdown()

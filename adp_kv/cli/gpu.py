"""What the NVIDIA driver says of the GPUs, asked without torch or cupy.

Failure scope: none; no driver, or one that answers wrongly, is an empty answer with a reason.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this process.

    Attributes:
        names: by device.
        driver: the newest CUDA that the driver runs, such as "13.0".
        peers: for each pair of devices, whether both can read the other's memory.
        reason: why there are none.
    """

    names: list[str] = field(default_factory=list)
    driver: str = ""
    peers: dict[tuple[int, int], bool] = field(default_factory=dict)
    reason: str = ""


def find_gpus() -> Gpus:
    """Return the GPUs of this process; makes no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus(reason="no NVIDIA driver")
    if cuda.cuInit(0):
        return Gpus(reason="the NVIDIA driver finds no device")
    count, version = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuDriverGetVersion(ctypes.byref(version))
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        cuda.cuDeviceGetName(name, _NAME_BYTES, device)
        names.append(name.value.decode(errors="replace"))
    pairs = [(a, b) for a in range(count.value) for b in range(a + 1, count.value)]
    peers = {(a, b): _peers(cuda, a, b) and _peers(cuda, b, a) for a, b in pairs}
    return Gpus(names, f"{version.value // 1000}.{version.value % 1000 // 10}", peers)


def _peers(cuda: ctypes.CDLL, one: int, other: int) -> bool:
    can = ctypes.c_int()
    return not cuda.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) and bool(can.value)

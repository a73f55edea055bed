"""Open the mover that fits a device; CUDA, cupy and Triton are imported only for CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adp_kv.errors import TransferError
from adp_kv.transfer.base import Mover
from adp_kv.transfer.host_mover import HostMover
from adp_kv.transfer.settings import MoverSettings
from adp_kv.units import MiB

if TYPE_CHECKING:
    import torch


def open_mover(
    device: torch.device,
    *,
    staging_bytes: int = 64 * MiB,
    settings: MoverSettings | None = None,
) -> Mover:
    """Return a mover for the device.

    Args:
        device: where the pages lie, "cpu" or "cuda".
        staging_bytes: device memory of the staging buffers in each direction; unused if
            settings are given.
        settings: everything else that can be chosen.

    Raises:
        TransferError: The device is of another type or can't be used.
    """
    if device.type == "cpu":
        return HostMover()
    if device.type == "cuda":
        from adp_kv.transfer.cuda_mover import open_cuda_mover  # noqa: PLC0415  # see the module

        return open_cuda_mover(device, settings or MoverSettings(staging_bytes=staging_bytes))
    raise TransferError(f"pages on {device} can't be moved: only cuda and cpu")

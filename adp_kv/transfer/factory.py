"""Open the mover that fits a device; CUDA, cupy and Triton are imported only for CUDA."""

from __future__ import annotations

from pathlib import Path
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
    tuning_folder: Path | None = None,
    settings: MoverSettings | None = None,
) -> Mover:
    """Return a mover for the device.

    Args:
        device: where the pages lie, "cpu" or "cuda".
        staging_bytes: device memory of the staging buffers in each direction.
        tuning_folder: where measured thresholds are kept; None: the defaults are used.
        settings: everything that can be chosen; the two above are not used then.

    Raises:
        TransferError: The device is of another type or can't be used.
    """
    if device.type == "cpu":
        return HostMover()
    if device.type == "cuda":
        chosen = settings or MoverSettings(staging_bytes=staging_bytes, tuning_folder=tuning_folder)
        from adp_kv.transfer.cuda_mover import open_cuda_mover  # noqa: PLC0415  # see the module

        return open_cuda_mover(device, chosen)
    raise TransferError(f"pages on {device} can't be moved: only cuda and cpu")

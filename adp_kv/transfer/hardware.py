"""What a device mover works with and lends to others that work on the same device and ring."""

from __future__ import annotations

from dataclasses import dataclass

from adp_kv.transfer.copy_engine import CopyEngine
from adp_kv.transfer.device import TorchDevice
from adp_kv.transfer.registration import RingRegistration


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, its copy engine and the registered ring; the mover's, which closes them."""

    device: TorchDevice
    engine: CopyEngine
    ring: RingRegistration

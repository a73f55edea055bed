"""What the fan-out of a rank is given; every value has a default."""

from __future__ import annotations

from dataclasses import dataclass

from adp_kv.units import MiB


@dataclass(frozen=True, slots=True)
class FanoutSettings:
    """How a Fanout is built; equal on every rank of a group.

    Attributes:
        staging_bytes: device memory of the staging buffers.
        num_buffers: buffers it is cut into, at least 2: one is filled while another is
            exchanged and a third scattered. A batch of slots (16 MiB) fits one of 32 MiB.
        max_ahead: exchanges that may be queued and not have ended; bounds how deep the
            device's queues get behind a rank that does not come.
        max_pages: most pages of an exchange.
        timeout_s: an exchange that has not ended so long after it was queued never will.
        page_programs: most programs of the scattering kernel. It reads its table over the link:
            many at once wait for that once.
        max_ctas: thread blocks of an exchange between two ranks; more ranks take more. NCCL takes
            memory for each.
    """

    staging_bytes: int = 128 * MiB
    num_buffers: int = 4
    max_ahead: int = 48
    max_pages: int = 1 << 14
    timeout_s: float = 15.0
    page_programs: int = 512
    max_ctas: int = 8

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one staging buffer."""
        return self.staging_bytes // self.num_buffers // 256 * 256

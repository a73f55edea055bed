"""What a device mover is given; every value has a default that was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adp_kv.transfer.plan import RESTORE, SAVE, Thresholds
from adp_kv.units import GiB, MiB


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """How a CudaMover is built.

    Attributes:
        staging_bytes: device memory of the staging buffers, in each direction; 0 stages nothing.
        staging_buffers: buffers it is cut into; pieces of 16 MiB keep the link at 0.98 and
            of 4 MiB at 0.95.
        direct_bytes: what one launch of a kernel that uses the ring moves, and one
            address table serves; the first of a transfer moves a quarter of it.
        restore, save: where one way becomes faster than the next.
        page_programs: programs of a page kernel inside device memory (64 are enough to hide
            it behind the copies: 0.98 of the link).
        restore_programs, save_programs: programs of a kernel that waits on the link;
            each holds a multiprocessor, and more of them move no more.
        max_pages: rows of an address table, the most pages of one piece.
        pinned_pages: most pages of a piece whose addresses a kernel that waits on the link reads
            over it too; the addresses of more are copied to the device first.
        tuning_folder: where thresholds measured on this machine are kept (see tuning.py); they
            replace restore and save. None: nothing is measured.
        register_piece_bytes, register_threads: how the ring is registered.
    """

    staging_bytes: int = 64 * MiB
    staging_buffers: int = 4
    direct_bytes: int = 32 * MiB
    restore: Thresholds = RESTORE
    save: Thresholds = SAVE
    page_programs: int = 64
    restore_programs: int = 16
    save_programs: int = 8
    max_pages: int = 1 << 15
    pinned_pages: int = 256
    register_piece_bytes: int = GiB
    register_threads: int = 2
    tuning_folder: Path | None = None

"""What a rank has under way: the step between start_load and finish_step, restores outside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from adp_kv.connector.metadata import AdpMetadata, Chunks
from adp_kv.layout.geometry import CacheGeometry
from adp_kv.sdk.jobs import Job
from adp_kv.transfer.base import Ticket


@dataclass(slots=True)
class Step:
    """The step between start_load and finish_step.

    Attributes:
        restore: its synchronous restore, a job a part; unfenced: caches no one has waited
            for yet.
        unproven: of each part, fenced copies whose bytes are right only if other ranks did
            their part.
        save: its save, a job a part; unsaved: caches whose put is not out yet.
        lost: its restore failed where that can't be undone: the error was raised.
    """

    meta: AdpMetadata
    restore: dict[int, Job] = field(default_factory=dict)
    unfenced: set[int] = field(default_factory=set)
    unproven: dict[int, list[Ticket]] = field(default_factory=dict)
    save: dict[int, Job] = field(default_factory=dict)
    unsaved: dict[int, CacheGeometry] = field(default_factory=dict)
    lost: bool = False


@dataclass(slots=True)
class AsyncRestore:
    """A restore that requests wait for outside the batch: each part's job and chunks.

    A rank that holds no cache of the parts (a pipeline stage) has no job, and reports too.
    """

    request_ids: set[str]
    jobs: list[tuple[Job, Chunks]]

    @property
    def finished(self) -> bool:
        """Whether nothing of it touches a page any more."""
        return all(job.finished for job, _ in self.jobs)

    @property
    def failed_requests(self) -> set[str]:
        """Those that miss a chunk of any part."""
        return {
            name
            for job, chunks in self.jobs
            for name, failed in zip(chunks.request_ids, job.failed_chunks, strict=True)
            if failed
        }

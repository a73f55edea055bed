"""The worker side: restores before layers compute, saves after they did.

    start_load ─► gets, layer by layer        wait_layer(name) ─► compute stream waits
    save_layer(name) ─► put of that layer     finish_step ─► one put of all that is left

Which layers have hooks is observed, not guessed: a layer is waited for in its hook
once that hook was seen in a forward that ran layers in Python; until then, and under
full CUDA graphs, it is waited for up front and saved at the end of the step. A layer
that computed before its pages were fenced is a failed load, never a silent one.

Threads: called by vLLM's worker thread; the rank client has its own. Failure scope: a
failed restore is reported by block (and by request where it was asynchronous); from
then on saves are held back until the scheduler side knows, since later steps may have
computed from pages that never came.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from adp_kv import __version__
from adp_kv.config import ConnectorSettings, cache_folder, device_connections
from adp_kv.connector.metadata import AdpMetadata, AdpWorkerMetadata, Chunks
from adp_kv.connector.vllm_view import (
    EngineView,
    hooks_will_fire,
    tell_tp_ranks,
    view_caches,
    worker_ranks,
)
from adp_kv.errors import GatewayError, TransferError
from adp_kv.fanout.fanout import Fanout
from adp_kv.fanout.settings import FanoutSettings
from adp_kv.fanout.start import start_fanout
from adp_kv.layout.geometry import CacheGeometry
from adp_kv.metrics import Recorder
from adp_kv.sdk.jobs import Job
from adp_kv.sdk.rank_client import (
    ASYNC_RESTORE,
    RESTORE,
    SAVE_LAYER,
    SAVE_REST,
    RankClient,
    declare,
)
from adp_kv.transfer.base import Mover, Ticket
from adp_kv.transfer.factory import open_mover
from adp_kv.units import MiB
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello

log = logging.getLogger("adp_kv")

LAYERWISE_SAVE_BYTES = 1 * MiB
"""Below this much a layer, a put a layer costs more than it overlaps: one put a step."""
IDLE_WAIT_S = 0.002
RETRY_S = 2.0


@dataclass(slots=True)
class Step:
    """The step between start_load and finish_step.

    Attributes:
        restore: its synchronous restore; unfenced: caches no one has waited for yet.
        unproven: fenced copies whose bytes are right only if other ranks did their part.
        save: its save; unsaved: caches whose put is not out yet.
    """

    meta: AdpMetadata
    restore: Job | None = None
    unfenced: set[int] = field(default_factory=set)
    unproven: list[Ticket] = field(default_factory=list)
    save: Job | None = None
    unsaved: dict[int, CacheGeometry] = field(default_factory=dict)


@dataclass(slots=True)
class AsyncRestore:
    """A restore that requests wait for outside the batch."""

    job: Job
    request_ids: set[str]


class WorkerSide:
    """One rank of the engine.

    Args:
        engine: facts of the engine.
        settings: of the connector.
        namespace: digest of the facts.
    """

    def __init__(self, engine: EngineView, settings: ConnectorSettings, namespace: bytes) -> None:
        self._engine = engine
        self._settings = settings
        self._namespace = namespace
        self._client: RankClient | None = None
        self._caches: dict[int, CacheGeometry] = {}
        self._index_of: dict[str, int] = {}
        self._hooked: set[int] = set()
        self._step: Step | None = None
        self._saves: list[Job] = []
        self._async: list[AsyncRestore] = []
        self._failed_blocks: set[int] = set()
        self._failed_step = -1
        self._reported_off = False
        self._retry_at = 0.0
        self._open_client: Callable[[], RankClient] | None = None
        self._report = AdpWorkerMetadata()
        self._pending_save_bytes = 0
        self._scratch: torch.Tensor | None = None
        self.stats = Recorder()
        self._told: dict[str, int] = {}
        self._dropped: set[int] = set()

    @property
    def client(self) -> RankClient:
        """The rank's client, once caches are registered."""
        if self._client is None:
            raise GatewayError("no KV cache was registered")
        return self._client

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], vllm_config: Any, kv_cache_config: Any
    ) -> None:
        """Take the engine's caches, connect, map and register the ring.

        Waits until all ranks have joined, at most connect_timeout_s.

        Raises:
            ConfigError: A cache that can't be served.
            GatewayError: No gateway, and gateway_required is set.
        """
        rank, tp_rank = worker_ranks()
        caches = view_caches(kv_caches, vllm_config, kv_cache_config, self._engine, tp_rank)
        self._caches = {cache.index: cache for cache in caches}
        self._index_of = {cache.name: cache.index for cache in caches}
        device = kv_caches[caches[0].name].device
        largest = max(cache.page_bytes for cache in caches)
        self._scratch = torch.empty(largest, dtype=torch.uint8, device=device)
        hello = Hello(
            version=PROTOCOL_VERSION,
            release=__version__,
            engine=self._engine.engine_id,
            rank=rank,
            world_size=self._engine.world_size,
            namespace=self._namespace,
            caches=declare(caches),
            pid=os.getpid(),
        )
        scratch_address = self._scratch.data_ptr()

        def open_client() -> RankClient:
            client = RankClient(
                hello,
                caches,
                open_mover(
                    device,
                    staging_bytes=self._settings.staging_bytes,
                    tuning_folder=cache_folder() if self._settings.autotune else None,
                ),
                scratch_address,
                self._engine.address,
                self._settings.gateway_timeout_s,
                self._settings.connect_timeout_s,
            )
            client.key_file = self._settings.key_file
            return client

        self._open_client = open_client
        self._client = open_client()
        if self._settings.nvlink_fanout:
            self._client.fanout = self._open_fanout(self._client.mover, tp_rank)
        self._client.start()
        if not self._client.wait_settled() and self._settings.gateway_required:
            raise GatewayError(f"{self._client.off_reason} (gateway_required is set)")
        log.info(
            "adp_kv rank %d: %d caches, chunk of %d tokens, %d bytes a chunk on this rank",
            rank,
            len(caches),
            self._engine.chunk_tokens,
            self._chunk_bytes,
        )

    def _open_fanout(self, mover: Mover, tp_rank: int) -> Fanout | None:
        """Form groups with the other ranks, all of which do so now."""
        if not any(cache.is_replicated for cache in self._caches.values()):
            log.info("nvlink_fanout: nothing to do, no cache is the same on several ranks")
            return None
        settings = FanoutSettings(
            staging_bytes=self._settings.fanout_staging_bytes,
            timeout_s=self._settings.load_timeout_s,
        )
        obstacle = None
        if device_connections() == "1":
            obstacle = (
                "with CUDA_DEVICE_MAX_CONNECTIONS = 1 the model's kernels and an exchange could "
                "wait for each other: unset it"
            )
        return start_fanout(mover, tp_rank, tell_tp_ranks, settings, obstacle)

    @property
    def _chunk_bytes(self) -> int:
        """Bytes of one chunk on this rank, over all of its caches."""
        return sum(cache.slice_bytes for cache in self._caches.values())

    # Restore

    def start_load(self, meta: AdpMetadata, forward_context: Any) -> None:
        """Start the step's restores; wait here for what no hook will wait for."""
        step = self._begin(meta)
        if meta.async_restore is not None:
            job = self._job(meta, meta.async_restore, list(self._caches.values()), load=True)
            self._async.append(AsyncRestore(job, set(meta.async_restore.request_ids)))
            self.client.submit_restore(job, ASYNC_RESTORE, self.client.mover.mark())
        if meta.idle:
            self.finish_step(meta)
        if meta.restore is None:
            return
        hooked = self._hooked if hooks_will_fire(forward_context) else set()
        order = sorted(self._caches.values(), key=lambda c: (c.index in hooked, c.index))
        step.restore = self._job(meta, meta.restore, order, load=True)
        step.unfenced = set(self._caches)
        self.client.submit_restore(step.restore, RESTORE, self.client.mover.mark())
        for cache in order:
            if cache.index not in hooked:
                self._fence(step, cache.index)

    def _begin(self, meta: AdpMetadata) -> Step:
        """Return the step of this metadata; start_load may come after the layers' hooks."""
        if self._step is None or self._step.meta is not meta:
            self._step = Step(meta)
            if meta.save is not None:
                self._begin_save(self._step, meta.save)
        return self._step

    def _job(
        self, meta: AdpMetadata, chunks: Chunks, caches: list[CacheGeometry], *, load: bool
    ) -> Job:
        timeout = self._settings.load_timeout_s if load else self._settings.save_timeout_s
        return Job(meta.step, chunks.keys, chunks.blocks, caches, timeout)

    def wait_layer(self, meta: AdpMetadata, name: str) -> None:
        """Let the compute stream wait for a layer's pages."""
        index = self._index_of.get(name)
        if index is None:
            return
        self._hooked.add(index)
        self._fence(self._begin(meta), index)

    def _fence(self, step: Step, index: int) -> None:
        if step.restore is None or index not in step.unfenced:
            return
        step.unfenced.discard(index)
        began = time.monotonic()
        tickets = step.restore.wait_cache(index)
        for ticket in tickets:
            ticket.fence()
        self.stats.observe("restore_wait_seconds", time.monotonic() - began)
        if not step.unfenced:
            self.stats.observe("restore_seconds", time.monotonic() - step.restore.began)
        step.unproven += tickets
        self._note_failure(step, step.restore)

    def _note_failure(self, step: Step, restore: Job) -> None:
        if restore.failed_chunks.any():
            self._on_failed_restore(step.meta, restore)
            self._drop_save(step)

    def _on_failed_restore(self, meta: AdpMetadata, job: Job) -> None:
        if self._failed_step < meta.step:
            log.warning("a restore failed: %s", job.reason)
            self.stats.add("restores_failed:layerwise")
        self._failed_step = max(self._failed_step, meta.step)
        self._failed_blocks |= job.failed_blocks

    # Save

    def _begin_save(self, step: Step, save: Chunks) -> None:
        step.save = self._job(step.meta, save, list(self._caches.values()), load=False)
        self._saves.append(step.save)
        num_bytes = len(save.keys) * self._chunk_bytes
        if self.client.off:
            self._drop(step.save, "off", "the external cache is off")
        elif self._failed_step > step.meta.acknowledged_failure:
            told = "a restore failed and the scheduler does not know yet"
            self._drop(step.save, "restore_failed", told)
        elif self._unsaved_bytes() + num_bytes > self._settings.max_pending_save_bytes:
            log.warning("a save of %d bytes was dropped: max_pending_save_bytes", num_bytes)
            self._drop(step.save, "max_pending_save_bytes", "max_pending_save_bytes")
        else:
            step.unsaved = dict(self._caches)

    def _unsaved_bytes(self) -> int:
        return sum(job.num_chunks for job in self._saves[:-1]) * self._chunk_bytes

    def save_layer(self, meta: AdpMetadata, name: str) -> None:
        """Save a layer that has just computed, if it is worth a request of its own."""
        step = self._begin(meta)
        cache = step.unsaved.get(self._index_of.get(name, -1))
        if cache is None or step.save is None or self._awaits_proof(step):
            return
        if cache.slice_bytes * step.save.num_chunks >= LAYERWISE_SAVE_BYTES:
            del step.unsaved[cache.index]
            self.client.submit_save(step.save, SAVE_LAYER, [cache], self.client.mover.mark())

    def _awaits_proof(self, step: Step) -> bool:
        """Return whether this step may still turn out to have computed from wrong pages.

        What it computed is then saved at its end, when that is known.
        """
        if step.restore is not None:
            step.unproven = step.restore.unproven(step.unproven)
        return bool(step.unproven)

    def _drop_save(self, step: Step) -> None:
        step.unsaved = {}
        if step.save is not None:
            self._drop(step.save, "restore_failed", "the restore of this step failed")

    def _drop(self, job: Job, reason: str, told: str) -> None:
        """Give up a save; reason is the label of its count."""
        if job.number not in self._dropped and not job.finished:
            self._dropped.add(job.number)
            self.stats.add(f"saves_dropped:{reason}")
        job.abandon(told)

    def finish_step(self, meta: AdpMetadata) -> None:
        """Save what is left of the step, as one request."""
        step = self._begin(meta)
        if step.restore is not None and step.unfenced:
            names = [self._caches[index].name for index in sorted(step.unfenced)]
            step.restore.fail(slice(None), f"{names[0]} computed before its pages were fenced")
            for index in list(step.unfenced):
                self._fence(step, index)
            self._hooked -= {self._index_of[name] for name in names}
        if step.restore is not None:
            step.restore.wait_proven(step.unproven)
            step.unproven = []
            self._note_failure(step, step.restore)
        if step.save is not None and step.unsaved:
            rest = list(step.unsaved.values())
            step.unsaved = {}
            self.client.submit_save(step.save, SAVE_REST, rest, self.client.mover.mark())

    # Reports

    def finished_restores(self, *, idle: bool = False) -> tuple[set[str], set[str]]:
        """Return requests whose asynchronous restore has ended, and those that failed.

        A step in which nothing computes waits a moment here: vLLM spins through such steps,
        and the client's thread needs the interpreter and, on small machines, the core.
        """
        unfinished = [restore.job for restore in self._async] or self._saves
        if idle and unfinished:
            unfinished[0].wait_finished(IDLE_WAIT_S)
        done: set[str] = set()
        failed: set[str] = set()
        waiting = []
        for restore in self._async:
            if restore.job.expired:
                restore.job.abandon("load_timeout_s has passed")
            if not restore.job.finished:
                waiting.append(restore)
                continue
            done |= restore.request_ids
            self.stats.observe("restore_seconds", time.monotonic() - restore.job.began)
            if restore.job.failed_chunks.any():
                self.stats.add("restores_failed:async")
                log.warning("an asynchronous restore failed: %s", restore.job.reason)
                failed |= restore.request_ids
                self._failed_blocks |= restore.job.failed_blocks
        self._async = waiting
        self._report.failed_requests |= failed
        return done, failed

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that were not restored, once."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> AdpWorkerMetadata | None:
        """Return what the scheduler side needs to know, None if nothing new."""
        report, self._report = self._report, AdpWorkerMetadata()
        pending = []
        for job in self._saves:
            if job.expired:
                self._drop(job, "save_timeout_s", "save_timeout_s has passed")
            if job.finished:
                self._note_saved(job)
                report.saved_steps[job.number] = 1
                if job.abandoned:
                    report.unsaved_steps.add(job.number)
            else:
                pending.append(job)
        self._saves = pending
        meta = self._step.meta if self._step is not None else None
        if meta is not None and self._failed_step > meta.acknowledged_failure:
            report.failed_step = self._failed_step
        if self._client is not None and self._client.off and not self._reported_off:
            self._reported_off = True
            report.off = True
            report.off_sessions.add(self._client.generation)
        self._revive()
        return report if report != AdpWorkerMetadata() else None

    def _revive(self) -> None:
        """With `reconnect`: once this rank is off, let a new client join whatever gateway comes."""
        old, now = self._client, time.monotonic()
        wanted = self._settings.reconnect and old is not None and old.ended
        if not wanted or old is None or self._open_client is None or now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        old.close()
        try:
            self._client = self._open_client()
        except TransferError as error:
            log.warning("no new client of the gateway: %s", error)
            return
        self._reported_off, self._told = False, {}
        self._client.again = True
        self._client.start()

    def _note_saved(self, job: Job) -> None:
        if job.number in self._dropped:
            self._dropped.discard(job.number)
        elif job.abandoned:
            self.stats.add("saves_dropped:transfer_failed")
        else:
            self.stats.observe("save_seconds", time.monotonic() - job.began)

    def take_stats(self) -> dict[str, dict[str, Any]] | None:
        """Return what was counted since the last call, None if nothing."""
        counts = {} if self._client is None else dict(self._client.counts)
        if self._client is not None and self._client.off:
            counts["turned_off"] = 1
        for name, total in counts.items():
            self.stats.add(name, total - self._told.get(name, 0))
        self._told |= counts
        return self.stats.take()

    def close(self) -> None:
        """Stop the client; waits for copies in flight."""
        if self._client is not None:
            self._client.close()

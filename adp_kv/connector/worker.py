"""The worker side: restores before layers compute, saves after they did.

    start_load ─► gets, layer by layer        wait_layer(name) ─► compute stream waits
    save_layer(name) ─► put of that layer     finish_step ─► one put of all that is left

Which layers have hooks is observed, not guessed: a layer is waited for in its hook
once that hook was seen in a forward that ran layers in Python; until then, and under
full CUDA graphs, it is waited for up front and saved at the end of the step. A layer
that computed before its pages were fenced is a failed load, never a silent one. A draft's
layers are always waited for up front: not every step that restores runs them, hooks and all.

Threads: called by vLLM's worker thread; the rank client has its own. Failure scope: a
failed restore is reported by block (and by request where it was asynchronous); from
then on saves are held back until the scheduler side knows, since later steps may have
computed from pages that never came. With several KV cache groups vLLM can't be told by
block: a failed asynchronous restore is told by request, and where that can't be either,
RestoreLostError stops the engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from adp_kv import __version__
from adp_kv.config import ConnectorSettings, cache_folder, device_connections
from adp_kv.connector.metadata import AdpMetadata, AdpWorkerMetadata, Chunks
from adp_kv.connector.steps import AsyncRestore, Step
from adp_kv.connector.vllm_caches import first_tensor, view_caches
from adp_kv.connector.vllm_dcp import tell_fanout_is_off
from adp_kv.connector.vllm_view import (
    EngineView,
    hooks_will_fire,
    takes_failed_requests,
    tell_tp_ranks,
    worker_ranks,
)
from adp_kv.errors import GatewayError, RestoreLostError, TransferError
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
from adp_kv.transfer.base import Mover
from adp_kv.transfer.factory import open_mover
from adp_kv.units import MiB
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello

log = logging.getLogger("adp_kv")

LAYERWISE_SAVE_BYTES = 8 * MiB
"""Below this much a layer, a put a layer costs more than it overlaps: one put a step. 8 MiB take a
link of 55 GB/s 150 µs, about as long as a put keeps the interpreter of this process; a step that
stores a chunk of each of 8 requests is small, and the CPU may be what it waits for."""
IDLE_WAIT_S = 0.002
RETRY_S = 2.0


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
        self._saves: dict[int, list[Job]] = {}  # by step
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
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        vllm_config: Any,
        kv_cache_config: Any,
    ) -> None:
        """Take the engine's caches, connect, map and register the ring.

        Waits until all ranks have joined, at most connect_timeout_s.

        Raises:
            ConfigError: A cache that can't be served.
            GatewayError: No gateway, and gateway_required is set.
        """
        rank, tp_rank = worker_ranks(self._engine.token_shards)
        parts = self._engine.parts
        caches = view_caches(kv_caches, vllm_config, kv_cache_config, parts, tp_rank)
        self._caches = {cache.index: cache for cache in caches}
        self._index_of = {cache.name: cache.index for cache in caches}
        device = first_tensor(kv_caches[caches[0].name]).device
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
            "adp_kv rank %d: %d caches, %d parts, chunk of %d tokens, of %d bytes on this rank",
            rank,
            len(caches),
            len(parts),
            self._engine.chunk_tokens,
            sum(cache.slice_bytes for cache in caches),
        )

    def _open_fanout(self, mover: Mover, tp_rank: int) -> Fanout | None:
        """Form groups with the other ranks, all of which do so now."""
        if self._engine.token_shards > 1:
            tell_fanout_is_off(self._engine.token_shards, tp_rank)
            return None
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

    def _part(self, part: int) -> list[CacheGeometry]:
        """Return a part's caches on this rank, in layer order."""
        return [cache for cache in self._caches.values() if cache.part == part]

    # Restore

    def start_load(self, meta: AdpMetadata, forward_context: Any) -> None:
        """Start the step's restores; wait here for what no hook will wait for."""
        step = self._begin(meta)
        if meta.async_restore:
            self._start_async(meta)
        if meta.idle:
            self.finish_step(meta)
        if not meta.restore:
            return
        hooked = self._hooked if hooks_will_fire(forward_context) else set()
        mark = self.client.mover.mark()
        for chunks in meta.restore:
            if not self._part(chunks.part):
                continue
            job = self._job(meta, chunks, load=True)
            job.caches.sort(key=lambda c: (c.index in hooked, c.index))
            step.restore[chunks.part] = job
            step.unfenced |= {cache.index for cache in job.caches}
            self.client.submit_restore(job, RESTORE, mark)
        for index in sorted(step.unfenced - hooked):
            self._fence(step, index)

    def _start_async(self, meta: AdpMetadata) -> None:
        mark = self.client.mover.mark()
        jobs = [
            (self._job(meta, chunks, load=True), chunks)
            for chunks in meta.async_restore
            if self._part(chunks.part)
        ]
        request_ids = {name for chunks in meta.async_restore for name in chunks.request_ids}
        self._async.append(AsyncRestore(request_ids, jobs))
        for job, _ in jobs:
            self.client.submit_restore(job, ASYNC_RESTORE, mark)

    def _begin(self, meta: AdpMetadata) -> Step:
        """Return the step of this metadata; start_load may come after the layers' hooks."""
        if self._step is None or self._step.meta is not meta:
            if self._step is not None:  # V1 with drafts ends no step of the stages before the last
                self.finish_step(self._step.meta)
            self._step = Step(meta)
            if meta.save:
                self._begin_save(self._step, meta.save)
        return self._step

    def _job(self, meta: AdpMetadata, chunks: Chunks, *, load: bool) -> Job:
        timeout = self._settings.load_timeout_s if load else self._settings.save_timeout_s
        return Job(meta.step, chunks.keys, chunks.blocks, self._part(chunks.part), timeout)

    def wait_layer(self, meta: AdpMetadata, name: str) -> None:
        """Let the compute stream wait for a layer's pages."""
        index = self._index_of.get(name)
        if index is None:
            return
        if name not in self._engine.draft_layers:
            self._hooked.add(index)
        self._fence(self._begin(meta), index)

    def _fence(self, step: Step, index: int) -> None:
        if index not in step.unfenced:
            return
        step.unfenced.discard(index)
        job = step.restore[self._caches[index].part]
        began = time.monotonic()
        tickets = job.wait_cache(index)
        for ticket in tickets:
            ticket.fence()
        self.stats.observe("restore_wait_seconds", time.monotonic() - began)
        if not step.unfenced:
            self.stats.observe("restore_seconds", time.monotonic() - job.began)
        step.unproven.setdefault(self._caches[index].part, []).extend(tickets)
        self._note_failure(step, job)

    def _note_failure(self, step: Step, restore: Job) -> None:
        if restore.failed_chunks.any():
            step.lost = not self._engine.undoable
            self._on_failed_restore(step.meta, restore)
            step.unsaved = {}
            self._drop(step.save.values(), "restore_failed", "the restore of this step failed")

    def _on_failed_restore(self, meta: AdpMetadata, job: Job) -> None:
        if not self._engine.undoable:
            raise RestoreLostError(job.reason or "unknown")
        if self._failed_step < meta.step:
            log.warning("a restore failed: %s", job.reason)
            self.stats.add("restores_failed:layerwise")
        self._failed_step = max(self._failed_step, meta.step)
        self._failed_blocks |= job.failed_blocks

    # Save

    def _begin_save(self, step: Step, save: list[Chunks]) -> None:
        jobs = [
            self._job(step.meta, chunks, load=False) for chunks in save if self._part(chunks.part)
        ]
        step.save = {job.caches[0].part: job for job in jobs}
        num_bytes = _bytes_of(jobs)
        waiting = sum(map(_bytes_of, self._saves.values()))
        self._saves[step.meta.step] = jobs
        if self.client.off:
            self._drop(jobs, "off", "the external cache is off")
        elif self._failed_step > step.meta.acknowledged_failure:
            told = "a restore failed and the scheduler does not know yet"
            self._drop(jobs, "restore_failed", told)
        elif waiting + num_bytes > self._settings.max_pending_save_bytes:
            log.warning("a save of %d bytes was dropped: max_pending_save_bytes", num_bytes)
            self._drop(jobs, "max_pending_save_bytes", "max_pending_save_bytes")
        else:
            step.unsaved = {cache.index: cache for job in jobs for cache in job.caches}

    def save_layer(self, meta: AdpMetadata, name: str) -> None:
        """Save a layer that has just computed, if it is worth a request of its own."""
        step = self._begin(meta)
        cache = step.unsaved.get(self._index_of.get(name, -1))
        if cache is None or self._awaits_proof(step):
            return
        job = step.save[cache.part]
        if cache.slice_bytes * job.num_chunks >= LAYERWISE_SAVE_BYTES:
            del step.unsaved[cache.index]
            self.client.submit_save(job, SAVE_LAYER, [cache], self.client.mover.mark())

    def _awaits_proof(self, step: Step) -> bool:
        """Return whether this step may still turn out to have computed from wrong pages.

        What it computed is then saved at its end, when that is known.
        """
        for part, job in step.restore.items():
            step.unproven[part] = job.unproven(step.unproven.get(part, []))
        return any(step.unproven.values())

    def _drop(self, jobs: Iterable[Job], reason: str, told: str) -> None:
        """Give up a step's save, or what of it is late; reason is the label of its count."""
        for job in jobs:
            if job.number not in self._dropped and not job.finished:
                self._dropped.add(job.number)
                self.stats.add(f"saves_dropped:{reason}")
            job.abandon(told)

    def finish_step(self, meta: AdpMetadata) -> None:
        """Save what is left of the step, as one request a part."""
        step = self._begin(meta)
        self._settle(step)
        if step.unsaved and not step.lost:
            self._save_rest(step)

    def _settle(self, step: Step) -> None:
        """Learn what became of the step's restore, once its layers have computed."""
        if step.lost:  # vLLM comes here on its way out too
            return
        if step.unfenced:
            late = sorted(step.unfenced)
            name = self._caches[late[0]].name
            for job in step.restore.values():
                job.fail(slice(None), f"{name} computed before its pages were fenced")
            for index in late:
                self._fence(step, index)
            self._hooked -= set(late)
        for part, job in step.restore.items():
            job.wait_proven(step.unproven.pop(part, []))
            self._note_failure(step, job)
        step.restore = {}

    def _save_rest(self, step: Step) -> None:
        mark = self.client.mover.mark()
        for part, job in step.save.items():
            rest = [cache for cache in step.unsaved.values() if cache.part == part]
            if rest:
                self.client.submit_save(job, SAVE_REST, rest, mark)
        step.unsaved = {}

    # Reports

    def finished_restores(self, *, idle: bool = False) -> tuple[set[str], set[str]]:
        """Return requests whose asynchronous restore has ended, and those that failed.

        A step in which nothing computes waits a moment here: vLLM spins through such steps,
        and the client's thread needs the interpreter and, on small machines, the core.
        """
        if idle:
            unfinished = [job for restore in self._async for job, _ in restore.jobs]
            unfinished = unfinished or [job for jobs in self._saves.values() for job in jobs]
            if unfinished:
                unfinished[0].wait_finished(IDLE_WAIT_S)
        if not self._async:
            return set(), set()
        done: set[str] = set()
        failed: set[str] = set()
        waiting = []
        for restore in self._async:
            for job, _ in restore.jobs:
                if job.expired:
                    job.abandon("load_timeout_s has passed")
            if not restore.finished:
                waiting.append(restore)
                continue
            done |= restore.request_ids
            if restore.jobs:
                began = min(job.began for job, _ in restore.jobs)
                self.stats.observe("restore_seconds", time.monotonic() - began)
            failed |= self._failed_requests(restore)
        self._async = waiting
        self._report.failed_requests |= failed
        return done, failed

    def _failed_requests(self, restore: AsyncRestore) -> set[str]:
        """Return whose asynchronous restore failed; note the blocks if vLLM wants those."""
        failed = restore.failed_requests
        if failed:
            self.stats.add("restores_failed:async")
            reasons = [job.reason for job, _ in restore.jobs if job.reason]
            log.warning("an asynchronous restore failed: %s", reasons[0])
            if not self._engine.undoable and not takes_failed_requests():
                raise RestoreLostError("; ".join(dict.fromkeys(reasons)))
        if self._engine.undoable:
            for job, _ in restore.jobs:
                self._failed_blocks |= job.failed_blocks
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that were not restored, once; V1 with drafts asks before the step ends."""
        if self._step is not None:
            self._settle(self._step)
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> AdpWorkerMetadata | None:
        """Return what the scheduler side needs to know, None if nothing new."""
        report = self._report
        for step, jobs in list(self._saves.items()):
            late = [job for job in jobs if job.expired]
            self._drop(late, "save_timeout_s", "save_timeout_s has passed")
            if not all(job.finished for job in jobs):
                continue
            del self._saves[step]
            self._note_saved(step, jobs)
            report.saved_steps[step] = 1
            if any(job.abandoned for job in jobs):
                report.unsaved_steps.add(step)
        if self._step is not None and self._failed_step > self._step.meta.acknowledged_failure:
            report.failed_step = self._failed_step
        if self._client is not None and self._client.off and not self._reported_off:
            self._reported_off = True
            report.off = True
            report.off_sessions.add(self._client.generation)
        self._revive()
        if report.is_empty:
            return None
        self._report = AdpWorkerMetadata()
        return report

    def _revive(self) -> None:
        """With `reconnect`: once this rank is off, let a new client join whatever gateway comes."""
        old = self._client
        if not self._settings.reconnect or old is None or not old.ended:
            return
        now = time.monotonic()
        if self._open_client is None or now < self._retry_at:
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

    def _note_saved(self, step: int, jobs: list[Job]) -> None:
        if step in self._dropped:
            self._dropped.discard(step)
        elif any(job.abandoned for job in jobs):
            self.stats.add("saves_dropped:transfer_failed")
        elif jobs:
            self.stats.observe("save_seconds", time.monotonic() - min(job.began for job in jobs))

    def take_stats(self) -> dict[str, dict[str, Any]] | None:
        """Return what was counted since the last call, None if nothing."""
        counts = {} if self._client is None else dict(self._client.counts)
        if self._client is not None and self._client.off:
            counts["turned_off"] = 1
        if counts != self._told:
            for name, total in counts.items():
                self.stats.add(name, total - self._told.get(name, 0))
            self._told |= counts
        return self.stats.take()

    def close(self) -> None:
        """Stop the client; waits for copies in flight."""
        if self._client is not None:
            self._client.close()


def _bytes_of(jobs: Iterable[Job]) -> int:
    """Return the bytes that jobs move on this rank."""
    return sum(job.num_bytes for job in jobs)

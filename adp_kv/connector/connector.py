"""AdpConnector: the vLLM KV connector (V1 API with the hybrid interface).

A façade: every method hands over to the scheduler side or to the worker side, of which
one exists in each object. Contracts, threads and failure scope are theirs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base

from adp_kv.config import connector_settings
from adp_kv.connector.metadata import AdpMetadata, AdpWorkerMetadata
from adp_kv.connector.scheduler import SchedulerSide
from adp_kv.connector.stats import AdpPromMetrics, AdpStats
from adp_kv.connector.vllm_view import log_as_vllm, view_engine
from adp_kv.connector.worker import WorkerSide
from adp_kv.layout.fingerprint import digest
from adp_kv.wire.curve import read_keys

log = logging.getLogger("adp_kv")


class AdpConnector(vllm_base.KVConnectorBase_V1, vllm_base.SupportsHMA):
    """Keeps KV cache on a card behind the gateway and brings it back."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = connector_settings(extra)
        read_keys(settings.key_file)  # a wrong one ends the start, not the cache later
        engine = view_engine(vllm_config, kv_cache_config, settings)
        namespace = digest(engine.facts)
        log.debug("keys of namespace %s hold: %s", namespace.hex(), engine.facts)
        self._config = kv_cache_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == vllm_base.KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(engine, settings, namespace)
        else:
            self._worker = WorkerSide(engine, settings, namespace)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: nobody waits for it to have stored something."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs stay: what has no hook is loaded before and saved after the pass."""
        del extra_config
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: copies go straight into the pages."""
        del kv_transfer_config
        return False

    # Worker side

    @property
    def worker(self) -> WorkerSide:
        """The worker side of this object."""
        assert self._worker is not None, "a worker-side call on the scheduler side"
        return self._worker

    def _meta(self) -> AdpMetadata | None:
        meta = self._connector_metadata
        return meta if isinstance(meta, AdpMetadata) else None

    def _is_idle(self) -> bool:
        meta = self._meta()
        return meta is not None and meta.idle

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches; waits for the gateway and the other ranks."""
        self.worker.register(kv_caches, self._vllm_config, self._config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's restores."""
        del kwargs
        meta = self._meta()
        if meta is not None:
            self.worker.start_load(meta, forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Fence one layer."""
        meta = self._meta()
        if meta is not None:
            self.worker.wait_layer(meta, layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save one layer."""
        del kv_layer, attn_metadata, kwargs
        meta = self._meta()
        if meta is not None:
            self.worker.save_layer(meta, layer_name)

    def wait_for_save(self) -> None:
        """Save what is left of the step; does not wait."""
        meta = self._meta()
        if meta is not None:
            self.worker.finish_step(meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose asynchronous restore has ended (vLLM 0.25 to 0.29)."""
        del finished_req_ids
        done, _ = self.worker.finished_restores(idle=self._is_idle())
        return None, done or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return ended and failed asynchronous restores (vLLM 0.30 and later)."""
        del finished_req_ids
        done, failed = self.worker.finished_restores(idle=self._is_idle())
        results = vllm_base.KVConnectorTransferResults
        return results(finished_sending=set(), finished_recving=done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that were not restored."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> AdpWorkerMetadata | None:
        """Return this rank's report for the scheduler side."""
        return self.worker.take_report()

    # Numbers, of either side

    def get_kv_connector_stats(self) -> AdpStats | None:
        """Return what this side has counted since it was last asked."""
        side = self._worker or self._scheduler
        told = None if side is None else side.take_stats()
        return None if told is None else AdpStats(told)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AdpStats:
        """Return what vLLM carried to its front end as stats again."""
        return AdpStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> AdpPromMetrics:
        """Return the connector's families on vLLM's Prometheus endpoint."""
        return AdpPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler side

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler side of this object."""
        assert self._scheduler is not None, "a scheduler-side call on a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the block pool, for pins."""
        self.scheduler.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Ask early what is stored; not for a streaming session, which the cache leaves alone.

        VLLM drops the last token of each of its turns: keys built from its hashes would name
        other tokens than its blocks hold (0.25 keeps such hashes, 0.32 takes them back).
        """
        if not getattr(request, "resumable", False):
            self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what the card has beyond the local hit."""
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks to restore into."""
        self.scheduler.after_alloc(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> AdpMetadata:
        """Return the step's work."""
        return self.scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the ranks' reports."""
        self.scheduler.on_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its blocks may go, pinned ones stay by themselves."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """As request_finished, for every group."""
        self.scheduler.on_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep stepping until pinned blocks are given back."""
        return self._scheduler is not None and self._scheduler.has_pending_saves

    def has_pending_block_frees(self) -> bool:
        """Pinned blocks come back soon: better wait than preempt."""
        return self._scheduler is not None and self._scheduler.frees_soon()

    def reset_cache(self) -> bool:
        """Hit nothing any more that was stored before, after weights were changed in place say."""
        self.scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Stop threads, release the ring."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

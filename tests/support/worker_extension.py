"""Methods that tests call on an engine's workers (Engine.rpc): only for tests, never product code.

vLLM mixes the class into its worker, in whatever process that runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from hashlib import blake2b
from typing import Any

from adp_kv.errors import TransferError


def _bytes_at(address: int, num_bytes: int) -> bytes:
    """Return memory of the device, or of the host where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ctypes.string_at(address, num_bytes)
    import cupy

    host = ctypes.create_string_buffer(num_bytes)
    torch.cuda.synchronize()
    cupy.cuda.runtime.memcpy(ctypes.addressof(host), address, num_bytes, 2)
    return host.raw


def _client() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.client


class WorkerExtension:
    """Mixed into every worker; names start with adp_ so that none of vLLM's is hidden."""

    def adp_zero_restores(self, on: bool) -> None:
        """From now on (or no longer) put zeros where restored bytes belong.

        The negative control of every restore test: tokens must change.
        """
        client = _client()
        client.__dict__.pop("_slices", None)
        if not on:
            return
        original = client._slices

        def slices(transfer: Any, *picked: Any) -> Any:
            copy = original(transfer, *picked)
            if not transfer.is_put:
                for address in copy.slice_addrs.tolist():
                    ctypes.memset(address, 0, copy.slice_bytes)
            return copy

        client._slices = slices

    def adp_exchange(self, when: str) -> bool:
        """Exchange batches "always", "never" or by their "size"; return whether there is a fan-out.

        The tiny models' batches are too small to be exchanged by themselves. Only between
        requests: all ranks must decide alike.
        """
        fanout = _client().fanout
        if fanout is None:
            return False
        fanout.__dict__.pop("takes", None)
        if when != "size":
            fanout.takes = lambda _shape: when == "always"
        return True

    def adp_share(self, rank: int, what: str, seconds: float = 0.0) -> None:
        """Let one rank's part in exchanges be "well", "fail", "kill" it, or be "late" once."""
        client = _client()
        if client._hello.rank != rank:
            return
        client.__dict__.pop("_slices", None)
        original = client._slices

        def slices(transfer: Any, *picked: Any) -> Any:
            if not transfer.is_put and what == "late":
                client.__dict__.pop("_slices", None)
                time.sleep(seconds)
            elif not transfer.is_put and what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif not transfer.is_put:
                raise TransferError("a test lets this share fail")
            return original(transfer, *picked)

        if what != "well":
            client._slices = slices

    def adp_slow(self, milliseconds: float) -> None:
        """Hold up the compute stream before every restore's mark and every layer.

        So the CPU, and with it our copies, run far ahead of what computes: a copy that does
        not wait for the compute stream, or a layer that does not wait for its pages, shows
        as wrong bytes.
        """
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        if not torch.cuda.is_available():
            return
        worker = get_kv_transfer_group().worker
        cycles = int(milliseconds * 1.7e6)
        start_load, wait_layer = worker.start_load, worker.wait_layer

        def slow_start_load(meta: Any, forward_context: Any) -> None:
            torch.cuda._sleep(cycles)
            start_load(meta, forward_context)

        def slow_wait_layer(meta: Any, name: str) -> None:
            wait_layer(meta, name)
            torch.cuda._sleep(cycles)

        worker.start_load, worker.wait_layer = slow_start_load, slow_wait_layer

    def adp_page_digests(self, blocks: list[int]) -> list[str]:
        """Return a digest of each block's pages, over all caches of this rank."""
        digests = [blake2b(digest_size=16) for _ in blocks]
        for cache in _client().caches.values():
            for block, digest in zip(blocks, digests, strict=True):
                address = cache.base_address + block * cache.block_stride_bytes
                digest.update(_bytes_at(address, cache.page_bytes))
        return [digest.hexdigest() for digest in digests]

    def adp_counts(self) -> dict[str, int]:
        """Return the rank client's counters."""
        return dict(_client().counts)

    def adp_pid(self) -> int:
        """Return the worker's process id."""
        return os.getpid()

    def adp_off(self) -> str | None:
        """Return why the external cache is off on this rank, None if it is on."""
        reason: str | None = _client().off_reason
        return reason

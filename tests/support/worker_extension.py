"""Methods that tests call on an engine's workers (Engine.rpc): only for tests, never product code.

vLLM mixes the class into its worker, in whatever process that runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adp_kv.errors import TransferError
from tests.support.holds import hold


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


def _digest(cache: Any, blocks: list[int]) -> str:
    """Return a digest of a cache's pages of some blocks."""
    digest = blake2b(digest_size=16)
    for block in blocks:
        address = cache.base_address + block * cache.block_stride_bytes
        digest.update(_bytes_at(address, cache.page_bytes))
    return digest.hexdigest()


def _client() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.client


def _parts(kind: str | None) -> set[int]:
    """Return the parts of a kind, all for None."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found = set()
    for part in get_kv_transfer_group().worker._engine.parts:
        window = "state" if part.recurrent else "window"
        if kind in {None, "full" if part.kept_tokens is None else window}:
            found.add(part.index)
    return found


def _noting(submit: Any, noted: dict[str, tuple[int, list[int]]]) -> Any:
    """Return submit_save or submit_restore, which then also notes the chunks of the job."""

    def submit_and_note(job: Any, *how: Any) -> None:
        for key, blocks in zip(job.chunks, job.blocks.tolist(), strict=True):
            if min(blocks) >= 0:
                noted[key.tobytes().hex()] = (job.caches[0].part, blocks)
        submit(job, *how)

    return submit_and_note


class WorkerExtension:
    """Mixed into every worker; names start with adp_ so that none of vLLM's is hidden."""

    def adp_zero_restores(
        self, on: bool, kind: str | None = None, caches: list[str] | None = None
    ) -> None:
        """From now on (or no longer) put zeros where restored bytes belong.

        The negative control of every restore test: tokens must change.

        Args:
            on: whether to.
            kind: only in parts that are "full", "window" or "state"; None: in all.
            caches: only in caches of these names; None: in all.
        """
        client = _client()
        client.__dict__.pop("_slices", None)
        if not on:
            return
        original, chosen = client._slices, _parts(kind)

        def slices(transfer: Any, *picked: Any) -> Any:
            copy = original(transfer, *picked)
            cache = transfer.stack.caches[int(picked[1][0])]
            wanted = caches is None or cache.name in caches
            if not transfer.is_put and cache.part in chosen and wanted:
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

    def adp_hold(self, what: str, path: str, ranks: list[int]) -> None:
        """Let "get" or "put" requests, "restore" or "save" copies stand still while a file exists.

        Args:
            what: of these.
            path: of the file; PATH.RANK appears when a rank has held something.
            ranks: whose.
        """
        client = _client()
        rank = client._hello.rank
        if rank in ranks:
            hold(client, rank, what, Path(path))

    def adp_note_saves(self) -> None:
        """From now on keep which chunks are saved, for adp_saved()."""
        client = _client()
        client.__dict__.pop("submit_save", None)
        submit = client.submit_save
        client.adp_saved = []

        def submit_save(job: Any, kind: int, caches: list[Any], mark: Any) -> None:
            chunks = [key.tobytes().hex() for key in job.chunks]
            client.adp_saved += [(caches[0].part, [c.index for c in caches], chunks)]
            submit(job, kind, caches, mark)

        client.submit_save = submit_save

    def adp_save_layer_by_layer(self) -> None:
        """From now on save each layer as soon as it has computed, however little that is."""
        from adp_kv.connector import worker

        worker.LAYERWISE_SAVE_BYTES = 1

    def adp_saved(self) -> list[tuple[int, list[int], list[str]]]:
        """Return part, cache indices and chunk keys of each save since adp_note_saves()."""
        return list(_client().adp_saved)

    def adp_note_pages(self, *kinds: str) -> None:
        """From now on keep which blocks chunks are saved from and restored into.

        Args:
            kinds: "save", "restore"; none: both.
        """
        client = _client()
        noted = client.adp_noted = {}
        for name in ("submit_save", "submit_restore"):
            client.__dict__.pop(name, None)
            if kinds and name.removeprefix("submit_") not in kinds:
                continue
            client.__dict__[name] = _noting(getattr(client, name), noted)

    def adp_noted_pages(self) -> dict[str, str]:
        """Return a digest of each such chunk's pages, as they are now on this rank, by its key.

        Whoever asks knows that no restore is under way and that vLLM has not reused the blocks.
        """
        digests = {}
        for key, (part, blocks) in _client().adp_noted.items():
            pages = self.adp_page_digests([(block, part) for block in blocks])
            digests[key] = "".join(pages)
        return digests

    def adp_noted_caches(self) -> dict[str, dict[str, str]]:
        """Return the same for each cache by itself: by chunk, then by the cache's name."""
        client, digests = _client(), {}
        for key, (part, blocks) in client.adp_noted.items():
            caches = [cache for cache in client.caches.values() if cache.part == part]
            digests[key] = {cache.name: _digest(cache, blocks) for cache in caches}
        return digests

    def adp_takes_failed_requests(self) -> bool:
        """Return whether vLLM is told of failed restores by request."""
        from adp_kv.connector.vllm_view import takes_failed_requests

        return takes_failed_requests()

    def adp_parts(self) -> dict[str, list[int]]:
        """Return the numbers of the parts by kind."""
        return {kind: sorted(_parts(kind)) for kind in ("full", "window", "state")}

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

    def adp_page_digests(self, owned: list[tuple[int, int]]) -> list[str]:
        """Return a digest of each block's pages, over the caches of its group on this rank.

        Args:
            owned: blocks and their groups; other groups' caches may lie over the same bytes.
        """
        digests = [blake2b(digest_size=16) for _ in owned]
        for cache in _client().caches.values():
            for (block, group), digest in zip(owned, digests, strict=True):
                if group != cache.part:
                    continue
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

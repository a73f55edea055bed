"""Methods that tests call on an engine's workers (Engine.rpc): only for tests, never product code.

vLLM mixes the class into its worker, in whatever process that runs.
"""

from __future__ import annotations

import ctypes
from typing import Any


def _client() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.client


class WorkerExtension:
    """Mixed into every worker; names start with adp_ so that none of vLLM's is hidden."""

    def adp_zero_restores(self, on: bool) -> None:
        """From now on (or no longer) put zeros where restored bytes belong.

        The negative control of every restore test: tokens must change.
        """
        mover = _client().mover
        mover.__dict__.pop("restore", None)
        if not on:
            return
        original = mover.restore

        def restore(copy: Any, after: Any) -> Any:
            for address in copy.slice_addrs.tolist():
                ctypes.memset(address, 0, copy.slice_bytes)
            return original(copy, after)

        mover.restore = restore

    def adp_counts(self) -> dict[str, int]:
        """Return the rank client's counters."""
        return dict(_client().counts)

    def adp_off(self) -> str | None:
        """Return why the external cache is off on this rank, None if it is on."""
        return _client().off_reason

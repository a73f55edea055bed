"""What waiting requests will restore, told to the gateway while they wait.

    lookup answered, request still in vLLM's queue ─► Ahead(chunks that the GPU lacks)
    lookup answered, a long restore is about to be ─► the same, while vLLM makes its tables
    admitted without a restore, aborted, ended     ─► Forget

The chunks are those that the request's gets will name, as far as is known: what each part
needs of the stored prefix, less what the GPU has now. A wrong guess costs a read that
nobody takes.

Threads: vLLM's scheduler calls everything here. Failure scope: none; the gateway drops what
it is not told to forget after a deadline.
"""

from __future__ import annotations

from typing import Any

from adp_kv.connector.local_hits import local_chunks
from adp_kv.connector.vllm_view import EngineView, locally_cached
from adp_kv.sdk.lookup import LookupClient, LookupTicket
from adp_kv.wire.keys import KeyArray, part_keys


class ReadAheadSide:
    """Requests whose lookup was asked and that were not admitted yet."""

    def __init__(self, client: LookupClient, engine: EngineView) -> None:
        self._client = client
        self._engine = engine
        self._waiting: dict[str, LookupTicket] = {}
        self._told: dict[str, list[int]] = {}

    def on_asked(self, request_id: str, lookup: LookupTicket) -> None:
        """Note a request that now waits for its lookup."""
        self._waiting[request_id] = lookup

    def answered(self) -> list[str]:
        """Return the requests whose answer has come since the last call."""
        return [name for name in list(self._waiting) if self.take_answered(name)]

    def take_answered(self, request_id: str) -> bool:
        """Return whether a request's answer has come since it was asked for; true only once."""
        lookup = self._waiting.get(request_id)
        if lookup is None or lookup.stored is None:
            return False
        del self._waiting[request_id]
        return True

    def tell(self, request: Any, keys: KeyArray, hit_tokens: int, pool: Any) -> None:
        """Tell the gateway what a request that still waits will restore.

        Args:
            request: vLLM's.
            keys: uint64 [n, 2], its chunks.
            hit_tokens: where its stored prefix ends.
            pool: vLLM's block pool.
        """
        self._forget(request.request_id)  # told before it was preempted
        num_chunks = hit_tokens // self._engine.chunk_tokens
        local = self._local(request, num_chunks, pool) if num_chunks else 0
        told = []
        for part in self._engine.parts:
            first = max(local, part.first_needed(num_chunks) // part.blocks_per_chunk)
            chunks = part_keys(keys[first:num_chunks], part.index)
            if len(chunks):
                told.append(self._client.read_ahead(chunks, part.index))
        if told:
            self._told[request.request_id] = told

    def _local(self, request: Any, num_chunks: int, pool: Any) -> int:
        """Return the chunks that the GPU has now, as far as that can be looked at."""
        engine = self._engine
        if not engine.undoable:
            return local_chunks(
                pool, engine.parts, request.block_hashes, engine.hash_tokens, num_chunks
            )
        if engine.hash_tokens != engine.parts[0].block_tokens:
            return 0
        num_blocks = locally_cached(pool, request.block_hashes)
        return num_blocks * engine.hash_tokens // engine.chunk_tokens

    def on_admitted(self, request_id: str, *, restores: bool) -> None:
        """A request has its blocks: its gets take what was read, if there are any."""
        self._waiting.pop(request_id, None)
        if not restores:
            self._forget(request_id)

    def on_finished(self, request_id: str) -> None:
        """A request has ended, in whatever way."""
        self._waiting.pop(request_id, None)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        for number in self._told.pop(request_id, []):
            self._client.forget(number)

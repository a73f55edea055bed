"""The scheduler side: what of a prompt is stored, what to restore, what to save.

    on_new_request ─► lookup ─► matched tokens ─► blocks allocated ─► metadata of the step
    step computed ─► full chunks not yet stored ─► metadata, blocks pinned ─► ranks report

Threads: vLLM's scheduler calls everything here; the lookup client has its own thread.
Nothing blocks, but for a step in which nothing computes while an answer is awaited:
vLLM would spin, and the client's threads need the interpreter and, on small machines,
the core. Failure scope: without an answer there is no hit; when a rank or the
gateway is gone there are neither hits nor saves any more.

Pins: a block that a save reads is touched in vLLM's block pool from its selection until
every rank has copied it, so neither the end of its request nor preemption can give it away.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adp_kv import __version__
from adp_kv.config import ConnectorSettings
from adp_kv.connector.metadata import AdpMetadata, AdpWorkerMetadata, Chunks
from adp_kv.connector.read_ahead import ReadAheadSide
from adp_kv.connector.vllm_view import EngineView, adapter_folder, hashes_repeatable, root_hash
from adp_kv.layout.fingerprint import digest, weights_fingerprint
from adp_kv.metrics import Recorder
from adp_kv.sdk.lookup import LookupClient, LookupTicket
from adp_kv.sdk.loop import OFF_MESSAGE
from adp_kv.wire.keys import KeyArray, chunk_keys
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello

log = logging.getLogger("adp_kv")

MAX_KNOWN_CHUNKS = 1 << 20
IDLE_WAIT_S = 0.002
SETTLE_S = 2.0
RETRY_S = 2.0
NORMAL_ENDS = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


@dataclass(slots=True)
class RequestState:
    """What the scheduler side knows of one request.

    Attributes:
        ready_by: until then a gateway that is still being joined is waited for.
        keys: uint64 [n, 2] of the chunks hashed so far.
        blocks: block ids, in order.
        hit_end: where the stored prefix ends, in tokens, as last told to vLLM.
        next_chunk: first chunk not yet considered for saving.
        failed: a restore of it failed; it is not offered another.
    """

    request: Any
    ready_by: float
    namespace: bytes | None = None
    keys: KeyArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.uint64))
    blocks: list[int] = field(default_factory=list)
    lookup: LookupTicket | None = None
    hit_end: int = 0
    next_chunk: int = 0
    failed: bool = False


@dataclass(slots=True)
class Pin:
    """Blocks of one step's save that must not be given away."""

    blocks: list[Any]
    keys: KeyArray
    ranks_left: int


@dataclass(slots=True)
class Selection:
    """Chunks picked for one step: keys, block ids and owners."""

    keys: list[KeyArray] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    def add(self, key: KeyArray, blocks: list[int], request_id: str) -> None:
        """Add one chunk."""
        self.keys.append(key)
        self.blocks.append(blocks)
        self.request_ids.append(request_id)

    def take(self) -> Chunks | None:
        """Return what was added, None if nothing, and start anew."""
        if not self.keys:
            return None
        chunks = Chunks(
            keys=np.stack(self.keys),
            blocks=np.array(self.blocks, dtype=np.int64),
            request_ids=list(self.request_ids),
        )
        self.keys, self.blocks, self.request_ids = [], [], []
        return chunks


class SchedulerSide:
    """Decides what is restored and saved.

    Args:
        engine: facts of the engine.
        settings: of the connector.
        namespace: digest of the facts, as all ranks say it in their Hello.
    """

    def __init__(self, engine: EngineView, settings: ConnectorSettings, namespace: bytes) -> None:
        self._engine = engine
        self._settings = settings
        self._pool: Any = None
        self._states: dict[str, RequestState] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._restore, self._async_restore, self._save = Selection(), Selection(), Selection()
        self._pins: dict[int, Pin] = {}
        self._step = 0
        self._computed: dict[str, int] = {}
        self._acknowledged_failure = -1
        self._namespace: bytes | None = None
        self._repeatable: bool | None = None
        self._ranks_off = False
        self._awaits_answer = False
        self.stats = Recorder()
        self._hello = Hello(
            version=PROTOCOL_VERSION,
            release=__version__,
            engine=engine.engine_id,
            rank=-1,
            world_size=engine.world_size,
            namespace=namespace,
            caches=[],
            pid=0,
        )
        self._retry_at = 0.0
        self.client = self._open_client()
        self._ahead = ReadAheadSide(self.client, engine)
        self.client.start()
        # The ranks have joined, or given up: the Welcome comes at once, and the first
        # request need not wait for it.
        self.client.wait_settled(SETTLE_S)

    def _open_client(self) -> LookupClient:
        settings = self._settings
        client = LookupClient(
            self._hello,
            self._engine.address,
            settings.gateway_timeout_s,
            settings.connect_timeout_s,
        )
        client.key_file = settings.key_file
        return client

    def _revive(self) -> None:
        """With `reconnect`: once lookups are off, or a rank is, join whatever gateway comes.

        The Welcome comes when every rank has joined again. What the last gateway said of
        chunks is forgotten: the next one's card may be another.
        """
        now = time.monotonic()
        if not self._settings.reconnect or not self.client.ended or now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        self.client.close()
        self.client = self._open_client()
        self.client.again = True
        self._ahead = ReadAheadSide(self.client, self._engine)
        self._namespace, self._ranks_off = None, False
        self._known.clear()
        for state in self._states.values():
            state.lookup = None
        self.client.start()

    def bind_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, for pins."""
        self._pool = pool

    @property
    def off(self) -> bool:
        """Whether there are neither hits nor saves."""
        return self.client.off or self._ranks_off or self._repeatable is False

    def _ready(self) -> bool:
        """Return whether keys can be built: the gateway has welcomed the engine."""
        if self.off or self.client.welcome is None:
            return False
        if self._namespace is None:
            self._repeatable = hashes_repeatable()
            if not self._repeatable:
                log.error(
                    "%s: block hashes change at every start, so nothing stored would be found "
                    "again. Set PYTHONHASHSEED=0 in the environment of every vLLM process",
                    OFF_MESSAGE,
                )
                return False
            root = root_hash()
            facts = {
                "engine": dict(self._engine.facts),
                "root": root,
                "geometry": self.client.welcome.geometry,
            }
            self._namespace = digest(facts)
            log.info(
                "keys of this engine, for adp-kv inspect: --namespace %s --root %s "
                "--algorithm %s --hash-tokens %d --chunk-tokens %d",
                self._namespace.hex(),
                root.hex(),
                self._engine.facts.get("hash"),
                self._engine.hash_tokens,
                self._engine.chunk_tokens,
            )
        return True

    # Lookup and restore

    def on_new_request(self, request: Any) -> None:
        """Note a request and ask early what of it is stored."""
        state = RequestState(request, time.monotonic() + self._settings.lookup_timeout_s)
        self._states[request.request_id] = state
        if self._ready():
            self._ask(state)

    def _ask(self, state: RequestState) -> None:
        self._hash(state)
        if len(state.keys):
            state.lookup = self.client.ask(state.keys, self._settings.lookup_timeout_s)
            self.stats.add("lookups")
            self.stats.add("lookup_chunks", len(state.keys))
            self._ahead.on_asked(state.request.request_id, state.lookup)

    def _hash(self, state: RequestState) -> None:
        """Extend the request's chunk keys to all block hashes it has."""
        per_chunk = self._engine.hashes_per_chunk
        hashes = state.request.block_hashes
        done, total = len(state.keys), len(hashes) // per_chunk
        if done == total:
            return
        if state.namespace is None:
            state.namespace = self._namespace_of(state.request)
        last = [bytes(hashes[(i + 1) * per_chunk - 1]) for i in range(done, total)]
        state.keys = np.concatenate([state.keys, chunk_keys(state.namespace, last)])

    def _namespace_of(self, request: Any) -> bytes:
        base = self._namespace or b""
        folder = adapter_folder(request)
        if folder is None:
            return base
        # vLLM hashes an adapter's name and path; what changes the bytes is its content.
        content = weights_fingerprint(folder) if folder.is_dir() else str(folder)
        return digest({"base": base, "adapter": content})

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return (tokens the card has beyond num_computed, whether they load asynchronously).

        None: ask again, the answer is on its way. Idempotent until blocks are allocated.
        """
        state = self._states.get(request.request_id)
        skip = getattr(request, "skip_reading_prefix_cache", False)
        if state is None or state.failed or skip:
            return 0, False
        if not self._ready():
            joining = self.client.welcome is None and not self.client.again and not self.off
            self._awaits_answer = joining and time.monotonic() < state.ready_by
            return (None if self._awaits_answer else 0), False
        if state.lookup is None:
            self._ask(state)
        if state.lookup is not None and state.lookup.stored is None and not state.lookup.expired:
            self._awaits_answer = True
            return None, False
        self._note_answer(state.lookup)
        hit = self._hit_tokens(state, request.num_tokens)
        external = max(0, hit - num_computed)
        state.hit_end = hit
        return external, bool(external) and self._engine.async_loads

    def _note_answer(self, lookup: LookupTicket | None) -> None:
        if lookup is None or lookup.noted:
            return
        lookup.noted = True
        if lookup.stored is None:
            self.stats.add("lookups_unanswered")
            return
        self.stats.add("lookup_chunks_found", int(lookup.stored.sum()))
        self.stats.observe("lookup_seconds", lookup.answered_at - lookup.asked_at)

    def _hit_tokens(self, state: RequestState, num_tokens: int) -> int:
        """Return the length of the stored prefix; at least one token is left to compute."""
        if state.lookup is None or state.lookup.stored is None:
            return 0
        stored = state.lookup.stored
        for key, there in zip(state.keys[: len(stored)], stored, strict=True):
            self._remember(key.tobytes()) if there else self._known.pop(key.tobytes(), None)
        num_chunks = int(np.argmin(stored)) if not stored.all() else len(stored)
        return min(num_chunks, (num_tokens - 1) // self._engine.chunk_tokens) * (
            self._engine.chunk_tokens
        )

    def _remember(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > MAX_KNOWN_CHUNKS:
            self._known.popitem(last=False)

    def after_alloc(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """Note the blocks that vLLM reserved for num_external tokens to restore."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        state.lookup = None  # a later admission (after preemption) asks anew
        self._ahead.on_admitted(request.request_id, restores=num_external > 0)
        if num_external == 0:
            return
        chunk, block = self._engine.chunk_tokens, self._engine.block_tokens
        end = state.hit_end
        start = end - num_external
        selection = self._async_restore if self._engine.async_loads else self._restore
        per_chunk = self._engine.blocks_per_chunk
        for i in range(start // chunk, end // chunk):
            first = i * per_chunk
            blocks = block_ids[first : first + per_chunk]
            num_local = max(0, start // block - first)
            blocks = [-1] * num_local + blocks[num_local:]
            selection.add(state.keys[i], blocks, request.request_id)
        self.stats.add("tokens_restored", num_external)

    # Save

    def build_meta(self, output: Any) -> AdpMetadata:
        """Return the step's work for the ranks; called once a step."""
        self._step += 1
        self._revive()
        idle = output.total_num_scheduled_tokens == 0
        if idle and self._awaits_answer:
            self.client.wait_news(IDLE_WAIT_S)
        self._awaits_answer = False
        for request_id in self._ahead.answered():
            asked = self._states[request_id]
            hit = self._hit_tokens(asked, asked.request.num_tokens)
            self._ahead.tell(asked.request, asked.keys, hit, self._pool)
        self._follow_blocks(output)
        if self._settings.save and self._ready():
            for request_id, num_scheduled in output.num_scheduled_tokens.items():
                state = self._states.get(request_id)
                if state is not None:
                    computed = self._computed.get(request_id, 0) + num_scheduled
                    self._select_saves(state, min(computed, state.request.num_tokens))
        save = self._save.take()
        if save is not None:
            self._pin(save)
        return AdpMetadata(
            step=self._step,
            idle=idle,
            acknowledged_failure=self._acknowledged_failure,
            restore=self._restore.take(),
            async_restore=self._async_restore.take(),
            save=save,
        )

    def _follow_blocks(self, output: Any) -> None:
        """Keep each request's block ids and computed tokens as the workers will see them."""
        self._computed = {}
        for new in output.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            state = self._states.get(new.req_id)
            if state is not None:
                state.blocks = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            self._computed[request_id] = cached.num_computed_tokens[i]
            state = self._states.get(request_id)
            fresh = cached.new_block_ids[i]
            if state is None or fresh is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.blocks = list(fresh[0])
            else:
                state.blocks.extend(fresh[0])

    def _select_saves(self, state: RequestState, num_final: int) -> None:
        """Pick the chunks whose tokens are all computed after this step and known."""
        self._hash(state)
        per_chunk = self._engine.blocks_per_chunk
        full = min(
            num_final // self._engine.chunk_tokens, len(state.keys), len(state.blocks) // per_chunk
        )
        for i in range(state.next_chunk, full):
            key = state.keys[i].tobytes()
            if key in self._known:
                continue
            blocks = state.blocks[i * per_chunk : (i + 1) * per_chunk]
            self._remember(key)
            # Now, not with the step's metadata: a request that has ended gives its blocks
            # away before the next step is built.
            self._pool.touch([self._pool.blocks[block] for block in blocks])
            self._save.add(state.keys[i], blocks, state.request.request_id)
            self.stats.add("chunks_saved")
        state.next_chunk = max(state.next_chunk, full)

    def _pin(self, save: Chunks) -> None:
        blocks = [self._pool.blocks[b] for b in save.blocks.reshape(-1).tolist()]
        self._pins[self._step] = Pin(blocks, save.keys, self._engine.world_size)

    def _unpin(self, step: int, num_ranks: int) -> None:
        pin = self._pins.get(step)
        if pin is None:
            return
        pin.ranks_left -= num_ranks
        if pin.ranks_left <= 0:
            del self._pins[step]
            self._pool.free_blocks(pin.blocks)

    def on_output(self, output: Any) -> None:
        """Take in what the ranks report after a step."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if not isinstance(report, AdpWorkerMetadata):
            return
        for step in report.unsaved_steps & set(self._pins):
            self.stats.add("chunks_unsaved", len(self._pins[step].keys))
            for key in self._pins[step].keys:
                self._known.pop(key.tobytes(), None)
        for step, num_ranks in report.saved_steps.items():
            self._unpin(step, num_ranks)
        if report.failed_step > self._acknowledged_failure:
            self._acknowledged_failure = report.failed_step
            for state in self._states.values():
                self._consider_again(state)
        for request_id in report.failed_requests & set(self._states):
            self._states[request_id].failed = True
            self._consider_again(self._states[request_id])
        # With `reconnect`, a rank's news of the session before must not end this one.
        ours = not self._settings.reconnect or self.client.generation in report.off_sessions
        if report.off and ours and not self._ranks_off:
            self._ranks_off = True
            log.warning("no more lookups and saves: a worker rank has turned the cache off")

    def _consider_again(self, state: RequestState) -> None:
        """After a failed restore: what is computed anew may have to be stored anew."""
        state.next_chunk = 0
        for key in state.keys:
            self._known.pop(key.tobytes(), None)

    def on_finished(self, request: Any) -> None:
        """Forget a request; chunks it filled with its last tokens are saved in the next step."""
        state = self._states.pop(request.request_id, None)
        self._ahead.on_finished(request.request_id)
        if state is None or not self._settings.save or not self._ready():
            return
        # Only after a normal end: an aborted or failed request may hold pages that were
        # computed from ones that never came.
        normal = getattr(request.status, "name", "") in NORMAL_ENDS
        if normal and not state.failed and state.blocks:
            self._select_saves(state, min(request.num_tokens - 1, request.num_computed_tokens))

    @property
    def has_pending_saves(self) -> bool:
        """Whether the engine should keep stepping until blocks are given back."""
        return bool(self._pins) or bool(self._save.keys)

    def take_stats(self) -> dict[str, dict[str, Any]] | None:
        """Return what was counted since the last call, None if nothing."""
        self.stats.show("off", float(self.off))
        self.stats.show("pinned_blocks", sum(len(pin.blocks) for pin in self._pins.values()))
        return self.stats.take()

    def close(self) -> None:
        """Stop the lookup client."""
        self.client.close()

"""The scheduler side: what of a prompt is stored, what to restore, what to save.

    on_new_request ─► lookup ─► matched tokens ─► blocks allocated ─► metadata of the step
    step computed ─► full chunks not yet stored ─► metadata, blocks pinned ─► ranks report

Threads: vLLM's scheduler calls everything here; the lookup client has its own thread.
Nothing blocks, but for a step in which nothing computes while an answer is awaited:
vLLM would spin, and the client's threads need the interpreter and, on small machines,
the core. Failure scope: without an answer there is no hit; when a rank or the
gateway is gone there are neither hits nor saves any more.

Parts: a model's KV cache groups have tables, chunks and commits of their own (layout/parts.py).
A hit ends where all of them have what they need; what each saves, and how long its blocks
are pinned, is in saves.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from adp_kv import __version__
from adp_kv.config import ConnectorSettings
from adp_kv.connector.local_hits import trim_local_hit
from adp_kv.connector.metadata import AdpMetadata, AdpWorkerMetadata
from adp_kv.connector.read_ahead import ReadAheadSide
from adp_kv.connector.request_state import RequestState, Selection
from adp_kv.connector.saves import SaveSide
from adp_kv.connector.tainted import EndedTables, forget_tainted
from adp_kv.connector.vllm_view import EngineView, adapter_folder, hashes_repeatable, root_hash
from adp_kv.errors import GatewayError
from adp_kv.layout.fingerprint import Fingerprints, digest
from adp_kv.layout.parts import Part, usable_chunks
from adp_kv.metrics import Recorder
from adp_kv.sdk.lookup import LookupClient, LookupTicket
from adp_kv.sdk.loop import OFF_MESSAGE
from adp_kv.wire.keys import chunk_keys, part_keys
from adp_kv.wire.messages import PROTOCOL_VERSION, Hello

log = logging.getLogger("adp_kv")

IDLE_WAIT_S = 0.002
SETTLE_S = 2.0
RETRY_S = 2.0
NORMAL_ENDS = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}
AHEAD_TOKENS = 8192
"""From so many tokens on vLLM needs milliseconds from here to the gets, for blocks and tables (4 ms
for 15,000 on a slow core): the card reads meanwhile."""


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
        self._states: dict[str, RequestState] = {}
        self._restore, self._async_restore = Selection(), Selection()
        self._step = 0
        self._computed: dict[str, int] = {}
        self._acknowledged_failure = -1
        self._namespace: bytes | None = None
        self._epoch = b""
        self._repeatable: bool | None = None
        self._ranks_off = False
        self._awaits_answer = False
        self._ended = EndedTables()
        self._adapters = Fingerprints()
        self.stats = Recorder()
        self.saves = SaveSide(engine, self.stats, self._hash)
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
        if not self._settings.reconnect or not self.client.ended:
            return
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        self.client.close()
        self.client = self._open_client()
        self.client.again = True
        self._ahead = ReadAheadSide(self.client, self._engine)
        self._namespace, self._ranks_off = None, False
        self.saves.forget_all()
        for state in self._states.values():
            state.lookup = None
        self.client.start()

    def reset(self) -> None:
        """Neither hit nor extend what was stored so far: weights were changed in place, say.

        The card is others' too, so nothing is deleted: from now on this engine's keys are its own,
        until it ends. What is being computed may be of both kinds of weights and is left alone.
        """
        self._epoch, self._namespace = os.urandom(16), None
        self.saves.drop_picked()
        for state in self._states.values():
            state.unnamed = state.request.num_computed_tokens > 0
            state.forget_keys()
        log.info("the external KV cache was reset: this engine's keys are its own from now on")

    def bind_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, for pins."""
        self.saves.pool = pool

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
                **({"epoch": self._epoch} if self._epoch else {}),
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
        ready_by = time.monotonic() + self._settings.lookup_timeout_s
        state = RequestState(request, ready_by, [0] * len(self._engine.parts))
        self._states[request.request_id] = state
        if self._ready():
            self._ask(state)

    def _ask(self, state: RequestState) -> None:
        self._hash(state)
        if len(state.keys):
            keys = np.concatenate([part_keys(state.keys, p.index) for p in self._engine.parts])
            state.lookup = self.client.ask(keys, self._settings.lookup_timeout_s)
            self.stats.add("lookups")
            self.stats.add("lookup_chunks", len(keys))
            self._ahead.on_asked(state.request.request_id, state.lookup)

    def _hash(self, state: RequestState) -> None:
        """Extend the request's chunk keys to all block hashes it has."""
        per_chunk = self._engine.hashes_per_chunk
        hashes = state.request.block_hashes
        done, total = len(state.keys), len(hashes) // per_chunk
        if done == total:
            return
        if state.unnamed:
            return
        if state.namespace is None:
            try:
                state.namespace = self._namespace_of(state.request)
            except OSError as error:  # somebody replaces the adapter's files right now
                state.unnamed = True
                log.warning("a request's adapter can't be read, it is left alone: %s", error)
                return
        last = [bytes(hashes[(i + 1) * per_chunk - 1]) for i in range(done, total)]
        state.keys = np.concatenate([state.keys, chunk_keys(state.namespace, last)])

    def _namespace_of(self, request: Any) -> bytes:
        base = self._namespace or b""
        folder = adapter_folder(request)
        if folder is None:
            return base
        # vLLM hashes an adapter's name and path; what changes the bytes is its content.
        content = self._adapters.fingerprint(folder) if folder.is_dir() else str(folder)
        return digest({"base": base, "adapter": content})

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return (tokens the card has beyond num_computed, whether they load asynchronously).

        None: ask again, the answer is on its way. Idempotent until blocks are allocated.
        """
        external = self._external_tokens(request, num_computed)
        if external == 0 and self._engine.local_hits_diverge:
            whole = trim_local_hit(
                self.saves.pool,
                self._engine.parts,
                request.block_hashes,
                self._engine.hash_tokens,
                num_computed // self._engine.chunk_tokens,
            )
            external = 0 if whole else None
        loads_async = bool(external) and self._loads_async()
        if (state := self._states.get(request.request_id)) is not None:
            state.loads_async = loads_async
        return external, loads_async

    def _loads_async(self) -> bool:
        """Return whether a restore lets the engine go on.

        Layer by layer the first token comes some 30 ms sooner, but nobody else gets one until
        the last layer is there: for a request that has the engine to itself (docs/tuning.md).
        """
        others = len(self._states) > 1
        return self._engine.async_loads or (others and self._engine.async_beside_others)

    def _external_tokens(self, request: Any, num_computed: int) -> int | None:
        state = self._states.get(request.request_id)
        skip = getattr(request, "skip_reading_prefix_cache", False)
        if state is None or state.failed or skip:
            return 0
        if not self._ready():
            joining = self.client.welcome is None and not self.client.again and not self.off
            self._awaits_answer = joining and time.monotonic() < state.ready_by
            return None if self._awaits_answer else 0
        if state.lookup is None:
            self._ask(state)
        if state.lookup is not None and state.lookup.stored is None and not state.lookup.expired:
            self._awaits_answer = True
            return None
        self._note_answer(state.lookup)
        state.hit_end = self._hit_tokens(state, request.num_tokens)
        external = max(0, state.hit_end - num_computed)
        if external >= AHEAD_TOKENS and self._ahead.take_answered(request.request_id):
            self._ahead.tell(request, state.keys, state.hit_end, self.saves.pool)
        return external

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
        stored = state.lookup.stored.reshape(len(self._engine.parts), -1)
        keys = state.keys[: stored.shape[1]]
        for part, row in zip(self._engine.parts, stored.tolist(), strict=True):
            for key, there in zip(part_keys(keys, part.index), row, strict=True):
                self.saves.note(key.tobytes(), stored=there)
        limit = (num_tokens - 1) // self._engine.chunk_tokens
        num_chunks = usable_chunks(self._engine.parts, stored[:, :limit])
        if self._engine.draft_cache and num_chunks:
            # A draft model's last entry before the end was computed from whatever token came
            # next for whoever stored it: recompute one chunk, as vLLM does with a block.
            num_chunks = usable_chunks(self._engine.parts, stored[:, : num_chunks - 1])
        return num_chunks * self._engine.chunk_tokens

    def after_alloc(self, request: Any, tables: Sequence[Sequence[Any]], num_external: int) -> None:
        """Note the blocks that vLLM reserved for num_external tokens to restore.

        Args:
            request: vLLM's.
            tables: its blocks of each group.
            num_external: as matched() said; 0 where none are restored.
        """
        state = self._states.get(request.request_id)
        if state is None:
            return
        state.lookup = None  # a later admission (after preemption) asks anew
        self._ahead.on_admitted(request.request_id, restores=num_external > 0)
        if num_external == 0:
            return
        start = state.hit_end - num_external
        for part, table in zip(self._engine.parts, tables, strict=True):
            self._restore_part(state, part, table, start)
        self.stats.add("tokens_restored", num_external)

    def _restore_part(
        self, state: RequestState, part: Part, table: Sequence[Any], start: int
    ) -> None:
        """Pick what one group lacks: what begins at start, and what it did not have before."""
        end = state.hit_end // self._engine.chunk_tokens
        first = part.first_needed(end)
        keys = part_keys(state.keys[:end], part.index)
        selection = self._async_restore if state.loads_async else self._restore
        begin = first // part.blocks_per_chunk
        if not self._engine.local_hits_diverge:
            begin = max(begin, start // self._engine.chunk_tokens)
        for chunk in range(begin, end):
            blocks = []
            for position in part.positions(chunk):
                block = table[position]
                local = position * part.block_tokens < start and block.block_hash is not None
                unwanted = position < first or local
                if not unwanted and block.is_null:
                    raise GatewayError(
                        f"vLLM reserved no block {position} of group {part.index} for a restore of "
                        f"{state.hit_end} tokens: its tables are not what adp-kv expects"
                    )
                blocks.append(-1 if unwanted else block.block_id)
            if any(block >= 0 for block in blocks):
                selection.add(part.index, keys[chunk], blocks, state.request.request_id)

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
            self._ahead.tell(asked.request, asked.keys, hit, self.saves.pool)
        self._follow_blocks(output)
        if self._settings.save and self._ready():
            self.saves.pick(self._states, output, self._computed)
        return AdpMetadata(
            step=self._step,
            idle=idle,
            acknowledged_failure=self._acknowledged_failure,
            restore=self._restore.take(),
            async_restore=self._async_restore.take(),
            save=self.saves.take(self._step, len(output.num_scheduled_tokens)),
        )

    def _follow_blocks(self, output: Any) -> None:
        """Keep each request's block ids and computed tokens as the workers will see them."""
        cached = output.scheduled_cached_reqs
        self._computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            state = self._states.get(new.req_id)
            if state is not None:
                state.follow_tables(new.block_ids, from_start=True)
        for request_id, fresh in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = None if fresh is None else self._states.get(request_id)
            if state is not None:
                state.follow_tables(fresh, from_start=request_id in cached.resumed_req_ids)

    def on_output(self, output: Any) -> None:
        """Take in what the ranks report after a step."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if not isinstance(report, AdpWorkerMetadata):
            return
        for step in report.unsaved_steps:
            self.saves.given_up(step)
        for step, num_ranks in report.saved_steps.items():
            self.saves.released(step, num_ranks)
        self._forget_tainted(output, report.failed_step)
        if report.failed_requests or report.failed_step > self._acknowledged_failure:
            self.saves.doubt_copied()
        if report.failed_step > self._acknowledged_failure:
            self._acknowledged_failure = report.failed_step
            self.saves.drop_picked()
            for state in self._states.values():
                self.saves.consider_again(state)
        for request_id in report.failed_requests & set(self._states):
            self._states[request_id].failed = True
            self.saves.consider_again(self._states[request_id])
        # With `reconnect`, a rank's news of the session before must not end this one, nor that of
        # an attempt to join (0): it tries again, as this side may be doing.
        joined = self.client.generation
        ours = not self._settings.reconnect or (joined > 0 and joined in report.off_sessions)
        if report.off and ours and not self._ranks_off:
            self._ranks_off = True
            log.warning("no more lookups and saves: a worker rank has turned the cache off")

    def _forget_tainted(self, output: Any, step: int) -> None:
        invalid = set(getattr(output, "invalid_block_ids", None) or ())
        if not invalid or len(self._engine.parts) > 1:  # then vLLM itself stops
            return
        live = [state.tables[0] for state in self._states.values() if state.tables]
        forget_tainted(self.saves.pool, [*live, *self._ended.since(step)], invalid)

    def on_finished(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """Forget a request; chunks it filled with its last tokens are saved in the next step.

        Args:
            request: vLLM's.
            tables: its block ids of each group, which it is about to give away.
        """
        state = self._states.pop(request.request_id, None)
        self._ahead.on_finished(request.request_id)
        if not self._engine.async_loads:
            # One that was preempted has given its blocks away before its end.
            for known in (tables, state.tables if state is not None else ()):
                if known:
                    self._ended.add(self._step, known[0])
        if state is None or not self._settings.save or not self._ready():
            return
        # Only after a normal end: an aborted or failed request may hold pages that were
        # computed from ones that never came.
        normal = getattr(request.status, "name", "") in NORMAL_ENDS
        if normal and not state.failed and state.tables:
            num_final = min(request.num_tokens - 1, request.num_computed_tokens)
            self.saves.pick_last(state, tables, num_final)

    @property
    def has_pending_saves(self) -> bool:
        """Whether the engine should keep stepping until blocks are given back."""
        return self.saves.pending

    def frees_soon(self) -> bool:
        """Return whether pinned blocks come back soon; asked where vLLM has too few."""
        self.saves.hurry()
        return self.saves.pending

    def take_stats(self) -> dict[str, dict[str, Any]] | None:
        """Return what was counted since the last call, None if nothing."""
        # With `reconnect`: until the next gateway is joined this side is not off, but hits nothing.
        waits = self.client.again and self.client.welcome is None
        self.stats.show("off", float(self.off or waits))
        self.stats.show("pinned_blocks", self.saves.num_pinned)
        return self.stats.take()

    def close(self) -> None:
        """Stop the lookup client."""
        self.client.close()

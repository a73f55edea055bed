"""What a step saves: chunks picked by part, and the pins on their blocks until they are copied.

    attention   every chunk whose tokens are all computed and known
    window      the same, if its last blocks are still there
    state       what vLLM says this step leaves (0.29), or what it leaves at its end (0.25)

Threads: vLLM's scheduler. Failure scope: a save that some rank gives up is forgotten, so that
a later request stores the chunk.

Pins: a block that a save reads is touched in vLLM's block pool from its selection until
every rank has copied it, so neither the end of its request nor preemption can give it away.

A chunk is saved once: requests with the same prefix look it up while it is on its way, and the card
does not have it yet. So what a lookup does not find counts only if it is not being saved, and was
not a moment ago: from the ring to the card it takes a while more.

Small saves of large batches wait for company. A save costs every rank about half a millisecond of
the interpreter that vLLM's own thread needs, whatever its size, and a large batch that decodes
completes a chunk every few steps; that is felt where the interpreter bounds a step, not where the
device does (docs/design/restore-profile.md). So few chunks wait, pinned, until there are more or a
moment has passed; never where few requests compute, or none; nor where vLLM wants blocks, nor over
a failed restore, from whose pages they may have been computed. A state is overwritten by the next
step and never waits, nor does anything else of its model.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adp_kv.connector.metadata import Chunks
from adp_kv.connector.request_state import RequestState, Selection
from adp_kv.connector.vllm_caches import NULL_BLOCK
from adp_kv.connector.vllm_view import EngineView, offered_states, tables_now
from adp_kv.layout.parts import Part
from adp_kv.metrics import Recorder
from adp_kv.wire.keys import part_keys

MAX_KNOWN_CHUNKS = 1 << 20
LARGE_BATCH = 8
"""In steps of fewer requests nothing waits: chunks are seldom completed there."""
ENOUGH_CHUNKS = 8
"""So many picked chunks, over all parts, go out with the step that picks the last of them."""
MAX_WAIT_S = 0.2
"""Fewer go out so long after the first was picked, some thirty steps of a batch that decodes."""
COMMIT_S = 10.0
"""What ranks have copied counts as stored so long, whatever a lookup says; a slow card needs some
seconds for a ring that is full. A chunk that it could not write is stored by a later request."""


@dataclass(slots=True)
class Pin:
    """Blocks of one step's save that must not be given away."""

    blocks: list[Any]
    keys: list[bytes]
    ranks_left: int


class SaveSide:
    """Picks and pins.

    Args:
        engine: facts of the engine.
        stats: of the scheduler side.
        hash_request: extends a request's keys to all block hashes it has.

    Attributes:
        pool: vLLM's block pool, once it is bound.
    """

    def __init__(
        self, engine: EngineView, stats: Recorder, hash_request: Callable[[RequestState], None]
    ) -> None:
        self.pool: Any = None
        self._engine = engine
        self._stats = stats
        self._hash = hash_request
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._picked = Selection()
        self._picked_keys: set[bytes] = set()
        self._copying: set[bytes] = set()  # keys of pins
        self._copied: OrderedDict[bytes, float] = OrderedDict()  # and until when that counts
        self._wait_ends = 0.0
        self._in_a_hurry = False
        # Parts of which every chunk is stored; of others what is at certain boundaries.
        self._by_tokens = [p.index for p in engine.parts if engine.every_state or not p.recurrent]
        self._only_by_tokens = len(self._by_tokens) == len(engine.parts)
        self._has_states = any(part.recurrent for part in engine.parts)
        self._has_windows = any(p.kept_tokens is not None and not p.recurrent for p in engine.parts)
        self._pins: dict[int, Pin] = {}

    @property
    def pending(self) -> bool:
        """Whether the engine should keep stepping until blocks are given back."""
        return bool(self._pins) or bool(self._picked)

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned for saves under way or waiting for company."""
        return self._picked.num_blocks + sum(len(pin.blocks) for pin in self._pins.values())

    def note(self, key: bytes, *, stored: bool) -> None:
        """Remember what a lookup says of a chunk, that it is stored or is not."""
        if not stored:
            if not self._is_on_its_way(key):
                self._known.pop(key, None)
            return
        self._known[key] = None
        if len(self._known) > MAX_KNOWN_CHUNKS:
            self._known.popitem(last=False)

    def _is_on_its_way(self, key: bytes) -> bool:
        if key in self._picked_keys or key in self._copying:
            return True
        return self._copied.get(key, 0.0) > time.monotonic()

    def forget_all(self) -> None:
        """Forget which chunks are stored: another card may be behind the next gateway."""
        self._known.clear()
        self._copied.clear()

    def doubt_copied(self) -> None:
        """After a failed restore: what was copied a moment ago may be lost, as lookups now say."""
        self._copied.clear()

    def consider_again(self, state: RequestState) -> None:
        """After a failed restore: what is computed anew may have to be stored anew."""
        state.next_chunk, state.due = [0] * len(self._engine.parts), 0
        for part in self._engine.parts:
            self._forget(key.tobytes() for key in part_keys(state.keys, part.index))

    def pick(
        self, states: Mapping[str, RequestState], output: Any, computed: Mapping[str, int]
    ) -> None:
        """Pick what a step completes and what vLLM offers.

        Most requests of a step complete no chunk. vLLM's scheduler waits meanwhile, so they are
        passed over at the price of a comparison.
        """
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state is None:
                continue
            num_computed = computed.get(request_id, 0)
            if self._has_windows:
                state.most_computed = max(state.most_computed, num_computed)
            if num_computed + num_scheduled >= state.due:
                self._pick_step(state, output, num_computed, num_scheduled)
        if self._has_states:
            self._pick_offered(states, output)

    def _pick_step(
        self, state: RequestState, output: Any, num_computed: int, num_scheduled: int
    ) -> None:
        """Pick what a request's step completes, states that vLLM offers aside."""
        after = num_computed + num_scheduled
        if self._engine.draft_cache:
            after = num_computed  # the draft model computes its part after the step's save
        final = min(after, state.request.num_tokens)
        chunk, rest = divmod(final, self._engine.chunk_tokens)
        if any(chunk > state.next_chunk[part] for part in self._by_tokens):
            tables = tables_now(output, state.request.request_id)
            # Only what vLLM keeps while this step computes, unless the tables say so themselves.
            kept_from = None if tables else max(num_computed, state.most_computed)
            self._pick(state, tables or state.tables, final, kept_from)
        if self._only_by_tokens:
            state.due = (min(state.next_chunk) + 1) * self._engine.chunk_tokens
            return
        if rest or final != after or self._engine.every_state:
            return
        if offered_states(output) is None:
            self._pick_states_before(state, chunk)

    def pick_last(
        self, state: RequestState, tables: Sequence[Sequence[int]], num_final: int
    ) -> None:
        """Pick what a request that ends filled with its last tokens; its blocks go at once."""
        self._pick(state, tables, num_final, None)

    def _pick(
        self,
        state: RequestState,
        tables: Sequence[Sequence[int]],
        num_final: int,
        num_kept_from: int | None,
    ) -> None:
        """Pick the chunks whose tokens are all computed after this step and known.

        Args:
            state: of the request.
            tables: its block ids of each part.
            num_final: tokens that are computed and known.
            num_kept_from: as many tokens counted as computed when vLLM gave up blocks last; None:
                the tables have the null block instead of those.
        """
        self._hash(state)
        for index in self._by_tokens:
            part, table = self._engine.parts[index], tables[index]
            full = min(
                num_final // self._engine.chunk_tokens,
                len(state.keys),
                len(table) // part.blocks_per_chunk,
            )
            kept = 0 if num_kept_from is None else part.first_kept(num_kept_from)
            for chunk in range(state.next_chunk[part.index], full):
                positions = part.positions(chunk)
                if positions.start >= kept:
                    self._take(state, part, chunk, [table[p] for p in positions])
            state.next_chunk[part.index] = max(state.next_chunk[part.index], full)

    def _pick_states_before(self, state: RequestState, chunk: int) -> None:
        """Pick the states that a step leaves at its end, where a chunk begins (0.25)."""
        self._hash(state)
        if not 0 < chunk <= len(state.keys):
            return
        for part in self._engine.parts:
            table, last = state.tables[part.index], part.positions(chunk - 1)[-1]
            if part.recurrent and last < len(table):
                self._take(state, part, chunk - 1, [table[last]])

    def _pick_offered(self, states: Mapping[str, RequestState], output: Any) -> None:
        """Pick the states that vLLM says this step leaves at boundaries (0.29 and later)."""
        for request_id, offers in (offered_states(output) or {}).items():
            state = states.get(request_id)
            if state is None:
                continue
            self._hash(state)
            for group, block, boundary in offers:
                chunk, rest = divmod(boundary, self._engine.chunk_tokens)
                if not rest and 0 < chunk <= len(state.keys):
                    self._take(state, self._engine.parts[group], chunk - 1, [block])

    def _take(self, state: RequestState, part: Part, chunk: int, blocks: list[int]) -> None:
        """Add a chunk of a part to the step's save, unless it is stored or vLLM gave it up."""
        key = part_keys(state.keys[chunk : chunk + 1], part.index)[0]
        name = key.tobytes()
        # What waits is picked once, though it was forgotten since, after a failed restore.
        if name in self._known or name in self._picked_keys or NULL_BLOCK in blocks:
            return
        self.note(name, stored=True)
        if not self._picked:
            self._wait_ends = time.monotonic() + MAX_WAIT_S
        self._picked_keys.add(name)
        # Now, not with the step's metadata: a request that has ended gives its blocks
        # away before the next step is built.
        self.pool.touch([self.pool.blocks[block] for block in blocks])
        self._picked.add(part.index, key, blocks, state.request.request_id)
        self._stats.add("chunks_saved")

    def take(self, step: int, num_requests: int) -> list[Chunks]:
        """Return what goes out as a step's save; its blocks stay pinned until released().

        Args:
            step: its number.
            num_requests: that compute in it.
        """
        at_once, self._in_a_hurry = num_requests < LARGE_BATCH or self._in_a_hurry, False
        if not self._picked or (not at_once and self._may_wait()):
            return []
        save = self._take_picked()
        keys = [key.tobytes() for chunks in save for key in chunks.keys]
        self._copying.update(keys)
        self._pins[step] = Pin(self._blocks_of(save), keys, self._engine.world_size)
        return save

    def hurry(self) -> None:
        """Let nothing wait for company in the next step: vLLM wants the blocks."""
        self._in_a_hurry = True

    def _may_wait(self) -> bool:
        """Return whether what is picked may wait for company once more."""
        few = self._picked.num_chunks < ENOUGH_CHUNKS and time.monotonic() < self._wait_ends
        return few and not self._has_states

    def _take_picked(self) -> list[Chunks]:
        self._picked_keys.clear()
        return self._picked.take()

    def _blocks_of(self, save: list[Chunks]) -> list[Any]:
        return [self.pool.blocks[b] for c in save for b in c.blocks.reshape(-1).tolist()]

    def drop_picked(self) -> None:
        """After a failed restore: what waits may have been computed from pages that never came."""
        dropped = self._take_picked()
        for chunks in dropped:
            self._give_up([key.tobytes() for key in chunks.keys])
        self.pool.free_blocks(self._blocks_of(dropped))

    def _give_up(self, keys: list[bytes]) -> None:
        self._stats.add("chunks_unsaved", len(keys))
        self._forget(keys)

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Whoever computes these next saves them."""
        for key in keys:
            self._known.pop(key, None)

    def given_up(self, step: int) -> None:
        """Some rank did not save a step's chunks."""
        if (pin := self._pins.get(step)) is not None:
            self._give_up(pin.keys)

    def released(self, step: int, num_ranks: int) -> None:
        """So many ranks no longer need a step's blocks; with the last one they go back."""
        pin = self._pins.get(step)
        if pin is None:
            return
        pin.ranks_left -= num_ranks
        if pin.ranks_left <= 0:
            del self._pins[step]
            self.pool.free_blocks(pin.blocks)
            self._note_copied(pin.keys)

    def _note_copied(self, keys: list[bytes]) -> None:
        """No rank copies a step's chunks any more."""
        now = time.monotonic()
        while self._copied and next(iter(self._copied.values())) <= now:
            self._copied.popitem(last=False)
        for key in self._copying.intersection(keys):
            self._copying.remove(key)
            self._copied[key] = now + COMMIT_S
            self._copied.move_to_end(key)

"""The scheduler side of hybrid models by itself, on stand-ins for vLLM's scheduler.

What a CPU engine does not show: vLLM 0.25, which neither says which blocks it keeps nor which
states a step leaves, and counts local hits that not every group has.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.errors import GatewayError
from adp_kv.layout.parts import Part
from adp_kv.sdk.lookup import LookupTicket
from tests.support import scheduler_rig

pytestmark = pytest.mark.vllm

BLOCK, CHUNK = 16, 64
FULL = Part(0, BLOCK, 4)
WINDOW = Part(0, BLOCK, 4, kept_tokens=31)  # two blocks
STATE = Part(0, CHUNK, 1, kept_tokens=1, recurrent=True)
NULL = SimpleNamespace(block_id=0, is_null=True, block_hash=None)


class Client(scheduler_rig.Client):
    """A lookup client that answers what it is told to."""

    stored = None

    def ask(self, keys, timeout_s):
        stored = np.array(self.stored, dtype=np.bool_).reshape(-1)
        assert len(stored) == len(keys)
        return LookupTicket(len(keys), 0.0, stored=stored)


class Pool(scheduler_rig.Pool):
    """vLLM's block pool, as far as pins and local hits see it."""

    def __init__(self):
        super().__init__(100)
        self.cached = {}

    def pinned(self):
        return {block.block_id for block in self.blocks if block.ref_cnt}

    def get_cached_block(self, block_hash, groups):
        found = self.cached.get((block_hash, groups[0]))
        return None if found is None else [self.blocks[found]]

    def evict_blocks(self, block_ids):
        self.cached = {key: block for key, block in self.cached.items() if block not in block_ids}


@pytest.fixture
def make(monkeypatch, module):
    monkeypatch.setattr(module, "LookupClient", Client)
    monkeypatch.setattr(module, "hashes_repeatable", lambda: True)
    monkeypatch.setattr(module, "root_hash", lambda: b"root")

    def make(parts, **facts):
        engine = module.EngineView(
            engine_id="e",
            world_size=1,
            parts=tuple(replace(part, index=i) for i, part in enumerate(parts)),
            hash_tokens=BLOCK,
            chunk_tokens=CHUNK,
            address="tcp://127.0.0.1:1",
            async_loads=True,
            facts={},
            **facts,
        )
        side = module.SchedulerSide(engine, ConnectorSettings(), b"n" * 16)
        side.bind_pool(Pool())
        return side

    return make


def request_of(num_tokens):
    return SimpleNamespace(
        request_id="r",
        block_hashes=[bytes([i]) * 32 for i in range(num_tokens // BLOCK)],
        num_tokens=num_tokens,
        num_computed_tokens=0,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        lora_request=None,
    )


def arrive(side, num_tokens, stored=None):
    parts = len(side._engine.parts)
    side.client.stored = [[False] * (num_tokens // CHUNK)] * parts if stored is None else stored
    request = request_of(num_tokens)
    side.on_new_request(request)
    return request


def step(side, num_scheduled, *, first=None, more=None, before=0, now=None, offers=None):
    """Schedule a step; return what it saves as {part: [blocks of each chunk]}."""
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={"r": num_scheduled},
        total_num_scheduled_tokens=num_scheduled,
    )
    if first is not None:
        new = SimpleNamespace(req_id="r", num_computed_tokens=before, block_ids=first)
        output.scheduled_new_reqs.append(new)
    else:
        cached = output.scheduled_cached_reqs
        cached.req_ids.append("r")
        cached.num_computed_tokens.append(before)
        cached.new_block_ids.append(more)
    if now is not None or offers is not None:
        output.kv_connector_block_state = SimpleNamespace(
            get_block_ids=lambda _: now, boundary_state_offloads={"r": offers or []}
        )
    saves = side.build_meta(output).save
    return {chunks.part: chunks.blocks.tolist() for chunks in saves}


def ids(first, count):
    return list(range(first, first + count))


def test_group_whose_blocks_come_a_step_later_is_saved_then(make):
    side = make((FULL, FULL))
    arrive(side, 200)
    assert step(side, CHUNK, first=(ids(1, 4), ids(51, 3))) == {0: [[1, 2, 3, 4]]}
    assert step(side, 1, before=CHUNK, more=([], [54])) == {1: [[51, 52, 53, 54]]}


def test_window_saves_the_last_blocks_of_a_chunk_in_the_step_that_fills_it(make):
    side = make((FULL, WINDOW))
    arrive(side, 200)
    assert step(side, 40, first=(ids(1, 3), ids(51, 3))) == {}
    found = step(side, 100, before=40, more=(ids(4, 6), ids(54, 6)))
    assert found == {
        0: [[1, 2, 3, 4], [5, 6, 7, 8]],
        1: [[53, 54], [57, 58]],
    }
    assert side.saves.pool.pinned() == {*ids(1, 8), 53, 54, 57, 58}


def test_blocks_that_a_window_has_left_behind_are_never_saved(make):
    """vLLM before 0.29 does not say which; they may be somebody else's already."""
    side = make((FULL, WINDOW))
    request = arrive(side, 63)  # the token that fills the chunk is known a step late
    assert step(side, 64, first=(ids(1, 4), ids(51, 4))) == {}
    assert step(side, 16, before=64, more=(ids(5, 1), ids(55, 1))) == {}
    request.num_tokens, request.block_hashes = 100, request_of(100).block_hashes
    assert step(side, 1, before=80, more=None) == {0: [[1, 2, 3, 4]]}


def test_blocks_that_a_window_left_behind_for_drafts_are_not_saved_after_their_rejection(make):
    """The number of computed tokens falls; the blocks that vLLM gave up do not come back."""
    side = make((WINDOW,))
    request = arrive(side, 200)
    request.num_tokens = 60
    assert step(side, 59, first=(ids(1, 6),)) == {}
    assert step(side, 1, before=80, more=([],)) == {}  # twenty drafts are taken as accepted
    request.num_tokens = 65
    assert step(side, 2, before=63, more=([],)) == {}
    assert step(side, 1, before=200, more=([],)) == {}
    request.num_tokens = 129
    assert step(side, 128, first=(ids(11, 8),)) == {0: [[17, 18]]}, "resumed, with other blocks"


def test_null_blocks_of_the_table_are_never_saved(make):
    """vLLM since 0.29 says which blocks it keeps in this step, and that is what counts."""
    side = make((FULL, WINDOW))
    arrive(side, 200)
    tables = (ids(1, 8), ids(51, 8))
    kept = (ids(1, 8), [0, 0, 0, 54, *ids(55, 4)])
    assert step(side, 128, first=tables, now=kept) == {
        0: [[1, 2, 3, 4], [5, 6, 7, 8]],
        1: [[57, 58]],
    }


@pytest.mark.parametrize(
    ("before", "scheduled", "known", "saved"),
    [
        (0, 64, 200, {0: [[71]]}),
        (64, 64, 200, {0: [[72]]}),
        (0, 60, 200, {}),  # not at a boundary
        (0, 100, 200, {}),  # past one: its state was not kept
        (0, 128, 127, {}),  # the last token is still being computed
        (100, 29, 128, {}),  # scheduled ahead: the step ends past what is known
        (127, 1, 128, {0: [[72]]}),  # a decoded token ends the chunk
    ],
)
def test_state_is_saved_when_a_step_ends_at_its_boundary(make, before, scheduled, known, saved):
    side = make((STATE,))
    arrive(side, known)
    assert step(side, scheduled, first=([71, 72, 73],), before=before) == saved


def test_state_that_decoding_reaches_is_saved_in_a_model_without_attention(make):
    """Nothing else hashes what was decoded; vLLM before 0.29 says nothing of states."""
    side = make((STATE,))
    request = arrive(side, CHUNK - 1)
    assert step(side, CHUNK - 1, first=([7],)) == {}
    request.num_tokens, request.block_hashes = CHUNK, request_of(CHUNK).block_hashes
    assert step(side, 1, before=CHUNK - 1, more=None) == {0: [[7]]}


def test_states_at_every_boundary_a_step_passes(make):
    """vLLM 0.25 in mode all; what it gave up before the step is not saved."""
    side = make((STATE,), every_state=True)
    arrive(side, 300)
    assert step(side, 150, first=([71, 72, 73],)) == {0: [[71], [72]]}
    assert step(side, 60, before=150, more=([74],)) == {0: [[73]]}
    side = make((STATE,), every_state=True)
    arrive(side, 300)
    assert step(side, 70, first=([0, 72, 73, 74],), before=130) == {0: [[73]]}


def test_offered_states_are_saved_from_the_offered_block(make):
    side = make((FULL, STATE))
    arrive(side, 140)
    tables = (ids(1, 9), [71, 72, 73])
    offers = [(1, 91, CHUNK + 16), (1, 90, CHUNK), (1, 92, 4 * CHUNK), (1, 0, 2 * CHUNK)]
    found = step(side, 70, first=tables, now=tables, offers=offers)
    assert found == {0: [[1, 2, 3, 4]], 1: [[90]]}


def test_hit_ends_where_every_group_has_what_it_needs(make):
    side = make((FULL, WINDOW, STATE))
    stored = [[1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 1]]
    request = arrive(side, 4 * CHUNK + 3, stored)
    assert side.matched(request, 0) == (2 * CHUNK, True)
    assert side.matched(request, CHUNK) == (CHUNK, True)
    assert side.matched(request, 2 * CHUNK) == (0, False)


@pytest.mark.parametrize(("num_tokens", "hit"), [(2 * CHUNK, CHUNK), (2 * CHUNK + 1, 2 * CHUNK)])
def test_hit_ends_before_the_last_token(make, num_tokens, hit):
    side = make((FULL, STATE))
    request = arrive(side, num_tokens, [[1, 1], [1, 1]])
    assert side.matched(request, 0) == (hit, True)


def test_draft_caches_lag_a_step_and_cost_a_chunk(make):
    side = make((FULL,), draft_cache=True)
    request = arrive(side, 3 * CHUNK + 1, [[1, 1, 1]])
    assert side.matched(request, 0) == (2 * CHUNK, True)
    side = make((FULL,), draft_cache=True)
    arrive(side, 200)
    assert step(side, 64, first=(ids(1, 4),)) == {}
    assert step(side, 64, before=64, more=(ids(5, 4),)) == {0: [[1, 2, 3, 4]]}


def table_of(block_ids, cached=()):
    return [
        NULL
        if not i
        else SimpleNamespace(block_id=i, is_null=False, block_hash=b"h" if i in cached else None)
        for i in block_ids
    ]


def restored(side):
    chunks = side.build_meta(
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], new_block_ids=[]
            ),
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
        )
    ).async_restore
    return {c.part: c.blocks.tolist() for c in chunks}


def matched_at(side, num_local):
    request = arrive(side, 2 * CHUNK + 3, [[1, 1]] * 3)
    assert side.matched(request, num_local)[0] == 2 * CHUNK - num_local
    return request


def test_each_group_restores_what_it_needs_and_has_not(make):
    side = make((FULL, WINDOW, STATE))
    request = matched_at(side, 32)
    full = table_of(ids(1, 9), cached={1, 2})
    window = table_of([0] * 6 + [57, 58, 59])
    side.after_alloc(request, (full, window, table_of([0, 72, 73])), 2 * CHUNK - 32)
    assert restored(side) == {
        0: [[-1, -1, 3, 4], [5, 6, 7, 8]],
        1: [[57, 58]],
        2: [[72]],
    }


def test_group_with_a_shorter_local_hit_restores_what_vllm_thinks_it_has(make):
    """vLLM 0.25 counts the longest local hit of any group."""
    side = make((FULL, WINDOW, STATE), local_hits_diverge=True)
    request = matched_at(side, CHUNK)
    full = table_of(ids(1, 9), cached={1, 2})  # counted as cached: 1 to 4
    window = table_of([0] * 6 + [57, 58, 59])
    side.after_alloc(request, (full, window, table_of([0, 72, 73])), CHUNK)
    assert restored(side)[0] == [[-1, -1, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("missing", ["full", "window", "state"])
def test_block_that_is_needed_and_not_reserved_stops_the_engine(make, missing):
    side = make((FULL, WINDOW, STATE))
    request = matched_at(side, 0)
    tables = {"full": ids(1, 9), "window": [0] * 6 + [57, 58, 59], "state": [0, 72, 73]}
    tables[missing] = [*tables[missing][:-2], 0, tables[missing][-1]]
    with pytest.raises(GatewayError, match="reserved no block"):
        side.after_alloc(request, tuple(map(table_of, tables.values())), 2 * CHUNK)


def test_local_hit_without_its_state_is_trimmed_to_one_that_is_whole(make):
    side = make((FULL, STATE), local_hits_diverge=True)
    request = arrive(side, 3 * CHUNK + 3)
    hashes, pool = request.block_hashes, side.saves.pool
    pool.cached = {(hashes[p], 0): 1 + p for p in range(8)}
    pool.cached[(hashes[3], 1)] = 71  # the state after one chunk; the one after two is not there
    assert side.matched(request, 2 * CHUNK) == (None, False)
    assert {block for (_, group), block in pool.cached.items() if group == 0} == {1, 2, 3, 4}
    assert side.matched(request, CHUNK) == (0, False), "vLLM looks again, and finds this much"
    assert (hashes[3], 1) in pool.cached


def test_local_hit_that_every_group_has_is_left_alone(make):
    side = make((FULL, STATE), local_hits_diverge=True)
    request = arrive(side, 3 * CHUNK + 3)
    hashes, pool = request.block_hashes, side.saves.pool
    pool.cached = {(hashes[p], 0): 1 + p for p in range(8)} | {(hashes[7], 1): 72}
    before = dict(pool.cached)
    assert side.matched(request, 2 * CHUNK) == (0, False)
    assert pool.cached == before
    assert side.matched(request, 0) == (0, False)


def test_longer_hit_on_the_card_needs_no_trimming(make):
    side = make((FULL, STATE), local_hits_diverge=True)
    request = arrive(side, 3 * CHUNK + 3, [[1, 1, 1], [0, 0, 1]])
    side.saves.pool.cached = {(request.block_hashes[p], 0): 1 + p for p in range(8)}
    before = dict(side.saves.pool.cached)
    assert side.matched(request, 2 * CHUNK) == (CHUNK, True)
    assert side.saves.pool.cached == before


def test_nothing_of_a_model_with_states_waits_for_company(make, module, monkeypatch):
    """The next step writes over a state; its chunk is of use only with the rest of it."""
    monkeypatch.setattr(importlib.import_module(module.SaveSide.__module__), "LARGE_BATCH", 1)
    side = make((FULL, STATE))
    arrive(side, 200)
    assert set(step(side, 64, first=(ids(1, 4), [57]))) == {0, 1}

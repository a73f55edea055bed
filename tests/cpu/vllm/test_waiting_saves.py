"""What the scheduler side saves waits for company, pinned: few chunks, for a moment."""

import importlib
from types import SimpleNamespace

import pytest

from tests.support.clock import FakeClock
from tests.support.scheduler_rig import CHUNK, connector_of, decode_step, output_of, request_of

pytestmark = pytest.mark.vllm


@pytest.fixture
def clock(module, monkeypatch):
    """Time that stands still but for what a test adds; one request is many, two chunks enough."""
    saves, clock = importlib.import_module(module.SaveSide.__module__), FakeClock()
    monkeypatch.setattr(saves, "LARGE_BATCH", 1)
    monkeypatch.setattr(saves, "ENOUGH_CHUNKS", 2)
    monkeypatch.setattr(saves, "MAX_WAIT_S", 3.0)
    monkeypatch.setattr(saves, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def waiting(side, clock):
    """A request of four chunks that decodes, its first chunk picked now."""
    request = request_of(8 * 32, 0)
    side.on_new_request(request)
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=(list(range(1, 9)),))
    assert side.build_meta(output_of([new], {"r": CHUNK})).save == []
    return side


def pinned(side):
    return [block.block_id for block in side.saves.pool.blocks if block.ref_cnt]


def test_small_save_waits_a_moment_for_company(waiting, clock):
    assert pinned(waiting) == [1, 2], "nobody may write over what waits"
    assert waiting.saves.num_pinned == 2
    assert waiting.has_pending_saves
    clock.advance(2.9)
    assert decode_step(waiting, CHUNK).save == []
    clock.advance(0.1)
    meta = decode_step(waiting, CHUNK + 1)
    assert [chunks.blocks.tolist() for chunks in meta.save] == [[[1, 2]]]
    assert waiting.saves.num_pinned == 2, "until every rank has copied it"
    waiting.saves.released(meta.step, 1)
    assert not pinned(waiting)
    clock.advance(100)
    assert decode_step(waiting, 2 * CHUNK - 1).save == [], "the next one waits as long"
    clock.advance(3)
    assert len(decode_step(waiting, 2 * CHUNK).save) == 1


def test_company_that_comes_does_not_prolong_the_wait(waiting, clock, module, monkeypatch):
    saves = importlib.import_module(module.SaveSide.__module__)
    monkeypatch.setattr(saves, "ENOUGH_CHUNKS", 9)
    clock.advance(2)
    assert decode_step(waiting, 2 * CHUNK - 1).save == []
    clock.advance(1)
    (save,) = decode_step(waiting, 2 * CHUNK).save
    assert save.blocks.tolist() == [[1, 2], [3, 4]]


def test_enough_chunks_go_out_with_the_step_that_completes_the_last(waiting):
    (save,) = decode_step(waiting, 2 * CHUNK - 1).save
    assert save.blocks.tolist() == [[1, 2], [3, 4]]


def test_nothing_waits_in_a_small_batch(waiting, module, monkeypatch):
    saves = importlib.import_module(module.SaveSide.__module__)
    monkeypatch.setattr(saves, "LARGE_BATCH", 2)
    (save,) = decode_step(waiting, CHUNK).save
    assert save.blocks.tolist() == [[1, 2]]


def test_nothing_waits_while_nothing_computes(waiting):
    (save,) = waiting.build_meta(output_of()).save
    assert save.blocks.tolist() == [[1, 2]]


def test_nothing_waits_where_vllm_wants_blocks(waiting):
    """It asks before it preempts, and waits for pins as long as there are any."""
    assert connector_of(waiting).has_pending_block_frees()
    meta = decode_step(waiting, CHUNK)
    assert [chunks.blocks.tolist() for chunks in meta.save] == [[[1, 2]]]
    waiting.saves.released(meta.step, 1)
    assert not connector_of(waiting).has_pending_block_frees()
    decode_step(waiting, CHUNK + 1)
    assert decode_step(waiting, 2 * CHUNK - 1).save == [], "it was in a hurry once"


def test_what_waits_when_a_restore_fails_is_not_saved_but_picked_anew(waiting, module):
    """It may have been computed from pages that never came, and before the ranks drop saves."""
    report = module.AdpWorkerMetadata(failed_step=1)
    waiting.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert not pinned(waiting)
    assert not waiting.has_pending_saves
    assert waiting.build_meta(output_of()).save == []
    assert waiting.stats.take()["sums"]["chunks_unsaved"] == 1
    decode_step(waiting, CHUNK)  # recomputed
    (save,) = waiting.build_meta(output_of()).save
    assert save.blocks.tolist() == [[1, 2]]


def test_what_waits_is_picked_once_whoever_computes_it_meanwhile(waiting):
    """A request whose restore of it failed computes it as well: the first one's is saved."""
    state = waiting._states["r"]
    waiting.saves.consider_again(state)
    decode_step(waiting, CHUNK)
    assert pinned(waiting) == [1, 2]
    assert [block.ref_cnt for block in waiting.saves.pool.blocks[1:3]] == [1, 1]
    (save,) = waiting.build_meta(output_of()).save
    assert save.blocks.tolist() == [[1, 2]]


def test_what_waits_and_is_looked_up_in_vain_is_not_saved_again_while_it_is_copied(waiting):
    waiting.saves.note(waiting._states["r"].keys[0].tobytes(), stored=False)
    assert len(waiting.build_meta(output_of()).save) == 1
    waiting._states["r"].next_chunk = [0]
    waiting._states["r"].due = 0
    decode_step(waiting, CHUNK)
    assert waiting.build_meta(output_of()).save == []


def test_what_was_copied_is_forgotten_in_time_and_with_the_gateway(waiting, clock, module):
    saves = importlib.import_module(module.SaveSide.__module__)
    first = waiting.build_meta(output_of())
    waiting.saves.released(first.step, 1)
    second = decode_step(waiting, 2 * CHUNK - 1)
    assert second.save == []
    clock.advance(saves.COMMIT_S)
    second = waiting.build_meta(output_of())
    waiting.saves.released(second.step, 1)
    assert len(waiting.saves._copied) == 1, "the first is not kept for ever"
    waiting.saves.forget_all()
    assert not waiting.saves._copied, "the next gateway does not have it"


@pytest.mark.parametrize("num_computed", [0, CHUNK])
def test_reset_gives_other_keys_and_leaves_alone_what_is_half_computed(waiting, num_computed):
    """What vLLM computed before may come from other weights; what it begins anew may not."""
    state = waiting._states["r"]
    state.request.num_computed_tokens = num_computed
    before = {key.tobytes() for key in state.keys}
    waiting.reset()
    assert not pinned(waiting)
    for computed in range(2 * CHUNK - 1, 4 * CHUNK):
        meta = decode_step(waiting, computed)
        saved = {key.tobytes() for chunks in meta.save for key in chunks.keys}
        assert saved.isdisjoint(before)
    after = {key.tobytes() for key in state.keys}
    assert bool(after) is (num_computed == 0)
    assert after.isdisjoint(before)

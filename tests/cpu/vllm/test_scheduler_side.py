"""The scheduler side by itself, on stand-ins for vLLM's scheduler: what no CPU engine shows.

With asynchronous scheduling, which vLLM has only on devices, a step is scheduled before the
token that fills its last chunk is known.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.sdk.lookup import LookupTicket
from tests.support.clock import FakeClock
from tests.support.scheduler_rig import CHUNK, connector_of, decode_step, output_of, request_of

pytestmark = pytest.mark.vllm


def test_chunk_filled_by_the_last_token_is_pinned_before_its_blocks_are_freed(side, module):
    request = request_of(CHUNK - 1, 0)
    side.on_new_request(request)
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([3, 4],))
    assert side.build_meta(output_of([new], {"r": CHUNK - 1})).save == []
    request = request_of(CHUNK + 1, CHUNK)
    side._states["r"].request = request  # it has grown
    side.on_finished(request, ([3, 4],))
    # Here vLLM frees the request's blocks, and gives them away in its next step.
    pinned = [block.block_id for block in side.saves.pool.blocks if block.ref_cnt]
    assert pinned == [3, 4]
    (save,) = side.build_meta(output_of()).save
    assert save.blocks.tolist() == [[3, 4]]
    assert [block.ref_cnt for block in side.saves.pool.blocks[3:5]] == [1, 1]
    report = module.AdpWorkerMetadata(saved_steps={2: 1})
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert not any(block.ref_cnt for block in side.saves.pool.blocks)
    assert not side.has_pending_saves


def test_hashes_that_would_not_repeat_store_nothing(side, module, monkeypatch, caplog):
    monkeypatch.setattr(module, "hashes_repeatable", lambda: False)
    request = request_of(CHUNK, 0)
    with caplog.at_level("ERROR", logger="adp_kv"):
        side.on_new_request(request)
        assert side.matched(request, 0) == (0, False)
        new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([3, 4],))
        assert side.build_meta(output_of([new], {"r": CHUNK})).save == []
        side.on_finished(request, ([3, 4],))
    (record,) = caplog.records
    assert "turned off" in record.message
    assert "PYTHONHASHSEED=0" in record.message


@pytest.mark.parametrize(
    ("seed", "engine_seed", "repeatable"),
    [
        ("7", "7", True),
        ("random", "any", False),
        (None, "vllm-none-hash", True),
        (None, "0f3c", False),
        (None, None, False),
    ],
    ids=["set", "set to random", "vLLM's own", "drawn by vLLM", "vLLM before 0.29"],
)
def test_hashes_repeat_only_from_a_known_seed(module, monkeypatch, seed, engine_seed, repeatable):
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    view = importlib.import_module("adp_kv.connector.vllm_view")
    monkeypatch.setattr(view, "hash_seed", lambda: seed)
    if engine_seed is None:
        monkeypatch.delattr(utils, "get_none_hash_seed")
    else:
        monkeypatch.setattr(utils, "get_none_hash_seed", lambda: engine_seed)
    assert view.hashes_repeatable() is repeatable


def test_saves_wait_until_a_failed_restore_is_known(side, module):
    """Pages computed from ones that never came must not be stored (metadata.py)."""
    report = module.AdpWorkerMetadata(failed_step=5)
    assert side.build_meta(output_of()).acknowledged_failure == -1
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert side.build_meta(output_of()).acknowledged_failure == 5


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_request_that_ended_badly_saves_nothing_more(side, status):
    request = request_of(CHUNK + 1, CHUNK)
    side.on_new_request(request)
    side._states["r"].tables = [[3, 4]]
    request.status = SimpleNamespace(name=status)
    side.on_finished(request, ([3, 4],))
    assert side.build_meta(output_of()).save == []
    assert not any(block.ref_cnt for block in side.saves.pool.blocks)


@pytest.mark.parametrize("how", ["layerwise", "async"])
def test_chunk_whose_restore_failed_is_stored_again(side, module, how):
    request = request_of(CHUNK, 0)
    side.on_new_request(request)
    side._states["r"].lookup = LookupTicket(1, 0.0, stored=np.array([True]))
    side.matched(request, 0)  # now the scheduler side believes that the chunk is stored
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([3, 4],))
    assert side.build_meta(output_of([new], {"r": CHUNK})).save == []
    report = {"layerwise": {"failed_step": 1}, "async": {"failed_requests": {"r"}}}[how]
    side.on_output(SimpleNamespace(kv_connector_worker_meta=module.AdpWorkerMetadata(**report)))
    (save,) = side.build_meta(output_of([new], {"r": CHUNK})).save
    assert save.blocks.tolist() == [[3, 4]]


def computes_first_chunk(side, name):
    """Let a new request look its first chunk up in vain and compute it; return what is saved."""
    request = request_of(CHUNK, 0)
    request.request_id = name
    side.on_new_request(request)
    side._states[name].lookup = LookupTicket(1, 0.0, stored=np.array([False]))
    side.matched(request, 0)
    new = SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=([3, 4],))
    return side.build_meta(output_of([new], {name: CHUNK}))


def test_chunk_is_saved_once_though_lookups_do_not_find_it_yet(side, module, monkeypatch):
    saves, clock = importlib.import_module(module.SaveSide.__module__), FakeClock()
    monkeypatch.setattr(saves, "time", SimpleNamespace(monotonic=clock))
    first = computes_first_chunk(side, "a")
    assert len(first.save) == 1
    clock.advance(100)
    assert computes_first_chunk(side, "b").save == [], "the ranks still copy it"
    side.saves.released(first.step, 1)
    clock.advance(saves.COMMIT_S - 1)
    assert computes_first_chunk(side, "c").save == [], "the gateway still writes it"
    clock.advance(1.1)
    second = computes_first_chunk(side, "d")
    assert len(second.save) == 1, "it was not written"
    side.saves.given_up(second.step)
    side.saves.released(second.step, 1)
    assert len(computes_first_chunk(side, "e").save) == 1, "a rank did not copy it"


@pytest.mark.parametrize("report", [{"failed_step": 1}, {"failed_requests": {"b"}}])
def test_chunk_that_was_saved_just_now_but_not_restored_is_saved_again(side, module, report):
    """By the next request: the one whose restore failed may have ended by then."""
    first = computes_first_chunk(side, "a")
    side.saves.released(first.step, 1)
    side._states.clear()
    assert computes_first_chunk(side, "c").save == []
    side._states.clear()
    report = module.AdpWorkerMetadata(**report)
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert len(computes_first_chunk(side, "d").save) == 1


def restored(side, request):
    """Let a request hit its first chunk; return how, and what the next step's metadata says."""
    side._states[request.request_id].lookup = LookupTicket(1, 0.0, stored=np.array([True]))
    hit, is_async = side.matched(request, 0)
    assert hit == CHUNK
    blocks = [SimpleNamespace(block_id=i, block_hash=None, is_null=False) for i in (3, 4, 5)]
    side.after_alloc(request, [blocks], hit)
    meta = side.build_meta(output_of())
    assert bool(meta.async_restore) is is_async
    assert bool(meta.restore) is not is_async
    return "async" if is_async else "layerwise"


@pytest.mark.parametrize(("auto", "beside"), [(True, "async"), (False, "layerwise")])
def test_restore_beside_others_lets_them_go_on(side, auto, beside):
    side._engine = replace(side._engine, async_beside_others=auto)
    request = request_of(CHUNK + 1, 0)
    side.on_new_request(request)
    assert restored(side, request) == "layerwise", "it has the engine to itself"
    other = request_of(CHUNK + 1, 0)
    other.request_id = "another"
    side.on_new_request(other)
    assert restored(side, other) == beside
    side.on_finished(request, ([],))
    assert restored(side, other) == "layerwise", "it is alone again, say after preemption"


@pytest.mark.parametrize(
    ("reconnect", "session", "off"),
    [(False, 7, True), (False, 0, True), (True, 1, True), (True, 7, False), (True, 0, False)],
)
def test_rank_s_off_of_another_session_counts_only_without_reconnect(
    side, module, reconnect, session, off
):
    side._settings = ConnectorSettings(reconnect=reconnect)
    report = module.AdpWorkerMetadata(off=True, off_sessions={session})
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert side.off is off


def test_rank_that_could_not_join_again_yet_does_not_keep_the_engine_off(side, module):
    side._settings = ConnectorSettings(reconnect=True)
    side.client.generation = 0  # this side is not welcomed either
    report = module.AdpWorkerMetadata(off=True, off_sessions={0})
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert not side.off


def test_lookups_follow_a_restarted_gateway_and_forget_the_last_one(side, monkeypatch):
    side._settings = ConnectorSettings(reconnect=True)
    request = request_of(CHUNK, 0)
    side.on_new_request(request)
    side._states["r"].lookup = LookupTicket(1, 0.0, stored=np.array([True]))
    side.matched(request, 0)
    side._ranks_off = True
    first = side.client
    monkeypatch.setattr(first, "off", True)
    side.build_meta(output_of())
    assert side.client is first, "its thread has not ended yet"
    monkeypatch.setattr(first, "ended", True)
    side.build_meta(output_of())
    assert side.client is not first
    assert side.client.again
    assert not side.off
    assert side._states["r"].lookup is None
    assert not side.saves._known
    side.client.welcome = None
    assert side.matched(request, 0) == (0, False), "nobody waits for a gateway that was gone"
    side.client.ended = side.client.off = True
    second = side.client
    side.build_meta(output_of())
    assert side.client is second, "not more often than RETRY_S"


def test_waiting_for_the_next_gateway_is_shown_as_off(side, monkeypatch):
    """It tries anew every second; what is shown would be 0 but for moments."""
    side._settings = ConnectorSettings(reconnect=True)
    assert side.take_stats()["now"]["off"] == 0
    monkeypatch.setattr(side.client, "off", True)
    monkeypatch.setattr(side.client, "ended", True)
    side.build_meta(output_of())
    joined, side.client.welcome = side.client.welcome, None
    assert side.client.again
    assert side.take_stats()["now"]["off"] == 1
    side.client.welcome = joined
    assert side.take_stats()["now"]["off"] == 0


def test_lookups_stay_off_without_reconnect(side, monkeypatch):
    first = side.client
    monkeypatch.setattr(first, "off", True)
    monkeypatch.setattr(first, "ended", True)
    side.build_meta(output_of())
    assert side.client is first


def failed_restore(side, module, step, blocks):
    report = module.AdpWorkerMetadata(failed_step=step)
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=blocks))


def with_blocks(side, name, table):
    request = request_of(CHUNK, 0)
    request.request_id = name
    side.on_new_request(request)
    side._states[name].tables = [table]
    return request


def test_what_a_failed_restore_spoilt_is_shared_by_nobody(side, module):
    """Of requests that live, preempted ones too: what was restored, and all that follows it."""
    with_blocks(side, "restored", [1, 2, 3])
    with_blocks(side, "shares it", [1, 2, 5])
    with_blocks(side, "other", [6, 7])
    side.build_meta(output_of())
    failed_restore(side, module, 1, {2})
    assert side.saves.pool.evicted == {2, 3, 5}


def test_request_that_ended_before_its_restore_failed_leaves_nothing_to_share(side, module):
    """With asynchronous scheduling a client can go away between a step and its report."""
    request = with_blocks(side, "gone", [1, 2, 3])
    side.build_meta(output_of())
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    side.on_finished(request, ([1, 2, 3],))
    side.build_meta(output_of())
    failed_restore(side, module, 1, {1})
    assert side.saves.pool.evicted == {1, 2, 3}


def test_preempted_request_that_ended_leaves_nothing_to_share_either(side, module):
    """Its blocks went with the preemption, not with its end: vLLM has none to name."""
    request = with_blocks(side, "gone", [1, 2, 3])
    side.build_meta(output_of())
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    side.on_finished(request, ([],))
    failed_restore(side, module, 1, {1})
    assert side.saves.pool.evicted == {1, 2, 3}


def test_request_whose_adapter_can_not_be_read_is_left_alone(side, tmp_path, monkeypatch, caplog):
    """Somebody replaces its files at this moment; vLLM has the adapter in memory and goes on."""
    asked = []

    def gone(folder):
        asked.append(folder)
        raise FileNotFoundError(2, "No such file", str(folder))

    monkeypatch.setattr(side._adapters, "fingerprint", gone)
    request = request_of(2 * CHUNK, 0)
    request.lora_request = SimpleNamespace(lora_path=str(tmp_path))
    with caplog.at_level("WARNING", "adp_kv"):
        side.on_new_request(request)
    assert side.matched(request, 0) == (0, False)
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([1, 2, 3, 4],))
    side.build_meta(output_of([new], {"r": 2 * CHUNK}))
    assert not side.has_pending_saves
    assert len(asked) == len(caplog.records) == 1


def test_request_that_ended_before_the_step_is_not_concerned(side, module):
    request = with_blocks(side, "gone", [1, 2, 3])
    side.on_finished(request, ([1, 2, 3],))
    for _ in range(3):
        side.build_meta(output_of())
    failed_restore(side, module, 3, {1})
    assert side.saves.pool.evicted == {1}


def test_decoding_asks_for_keys_only_where_a_chunk_is_complete(side, monkeypatch):
    request = request_of(4 * 32, 0)
    side.on_new_request(request)
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([1, 2, 3, 4],))
    side.build_meta(output_of([new], {"r": 8}))
    looked, saved = [], []
    pick = side.saves._pick_step
    monkeypatch.setattr(side.saves, "_pick_step", lambda *a: (looked.append(a[2]), pick(*a))[1])
    for computed in range(8, 2 * CHUNK):
        saved += [computed for _ in decode_step(side, computed).save]
    assert saved == looked == [CHUNK - 1, 2 * CHUNK - 1]


def test_after_a_failed_restore_decoding_stores_again_what_it_had(side, module):
    request = request_of(4 * 32, 0)
    side.on_new_request(request)
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([1, 2, 3, 4],))
    assert len(side.build_meta(output_of([new], {"r": CHUNK})).save) == 1
    assert not decode_step(side, CHUNK).save
    report = module.AdpWorkerMetadata(failed_requests={"r"})
    side.on_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert len(decode_step(side, CHUNK + 1).save) == 1


@pytest.mark.parametrize("resumable", [True, False])
def test_streaming_session_is_left_alone(side, resumable):
    """Between its turns vLLM takes back a token that its block hashes may have named already."""
    side.client.ask = lambda chunks, _timeout_s: LookupTicket(len(chunks), deadline=0.0)
    connector = connector_of(side)
    request = request_of(2 * CHUNK, CHUNK)
    request.resumable = resumable
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, SimpleNamespace(blocks=([],)), 0)
    new = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=([1, 2, 3, 4],))
    meta = connector.build_connector_meta(output_of([new], {"r": CHUNK}))
    assert bool(meta.save) is not resumable
    connector.request_finished(request, [1, 2, 3, 4])
    assert connector.build_connector_meta(output_of()).save == []
    assert side.has_pending_saves is not resumable


@pytest.mark.parametrize(
    ("least", "told"), [(4 * CHUNK, [4]), (4 * CHUNK + 1, [])], ids=["long", "short"]
)
def test_long_restore_is_read_ahead_before_its_blocks_are_given(
    side, module, monkeypatch, least, told
):
    """Once, however often vLLM asks; what is short is asked for before anything is read."""
    ticket = SimpleNamespace(stored=None, expired=False, noted=True)
    said = []
    side.client.ask = lambda chunks, timeout_s: ticket
    side.client.read_ahead = lambda chunks, part: said.append(len(chunks))
    monkeypatch.setattr(module, "AHEAD_TOKENS", least)
    request = request_of(4 * CHUNK + 32, 0)
    side.on_new_request(request)
    assert side.matched(request, 0) == (None, False)
    ticket.stored = np.ones(4, dtype=bool)
    for _ in range(2):
        assert side.matched(request, 0)[0] == 4 * CHUNK
        assert said == told
    side.build_meta(output_of())  # it still waits: now the short one is told too
    assert said == [4]

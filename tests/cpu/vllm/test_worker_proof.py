"""The worker side when fenced bytes may still turn out wrong: exchanges with other ranks."""

import importlib
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.errors import TransferError
from adp_kv.layout.geometry import CacheGeometry
from adp_kv.transfer.host_mover import HostMover

pytestmark = pytest.mark.vllm

HOOKS = SimpleNamespace(cudagraph_runtime_mode=None, attn_metadata={})


class Ticket:
    """A copy that other ranks have a part in."""

    def __init__(self):
        self.state = False

    def done(self):
        return self.proven()

    def proven(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def fence(self):
        pass


class Client:
    """A rank client that starts every copy at once and notes what it is asked to save."""

    off = False
    mover = SimpleNamespace(mark=lambda: None)

    def __init__(self):
        self.saves, self.tickets, self.orders = [], [], []

    def submit_restore(self, job, kind, mark):
        self.orders.append([cache.index for cache in job.caches])
        for cache in job.caches:
            self.tickets.append(Ticket())
            job.note_started([(cache.index, job.num_chunks)], self.tickets[-1])

    def submit_save(self, job, kind, caches, mark):
        self.saves.append((job, [cache.index for cache in caches]))


def worker_module():
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        return importlib.import_module("adp_kv.connector.worker")


@pytest.fixture
def side():
    module = worker_module()
    engine = SimpleNamespace(undoable=True, token_shards=1, draft_layers=frozenset())
    side = module.WorkerSide(engine, ConnectorSettings(), b"n" * 16)
    side._client = Client()
    names = {0: "l.0.attn", 1: "l.0.indexer", 8: "l.1.attn", 9: "l.1.indexer"}
    side._caches = {
        index: CacheGeometry(index, name, 0, 1 << 23, 1 << 23, 8, 1)
        for index, name in names.items()
    }
    side._index_of = {name: index for index, name in names.items()}
    side._hooked = {0, 8}
    return side


def meta_of():
    module = worker_module()
    restore = module.Chunks(0, np.zeros((1, 2), np.uint64), np.array([[3]]), ["r"])
    save = module.Chunks(0, np.ones((1, 2), np.uint64), np.array([[4]]), ["r"])
    return module.AdpMetadata(step=6, restore=[restore], save=[save])


def compute(side, meta):
    side.start_load(meta, HOOKS)
    for name in ("l.0.attn", "l.1.attn"):
        side.wait_layer(meta, name)
        side.save_layer(meta, name)


def prove(side):
    """Every rank did its part of the copies so far."""
    for ticket in side.client.tickets:
        ticket.state = True


def test_caches_without_hook_come_first_and_are_fenced_up_front(side):
    meta = meta_of()
    side.start_load(meta, HOOKS)
    assert side.client.orders == [[1, 9, 0, 8]]
    assert side._step.unfenced == {0, 8}


def test_saves_wait_until_the_bytes_are_proven(side):
    meta = meta_of()
    compute(side, meta)
    assert not side.client.saves, "a layer was saved that may have computed from wrong pages"
    for ticket in side.client.tickets:
        threading.Timer(0.05, setattr, (ticket, "state", True)).start()
    side.finish_step(meta)
    ((job, saved),) = side.client.saves
    assert saved == [0, 1, 8, 9]
    assert not job.abandoned
    assert side.take_failed_blocks() == set()


def test_layers_are_saved_early_once_all_is_proven(side):
    meta = meta_of()
    side.start_load(meta, HOOKS)
    prove(side)
    side.wait_layer(meta, "l.0.attn")
    side.save_layer(meta, "l.0.attn")
    assert [saved for _, saved in side.client.saves] == [[0]]


def test_bytes_found_wrong_at_the_end_of_the_step_fail_the_load(side):
    meta = meta_of()
    compute(side, meta)
    prove(side)
    side.client.tickets[-1].state = TransferError("rank 1 could not copy its share")
    side.finish_step(meta)
    assert side.take_failed_blocks() == {3}
    assert not side.client.saves
    assert all(job.abandoned for jobs in side._saves.values() for job in jobs)
    assert side.take_report().failed_step == 6


def test_exchange_that_never_ends_fails_the_load_in_time(side):
    side._settings = ConnectorSettings(load_timeout_s=0.1)
    meta = meta_of()
    compute(side, meta)
    side.finish_step(meta)
    assert side.take_failed_blocks() == {3}
    assert not side.client.saves


@pytest.mark.parametrize(
    ("num_replicas", "connections", "told"),
    [
        (2, None, "it needs NVIDIA GPUs"),
        (2, "1", "CUDA_DEVICE_MAX_CONNECTIONS"),
        (1, None, "nothing to do"),
    ],
)
def test_fanout_that_can_not_be_is_off_with_its_reason(
    side, monkeypatch, caplog, num_replicas, connections, told
):
    caplog.set_level("INFO", logger="adp_kv")
    module = worker_module()
    monkeypatch.setattr(module, "tell_tp_ranks", lambda text: [text])
    monkeypatch.setattr(module, "device_connections", lambda: connections)
    side._caches = {0: CacheGeometry(0, "l.0", 0, 64, 64, 8, 1, 0, 1, 0, num_replicas)}
    assert side._open_fanout(HostMover(), 0) is None
    assert told in caplog.text


@pytest.mark.parametrize(("tp_rank", "lines"), [(0, 1), (1, 0)])
def test_fanout_is_off_where_ranks_share_tokens(side, monkeypatch, caplog, tp_rank, lines):
    """Ranks that hold other tokens exchange nothing; no rank waits for the others to say so."""
    caplog.set_level("INFO", logger="adp_kv")
    monkeypatch.setattr(worker_module(), "tell_tp_ranks", None)
    side._engine.token_shards = 2
    assert side._open_fanout(HostMover(), tp_rank) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == lines
    assert all("fan-out is off" in t and "context_parallel_size = 2" in t for t in told)


def test_bytes_found_wrong_are_told_before_vllm_takes_the_step_s_tokens(side):
    """Runner V1 with speculative decoding asks first and ends the step after its drafts."""
    meta = meta_of()
    compute(side, meta)
    prove(side)
    side.client.tickets[-1].state = TransferError("rank 1 could not copy its share")
    side.client.counts, side.client.ended = {}, False
    assert side.take_failed_blocks() == {3}
    assert side.take_report().failed_step == 6
    side.finish_step(meta)
    assert side.take_failed_blocks() == set(), "the same is told twice"
    assert not side.client.saves


def test_layer_that_computed_too_early_is_told_before_vllm_takes_the_step_s_tokens(side):
    meta = meta_of()
    side.start_load(meta, HOOKS)
    prove(side)
    side.wait_layer(meta, "l.0.attn")  # and not l.1.attn
    assert side.take_failed_blocks() == {3}
    assert side._hooked == {0}


def test_step_that_vllm_never_ends_is_saved_by_the_next(side):
    """Runner V1 with speculative decoding ends no step on a pipeline stage before the last."""
    meta = meta_of()
    compute(side, meta)
    prove(side)
    assert side.take_failed_blocks() == set()
    assert not side.client.saves
    side.start_load(worker_module().AdpMetadata(step=7), HOOKS)
    ((job, saved),) = side.client.saves
    assert (job.number, saved) == (6, [0, 1, 8, 9])

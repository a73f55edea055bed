"""The worker side by itself: what no CPU engine shows, since it never schedules ahead."""

import importlib
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.layout.geometry import CacheGeometry
from tests.support.process import wait_until

pytestmark = pytest.mark.vllm


class Client:
    """A rank client that notes what it is asked to save."""

    off = False
    mover = SimpleNamespace(mark=lambda: None)

    def __init__(self):
        self.saves = []

    def submit_save(self, job, kind, caches, mark):
        self.saves.append(job)

    def submit_restore(self, job, kind, mark):
        pass


@pytest.fixture(scope="module")
def module():
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        return importlib.import_module("adp_kv.connector.worker")


@pytest.mark.parametrize(("acknowledged", "saved"), [(4, False), (5, True)])
def test_saves_wait_until_the_scheduler_knows_of_a_failed_restore(module, acknowledged, saved):
    side = module.WorkerSide(SimpleNamespace(), ConnectorSettings(), b"n" * 16)
    side._client = Client()
    side._caches = {0: CacheGeometry(0, "l.0", 0, 64, 64, 8, 1)}
    side._failed_step = 5
    chunks = module.Chunks(0, np.zeros((1, 2), np.uint64), np.array([[3]]), ["r"])
    side.finish_step(module.AdpMetadata(step=6, acknowledged_failure=acknowledged, save=[chunks]))
    assert bool(side._client.saves) is saved
    ((job,),) = side._saves.values()
    assert job.abandoned is not saved


def test_draft_s_layers_are_waited_for_before_the_pass_and_others_in_their_hooks(module):
    engine = SimpleNamespace(draft_layers=frozenset({"l.1"}))
    side = module.WorkerSide(engine, ConnectorSettings(), b"n" * 16)
    side._client = Client()
    side._caches = {i: CacheGeometry(i, f"l.{i}", 0, 64, 64, 8, 1) for i in range(2)}
    side._index_of = {"l.0": 0, "l.1": 1}
    before = module.AdpMetadata(step=1)
    for name in ("l.0", "l.1"):
        side.wait_layer(before, name)  # both have hooks, which this step calls
    fenced = []
    side._fence = lambda _step, index: fenced.append(index)
    chunks = module.Chunks(0, np.zeros((1, 2), np.uint64), np.array([[3]]), ["r"])
    in_python = SimpleNamespace(attn_metadata={})
    side.start_load(module.AdpMetadata(step=2, restore=[chunks]), in_python)
    assert fenced == [1]


@pytest.mark.parametrize("timeout_s", [0.05, 60.0])
def test_restore_beyond_load_timeout_s_has_failed(module, timeout_s):
    """One that nobody answers: its request has failed and its blocks are told, but not before."""
    engine = SimpleNamespace(undoable=True)
    side = module.WorkerSide(engine, ConnectorSettings(load_timeout_s=timeout_s), b"n" * 16)
    side._client = Client()
    side._caches = {0: CacheGeometry(0, "l.0", 0, 64, 64, 8, 1)}
    chunks = module.Chunks(0, np.zeros((1, 2), np.uint64), np.array([[3]]), ["r"])
    side.start_load(module.AdpMetadata(step=1, async_restore=[chunks]), None)
    ((job, _),) = side._async[0].jobs
    if timeout_s > 1:
        assert side.finished_restores() == (set(), set())
        assert not job.abandoned
        return
    wait_until(lambda: job.expired, 5, "load_timeout_s has passed")
    assert side.finished_restores() == ({"r"}, {"r"})
    assert job.reason == "load_timeout_s has passed"
    assert side.take_failed_blocks() == {3}


def test_saves_beyond_what_may_be_pending_are_dropped_until_earlier_ones_end():
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        module = importlib.import_module("adp_kv.connector.worker")
    settings = ConnectorSettings(max_pending_save_bytes=2 * 64)
    side = module.WorkerSide(SimpleNamespace(), settings, b"n" * 16)
    side._client = Client()
    side._caches = {0: CacheGeometry(0, "l.0", 0, 64, 64, 8, 1)}

    def save(step):
        key = np.full((1, 2), step, np.uint64)
        chunks = module.Chunks(0, key, np.array([[3]]), ["r"])
        side.finish_step(module.AdpMetadata(step=step, save=[chunks]))
        return [job.number for job in side._client.saves]

    assert save(1) == [1]
    assert save(2) == [1, 2]
    assert save(3) == [1, 2]
    side._client.saves[0].note_finished(1)
    side._client.counts, side._client.ended = {}, False
    assert 1 in side.take_report().saved_steps
    assert side.take_report() is None, "the same is told twice"
    assert save(4) == [1, 2, 4]


def test_failed_step_is_told_until_the_scheduler_knows_and_counts_are_told_once():
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        module = importlib.import_module("adp_kv.connector.worker")
    side = module.WorkerSide(SimpleNamespace(), ConnectorSettings(), b"n" * 16)
    side._client = Client()
    side._client.counts, side._client.ended = {"bytes_saved": 5}, False
    side._failed_step = 3
    for acknowledged, told in ((2, 3), (2, 3), (3, None)):
        side.finish_step(module.AdpMetadata(step=4, acknowledged_failure=acknowledged))
        report = side.take_report()
        assert (report and report.failed_step) == told
    assert side.take_stats()["sums"] == {"bytes_saved": 5}
    assert side.take_stats() is None
    side._client.counts = {"bytes_saved": 7, "objects_missed": 1}
    assert side.take_stats()["sums"] == {"bytes_saved": 2, "objects_missed": 1}

"""The connector's numbers, through vLLM's own aggregation, log and Prometheus classes."""

import importlib
import json
import pickle
import re
import warnings
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from adp_kv.metrics import ENGINE_METRICS, Recorder
from tests.support.process import REPO

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def connector():
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        return importlib.import_module("adp_kv.connector.connector").AdpConnector


def recorded(**sums):
    recorder = Recorder()
    for name, amount in sums.items():
        recorder.add(name.replace("__", ":"), amount)
    return recorder


def stats_of(connector, recorder):
    """Return a side's stats as vLLM gets them, having crossed a process boundary."""
    side = SimpleNamespace(take_stats=recorder.take)
    plain = SimpleNamespace(_worker=side, _scheduler=None)
    stats = connector.get_kv_connector_stats(plain)
    return None if stats is None else pickle.loads(pickle.dumps(stats))


@pytest.fixture
def prometheus(connector):
    """Return observe(), and a function that reads a sample by name and labels."""
    registry = CollectorRegistry()

    def kind(cls):
        def make(**arguments):
            return cls(registry=registry, **arguments)

        return make

    types = {cls: kind(cls) for cls in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    metrics = connector.build_prom_metrics(config, types, ["model_name", "engine"], labels)

    def read(name, engine="0", **extra):
        found = {"model_name": "m", "engine": engine} | extra
        return registry.get_sample_value(f"vllm:adp_kv_{name}", found)

    return metrics, read


def test_ranks_are_added_up_and_shown(connector, prometheus):
    first, second = recorded(bytes_restored=10), recorded(bytes_restored=5, turned_off=1)
    second.add("saves_dropped:off", 2)
    for recorder, seconds in ((first, 0.002), (second, 0.2)):
        recorder.observe("restore_seconds", seconds)
    total = stats_of(connector, first).aggregate(stats_of(connector, second))
    data = json.loads(json.dumps(total.data))  # as it goes to vLLM's front end
    metrics, read = prometheus
    metrics.observe(connector.build_kv_connector_stats(data).data, engine_idx=1)
    assert read("bytes_restored_total", "1") == 15
    assert read("turned_off_total", "1") == 1
    assert read("turned_off_total", "0") == 0
    assert read("saves_dropped_total", "1", reason="off") == 2
    assert read("restore_seconds_count", "1") == 2
    assert read("restore_seconds_bucket", "1", le="0.0025") == 1
    assert read("restore_seconds_sum", "1") == pytest.approx(0.202)


def test_every_metric_can_be_shown(connector, prometheus):
    recorder = Recorder()
    for metric in ENGINE_METRICS:
        name = f"{metric.name}:x" if metric.labels else metric.name
        if metric.kind == "counter":
            recorder.add(name, 3)
        elif metric.kind == "gauge":
            recorder.show(name, 3)
        else:
            recorder.observe(name, 3)
    metrics, read = prometheus
    metrics.observe(stats_of(connector, recorder).data)
    for metric in ENGINE_METRICS:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_sum"}[metric.kind]
        labels = dict.fromkeys(metric.labels, "x")
        assert read(metric.name + suffix, **labels) == 3, metric.name


def test_nothing_new_is_nothing(connector):
    recorder = recorded(lookups=1)
    recorder.show("off", 0.0)
    assert stats_of(connector, recorder).data["now"] == {"off": 0.0}
    recorder.show("off", 0.0)
    recorder.add("lookups", 0)
    assert stats_of(connector, recorder) is None
    recorder.show("off", 1.0)
    assert stats_of(connector, recorder).data == {"sums": {}, "seconds": {}, "now": {"off": 1.0}}


def test_log_line_has_sums_and_means(connector):
    recorder = recorded(lookups=4)
    for seconds in (0.001, 0.003):
        recorder.observe("lookup_seconds", seconds)
    stats = stats_of(connector, recorder)
    assert not stats.is_empty()
    assert stats.reduce() == {"lookups": 4, "lookup_mean_ms": 2.0}
    stats.reset()
    assert stats.is_empty()


def test_what_the_sides_count_is_in_the_table():
    """A name that vLLM's classes would not know would end a request's output loop."""
    import re

    known = {m.name: m for m in ENGINE_METRICS}
    text = "".join(
        (REPO / "adp_kv" / name).read_text()
        for name in ("connector/scheduler.py", "connector/saves.py", "connector/worker.py")
    )
    used = re.findall(r'stats\.(add|observe|show)\(\s*f?"([^"]+)"', text)
    used += [("add", name) for name in re.findall(r'_count\("(\w+)"', _client())]
    used.append(("add", "turned_off"))
    kinds = {"add": "counter", "observe": "histogram", "show": "gauge"}
    for call, name in used:
        family, _, label = name.partition(":")
        assert known[family].kind == kinds[call], name
        assert bool(label) == bool(known[family].labels), name
    assert {name.partition(":")[0] for _, name in used} == set(known), "described, never counted"


def _client():
    return (REPO / "adp_kv" / "sdk" / "rank_client.py").read_text()


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("saves_dropped_total", {"reason": "save_timeout_s"}),
        ("restores_failed_total", {"mode": "async"}),
        ("lookups_unanswered_total", {}),
        ("restore_seconds_count", {}),
    ],
)
def test_nothing_appears_with_its_first_event(prometheus, name, labels):
    """A rate does not see a counter that begins at 1."""
    _, read = prometheus
    assert read(name, **labels) == read(name, "1", **labels) == 0


def test_labels_that_are_counted_are_those_shown_before():
    known = {f"{m.name}:{value}" for m in ENGINE_METRICS for value in m.values}
    sources = "".join(path.read_text() for path in (REPO / "adp_kv/connector").glob("*.py"))
    counted = set(re.findall(r'"((?:saves_dropped|restores_failed):\w+)"', sources))
    counted |= {f"saves_dropped:{r}" for r in re.findall(r'_drop\([^"]*?"(\w+)"', sources)}
    assert counted == known

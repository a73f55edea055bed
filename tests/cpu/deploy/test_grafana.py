"""The dashboard asks for what a running gateway and the connector really export."""

import json
import re

import pytest

from adp_kv.metrics import ENGINE_METRICS, ENGINE_PREFIX
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.cards.registry import create_card
from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.metric_sums import scrape
from tests.support.process import REPO, wait_until
from tests.support.serving import Serving, random_chunks

DASHBOARD = REPO / "deploy" / "grafana" / "adp-kv.json"
VLLM = {"vllm:external_prefix_cache_hits_total": set(), "vllm:prompt_tokens_total": set()}
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
WORDS = {"histogram_quantile", "increase", "sum", "rate", "max", "by", "le"}


def targets():
    """Return (panel title, expression, legend) of every query."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (p["title"], t["expr"], t["legendFormat"]) for p in panels for t in p.get("targets", [])
    ]


def exported_by_connector():
    return {
        ENGINE_PREFIX + m.name + suffix: {*m.labels, *({"le"} if suffix == "_bucket" else ())}
        for m in ENGINE_METRICS
        for suffix in SUFFIXES[m.kind]
    }


def series(port):
    """Return the names and labels of all samples of a gateway's endpoint."""
    return set(re.findall(r"^([\w:]+(?:\{.*\})?) \S+$", scrape(port), re.MULTILINE))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return a gateway's series before anything has happened, and after work and faults."""
    options = {"path": str(tmp_path_factory.mktemp("card")), "capacity_bytes": 32 << 20}
    card = FaultyCard(create_card("slab", options | {"num_databases": 2}))
    chunks, blocks = random_chunks(4), blocks_of(0, 2, 4, 6)
    settings = {"shared_memory_size": 64 * 16384, "metrics": "127.0.0.1:0"}
    with Serving(card, **settings) as serving, Team(serving.address, pools(2)).start() as team:
        port = serving.server.metrics_port
        served = "adp_gateway_engine_active 1\n"
        wait_until(lambda: served in scrape(port), 5, "a snapshot with the engine")
        before = series(port)
        team.save(1, chunks, blocks)
        team.restore(2, chunks, blocks)
        card.faults = [Fault(Status.CORRUPT, ops={Op.READ}), Fault(Status.NO_SPACE, ops={Op.WRITE})]
        team.restore(3, chunks, blocks)
        card.faults = card.faults[1:]
        jobs = team.jobs(4, random_chunks(2, 5), blocks_of(8, 10))
        team.submit_saves(jobs)
        finish(jobs)
        last = 'not_written_total{reason="no_space"} 0'
        wait_until(lambda: last not in scrape(port), 5, "a snapshot with the last fault")
        return before, series(port)


@pytest.fixture(scope="module")
def exported(told):
    """Return the labels of every sample, by name: the gateway's, the connector's, vLLM's."""
    found = {name.partition("{")[0]: set(re.findall(r'(\w+)="', name)) for name in told[1]}
    return found | exported_by_connector() | VLLM


def test_nothing_appears_with_its_first_event(told):
    """A rate does not see a counter that begins at 1."""
    before, after = told
    appeared = {name for name in after - before if "_database_seconds" not in name}
    assert not appeared


def names_in(expression):
    """Return the metrics and the labels that an expression names."""
    labels = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    bare = re.sub(r"\[[^]]*\]|by \([^)]*\)", "", expression)
    names = set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS
    return names, labels


@pytest.mark.parametrize(("title", "expression", "legend"), targets())
def test_query_finds_its_metrics(exported, title, expression, legend):
    names, labels = names_in(expression)
    assert names, expression
    for name in names:
        assert name in exported, f"{title}: nobody exports {name}"
        assert labels <= exported[name], f"{title}: {name} has labels {exported[name]}"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels
    assert expression.count("(") == expression.count(")")


def test_every_histogram_and_reason_is_on_the_dashboard():
    text = DASHBOARD.read_text()
    for name in (m.name for m in ENGINE_METRICS if m.kind == "histogram"):
        assert f"{ENGINE_PREFIX}{name}_bucket" in text
    for label in ("reason", "phase", "database", "direction", "mode", "op"):
        assert f"{{{{{label}}}}}" in text


def test_dashboard_is_one_that_grafana_takes():
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"][k] for k in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
    (variable,) = board["templating"]["list"]
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${" + variable["name"] + "}"
            assert panel["description"]

"""The dashboard asks for what a running gateway and the connector really export."""

import itertools
import json
import re

import pytest

from adp_kv.metrics import ENGINE_METRICS, ENGINE_PREFIX
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.cards.registry import create_card
from gateway.metrics import METRICS, PREFIX
from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.metric_sums import scrape
from tests.support.process import REPO, wait_until
from tests.support.serving import Serving, random_chunks

DASHBOARD = REPO / "deploy" / "grafana" / "adp-kv.json"
BOARD = json.loads(DASHBOARD.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
STATS = [panel for panel in PANELS if panel["type"] == "stat"]


def titles(panels):
    """Return how pytest calls a parameter."""
    return [panel["title"] for panel in panels]


VLLM = {"vllm:external_prefix_cache_hits_total": set(), "vllm:prompt_tokens_total": set()}
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
FUNCTIONS = ["histogram_quantile", "increase", "max", "rate", "round", "sum", "vector"]
WORDS = {*FUNCTIONS, "by", "le", "or"}
SCRAPED = {"instance"}  # Prometheus' own label of every sample
# What tells of a working system. Every other metric is a sign of a fault, or has a panel.
NOT_SHOWN = {
    *("info", "lookups", "gets", "get_grants", "get_objects", "objects_read", "puts", "put_grants"),
    *("put_objects", "objects_written", "objects_skipped", "chunks_already_stored"),
    *("ahead_wishes", "ahead_expired", "objects_read_ahead", "objects_taken_ahead"),
    *("objects_unused_ahead", "io_size_bytes", "card_bytes_read", "card_bytes_written"),
    *("card_journal_bytes", "card_compactions", "card_scrub_passes", "card_scrubbed_bytes"),
    *("card_evicted_bytes", "card_expired_chunks", "card_quota_evicted_chunks"),
    *("lookup_chunks", "lookup_chunks_found", "tokens_restored", "chunks_saved"),
    "bytes_exchanged",
}


def targets():
    """Return (panel title, expression, legend) of every query."""
    return [(p["title"], t["expr"], t["legendFormat"]) for p in PANELS for t in p["targets"]]


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
    nvme = create_card("nvme_kv", {"devices": "/dev/ng0n1"})
    others = {f"{PREFIX}card_{name}": set() for name in nvme.stats()}
    return others | found | exported_by_connector() | VLLM


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
    bare = re.sub(r"\[[^]]*\]|by \([^)]*\)", "", expression).replace("60 * ", "")
    names = set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS
    return names, labels


@pytest.mark.parametrize(("title", "expression", "legend"), targets())
def test_query_finds_its_metrics(exported, title, expression, legend):
    names, labels = names_in(expression)
    assert names, expression
    for name in names:
        assert name in exported, f"{title}: nobody exports {name}"
        assert labels - SCRAPED <= exported[name], f"{title}: {name} has labels {exported[name]}"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels
    assert expression.count("(") == expression.count(")")


def test_every_histogram_and_reason_is_on_the_dashboard():
    text = DASHBOARD.read_text()
    for name in (m.name for m in ENGINE_METRICS if m.kind == "histogram"):
        assert f"{ENGINE_PREFIX}{name}_bucket" in text
    for label in ("reason", "phase", "database", "direction", "mode", "op"):
        assert f"{{{{{label}}}}}" in text


def test_every_sign_of_a_fault_is_on_the_dashboard():
    shown = set().union(*(names_in(expression)[0] for _, expression, _ in targets()))
    tables = [(PREFIX, METRICS), (ENGINE_PREFIX, ENGINE_METRICS)]
    metrics = [(prefix, metric) for prefix, table in tables for metric in table]
    missing = {
        prefix + metric.name
        for prefix, metric in metrics
        if metric.name not in NOT_SHOWN
        and not shown & {prefix + metric.name + suffix for suffix in SUFFIXES[metric.kind]}
    }
    assert not missing, "show them, or name them in NOT_SHOWN if they are no fault"
    assert {metric.name for _, metric in metrics} >= NOT_SHOWN


def test_dashboard_is_one_that_grafana_takes():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    (variable,) = BOARD["templating"]["list"]
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${" + variable["name"] + "}"
        assert panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0


def test_no_panel_lies_on_another():
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


@pytest.mark.parametrize("panel", PANELS, ids=titles(PANELS))
def test_scale_of_a_panel_can_be_read(panel):
    """What Grafana does by itself with zeros is an axis up to 100, in % up to 10000."""
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    if panel["type"] == "timeseries":
        custom = defaults["custom"]
        is_log = custom.get("scaleDistribution", {}).get("type") == "log"
        assert ("min" in defaults) is not is_log, (
            "a logarithm has no 0, everything else begins there"
        )
        if defaults["unit"] == "percentunit":
            assert defaults["max"] == 1
        if defaults["unit"] in {"cpm", "short"}:
            assert custom["axisSoftMax"] == 1


@pytest.mark.parametrize("panel", PANELS, ids=titles(PANELS))
def test_legends_of_a_panel_differ(panel):
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert all(legends)
    assert len(set(legends)) == len(legends)


@pytest.mark.parametrize("panel", PANELS, ids=titles(PANELS))
def test_window_of_a_query_fits_its_panel(panel):
    """A big number tells of now, or of all the time shown: not of the last that was heard."""
    instant = panel["type"] == "stat"
    for target in panel["targets"]:
        assert target.get("instant", False) is instant
        assert target.get("range", True) is not instant
        windows = set(re.findall(r"\[([^]]*)\]", target["expr"]))
        assert windows <= {"$__range" if instant else "$__rate_interval"}


@pytest.mark.parametrize("panel", STATS, ids=titles(STATS))
def test_colour_of_a_number_is_said(panel):
    """Grafana's own thresholds are green, and red from 80 on, whatever is counted."""
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["color"]["mode"] == "fixed":
        return
    colours = [step["color"] for step in defaults["thresholds"]["steps"]]
    assert defaults["color"]["mode"] == "thresholds"
    assert "green" in colours
    assert {"red", "orange"} & set(colours)
    (target,) = panel["targets"]
    unknown = [m for m in defaults.get("mappings", []) if m["type"] == "special"]
    assert "vector(0)" in target["expr"] or unknown, "green where nobody is asked"


def test_sum_of_faults_lacks_no_part_for_a_process_that_is_not_scraped():
    (panel,) = [panel for panel in STATS if panel["title"] == "Faults"]
    expression = panel["targets"][0]["expr"]
    assert expression.count("or vector(0)") == expression.count("increase(") > 5


def test_panels_of_faults_name_only_what_happened():
    """There are twelve reasons alone; a legend of zeros hides the one that is not."""
    (at,) = [p["gridPos"]["y"] for p in BOARD["panels"] if p["title"].startswith("What went wrong")]
    faults = [panel for panel in PANELS if panel["gridPos"]["y"] > at]
    assert len(faults) >= 3
    for panel in faults:
        matchers = [rule["matcher"] for rule in panel["fieldConfig"]["overrides"]]
        assert {"reducer": "allIsZero", "op": "gte", "value": 0} in [m["options"] for m in matchers]

"""The endpoint: what it says, that it is off unless asked for, that it holds nobody up."""

import re
import socket
import time
import urllib.error

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adp_kv.errors import CardError, ConfigError
from adp_kv.metrics import SECONDS, Histogram
from gateway.cards.base import Op, Status
from gateway.cards.registry import create_card
from gateway.config import Settings
from gateway.metrics import METRICS, PREFIX, Snapshot, render
from gateway.metrics_http import STALE_S, MetricsServer
from tests.support.cards import memory_card
from tests.support.clock import FakeClock
from tests.support.metric_sums import Values, scrape
from tests.support.process import REPO, free_port, wait_until
from tests.support.serving import Serving, get, random_chunks, sharded, store

NONE = Snapshot({"release": "1", "card": "memory"}, {}, {})


def counted():
    """Return every name that the gateway's sources count or show under a name of its own."""
    found = set()
    for path in (REPO / "gateway").glob("*.py"):
        text = path.read_text()
        for name in re.findall(r'(?:counters\.add|count_failures)\([^"\n]*f?"([^"]+)"', text):
            kinds = ("get", "put") if "{self.kind}" in name else ("",)
            found |= {name.replace("{self.kind}", kind) for kind in kinds}
    return {name for name in found if "{" not in name}


def test_every_counter_is_described_and_counted():
    described = {m.name for m in METRICS if m.kind == "counter" and not m.name.startswith("card_")}
    assert counted() | {"peers_refused"} == described  # that one is the gatekeeper's


def test_text_is_read_back_as_it_was_meant():
    histogram = Histogram()
    for seconds in (0.00005, 0.0001, 0.3, 99.0):
        histogram.observe(seconds)
    values = {"lookups": 3, "objects_missed": 5, "objects_missed:absent": 4}
    values |= {"objects_missed:corrupt": 1, "ring_slots:get": 8, "card_evicted": 2}
    text = render(
        Snapshot({"release": 'a"b\n', "card": "m"}, values, {"get_seconds:total": histogram})
    )
    families = {f.name.removeprefix(PREFIX): f for f in text_string_to_metric_families(text)}
    assert families["info"].samples[0].labels == {"release": 'a"b\n', "card": "m"}
    assert families["lookups"].type == "counter"
    assert {s.labels["reason"]: s.value for s in families["objects_missed"].samples} == {
        "absent": 4,
        "corrupt": 1,
    }
    assert families["ring_slots"].type == "gauge"
    assert families["card_evicted"].type == "counter"  # a card's own, not in the table
    buckets = {s.labels.get("le"): s.value for s in families["get_seconds"].samples}
    assert (buckets["0.0001"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (2, 2, 3, 4)
    assert len(buckets) == len(SECONDS) + 2


def test_endpoint_tells_what_was_done():
    with Serving(metrics="127.0.0.1:0") as serving:
        caches = sharded(2, 2)
        ranks = serving.join(caches)
        chunks = random_chunks(3)
        store(ranks, chunks)
        get(ranks, 1, chunks, [0])
        serving.assert_idle()
        port = serving.server.metrics_port

        def read():
            return Values(scrape(port))

        wait_until(lambda: read()["objects_read"] == 3, 5, "the next snapshot")
        values = read()
        assert values["chunks_committed"] == 3
        assert values["objects_written"] == 6
        assert values["bytes_read"] == 3 * 2 * 4096
        assert values["engine_active"] == 1
        assert values["ranks"] == 2
        assert values.labelled["card_seconds_count"]["write"] >= 2
        assert scrape(port, "/healthz") == "ok\n"


def test_endpoint_is_off_by_default():
    assert Settings().metrics == ""
    with Serving() as serving:
        assert serving.server.metrics_port == 0
        assert serving.server._metrics is None


@pytest.mark.parametrize("wrong", ["9464", "localhost", "http://h:1", "h:x", "a b:1"])
def test_wrong_address_is_named(wrong):
    with pytest.raises(ConfigError, match=r"metrics = .*: expected HOST:PORT"):
        Settings(metrics=wrong)


def test_taken_port_is_named_and_leaves_nothing():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"metrics = .*in use; choose a free port"):
            Serving(metrics=address)


def test_silent_reader_holds_nobody_up():
    with Serving(metrics="127.0.0.1:0") as serving:
        ranks = serving.join(sharded(1, 1))
        with socket.create_connection(("127.0.0.1", serving.server.metrics_port)) as silent:
            silent.send(b"GET ")
            began = time.monotonic()
            assert ranks[0].lookup(random_chunks(1)) == [False]
            assert time.monotonic() - began < 2
            assert scrape(serving.server.metrics_port)  # once the silent one was cut off


def test_gateway_that_can_not_start_serves_no_metrics(monkeypatch):
    card, address = memory_card(), f"127.0.0.1:{free_port()}"

    def refuse(_on_done):
        raise CardError("no such card")

    monkeypatch.setattr(card, "open", refuse)
    with pytest.raises(CardError):
        Serving(card, metrics=address)
    with pytest.raises(OSError, match="refused"):
        scrape(address.rpartition(":")[2])


@pytest.mark.parametrize("io_engine", ["threads", "auto"])
def test_each_database_has_its_latency(tmp_path, io_engine):
    options = {"capacity_bytes": 32 << 20, "num_databases": 2, "io_engine": io_engine}
    card = create_card("slab", options | {"path": str(tmp_path)})
    with Serving(card) as serving:
        ranks = serving.join(sharded(2, 1))
        store(ranks, random_chunks(30))
        values = Values(render(serving.server.snapshot()))
        by_database = values.labelled["card_database_seconds_count"]
        assert set(by_database) == {"0", "1"}
        assert sum(by_database.values()) == 60  # one fragment an object; markers move nothing
        assert all(by_database.values())
        assert values["card_database_seconds_sum"] > 0


def test_health_says_when_the_loop_stands_still():
    clock = FakeClock()
    server = MetricsServer("127.0.0.1:0", clock)
    try:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(server.port, "/healthz")  # nothing is known yet
        server.publish(NONE)
        assert scrape(server.port, "/healthz") == "ok\n"
        clock.advance(STALE_S + 1)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            scrape(server.port, "/healthz")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(server.port, "/etc/passwd")
    finally:
        server.close()


def test_labels_that_are_shown_before_are_those_of_cards():
    known = {metric.name: metric.values for metric in METRICS}
    reasons = {status.name.lower() for status in Status if status is not Status.OK}
    assert set(known["objects_missed"]) == set(known["objects_not_written"]) == reasons
    assert set(known["card_seconds"]) == {op.name.lower() for op in Op}

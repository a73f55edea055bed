"""The gateway's metrics: what each is, and their form for Prometheus.

Counters go by plain names (`gateway.counters`); `name:value` puts the value of the family's
only label behind the colon. Whatever a card counts is exported under card_, also what is
not in the table.

Threads: a Snapshot is made by the gateway's main thread and read by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from adp_kv.metrics import SECONDS, Histogram, Metric

_T = TypeVar("_T")

PREFIX = "adp_gateway_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# As the cards name them; what reads a snapshot needs no card.
_REASONS = ("absent", "corrupt", "io_error", "no_space", "too_large", "unreachable")
_OPS = ("exist", "read", "write", "delete")
_PHASES = ("ranks", "copy", "total")

METRICS = (
    Metric("info", "gauge", "1; labels: adp-kv release, kind of card", ("release", "card")),
    Metric("lookups", "counter", "questions which chunks are stored"),
    Metric("chunks_looked_up", "counter", "chunks asked about"),
    Metric("chunks_found", "counter", "of those, chunks that were stored whole: the hits"),
    Metric("gets", "counter", "read requests, one a layer of a restore, all ranks as one"),
    Metric("gets_failed", "counter", "read requests that failed as a whole"),
    Metric("get_grants", "counter", "batches of read objects that ranks were given"),
    Metric("get_objects", "counter", "objects that read requests named"),
    Metric("objects_read", "counter", "objects read into the ring, checked"),
    Metric("objects_missed", "counter", "objects that could not be read", ("reason",), _REASONS),
    Metric("get_objects_given_up", "counter", "objects of requests that ended before the read"),
    Metric("bytes_read", "counter", "bytes of objects_read"),
    Metric("commits_withdrawn", "counter", "chunks no longer offered: an object was missed"),
    Metric("ahead_wishes", "counter", "prompts that waited in the engine's queue and were told of"),
    Metric("ahead_expired", "counter", "of those, prompts nobody came for in time"),
    Metric("objects_read_ahead", "counter", "objects read before they were asked for"),
    Metric("objects_taken_ahead", "counter", "of those, objects a get then took"),
    Metric("objects_unused_ahead", "counter", "of those, objects given back untaken"),
    Metric("puts", "counter", "write requests, all ranks as one"),
    Metric("puts_failed", "counter", "write requests that failed as a whole"),
    Metric("put_grants", "counter", "batches of slots to fill that ranks were given"),
    Metric("put_objects", "counter", "objects that write requests named"),
    Metric("objects_written", "counter", "objects written from the ring to the card"),
    Metric(
        "objects_not_written", "counter", "objects the card did not take", ("reason",), _REASONS
    ),
    Metric("objects_not_filled", "counter", "objects a rank did not copy into the ring"),
    Metric(
        "objects_skipped", "counter", "objects not asked for: stored, named twice, out of reach"
    ),
    Metric("put_objects_given_up", "counter", "objects of requests that ended before the write"),
    Metric("bytes_written", "counter", "bytes of objects_written"),
    Metric("chunks_committed", "counter", "chunks whose every object was written: now offered"),
    Metric("chunks_discarded", "counter", "chunks deleted again: their save failed half-way"),
    Metric("chunks_out_of_reach", "counter", "chunks not saved: a database does not answer"),
    Metric("chunks_already_stored", "counter", "chunks that a save named and that were there"),
    Metric("jobs_expired", "counter", "saves of a step forgotten after job_deadline_s"),
    Metric("rank_disagreements", "counter", "requests on which ranks disagreed: report it"),
    Metric("hellos_refused", "counter", "ranks turned away, those asked to try again included"),
    Metric("sessions_ended", "counter", "engines that left, died or were ended"),
    Metric("peers_refused", "counter", "connections without the gateway's key"),
    Metric("bad_messages", "counter", "messages that were no protocol, or broke it"),
    Metric("unexpected_errors", "counter", "errors nobody expected; each ends a session"),
    Metric("engine_active", "gauge", "1 while an engine is being served"),
    Metric("ranks", "gauge", "worker ranks that have joined"),
    Metric("ranks_expected", "gauge", "worker ranks of the engine"),
    Metric("io_size_bytes", "gauge", "what a ring slot holds: the engine's largest object"),
    Metric("ring_slots", "gauge", "ring slots of a direction", ("direction",)),
    Metric("ring_slots_free", "gauge", "of those, slots that nobody holds", ("direction",)),
    Metric("ring_slots_withheld", "gauge", "left to a card that has not answered", ("direction",)),
    Metric("requests_open", "gauge", "requests under way", ("direction",)),
    Metric("jobs_open", "gauge", "saves under way"),
    Metric("card_batches_open", "gauge", "batches that the card has not answered"),
    Metric(
        "get_seconds",
        "histogram",
        "of a read request: ranks (first rank's request to the last's), copy (of a batch, granted "
        "until every rank has copied it), total",
        ("phase",),
        _PHASES,
    ),
    Metric(
        "put_seconds",
        "histogram",
        "of a write request: phases as in get_seconds",
        ("phase",),
        _PHASES,
    ),
    Metric(
        "card_seconds",
        "histogram",
        "of a batch on the card",
        ("op",),
        _OPS,
    ),
    Metric(
        "card_database_seconds", "histogram", "of one I/O on a database's device", ("database",)
    ),
    Metric("card_values", "gauge", "values on the card: fragments and commit records"),
    Metric("card_free_slots", "gauge", "values that still fit (memory, slab)"),
    Metric("card_journal_bytes", "gauge", "size of the journals (slab)"),
    Metric("card_size_bytes", "gauge", "size of the namespaces (nvme_kv)"),
    Metric("card_used_bytes", "gauge", "bytes in use on the namespaces (nvme_kv)"),
    Metric("card_bytes_read", "counter", "bytes read and checked on the card"),
    Metric("card_bytes_written", "counter", "bytes written on the card"),
    Metric("card_corrupt", "counter", "values that failed their check and were dropped"),
    Metric("card_io_errors", "counter", "I/Os the device failed"),
    Metric("card_batches_late", "counter", "batches given up: not answered in card_deadline_s"),
    Metric("card_databases_out", "gauge", "databases left out because they do not work"),
    Metric("card_groups", "gauge", "chunks on the card, those being written too (memory, slab)"),
    Metric(
        "card_evicted_chunks", "counter", "chunks that went, whatever the reason (memory, slab)"
    ),
    Metric("card_evicted_bytes", "counter", "bytes of their values"),
    Metric("card_expired_chunks", "counter", "of those, chunks older than ttl_s"),
    Metric("card_abandoned_chunks", "counter", "of those, chunks that never got a commit record"),
    Metric("card_quota_evicted_chunks", "counter", "of those, chunks for their namespace's quota"),
    Metric("card_dropped_by_quota", "counter", "values not written: the namespace has its quota"),
    Metric("card_compactions", "counter", "journals compacted (slab)"),
    Metric("card_scrub_passes", "counter", "how often all values were read again (slab)"),
    Metric("card_scrubbed_bytes", "counter", "bytes read again in the background (slab)"),
    Metric("card_scrub_corrupt", "counter", "damaged values found that way (slab)"),
    Metric("card_journal_failures", "counter", "journal records that could not be written (slab)"),
)

ZEROS: Mapping[str, float] = {
    name: 0
    for metric in METRICS
    if metric.kind == "counter" and not metric.name.startswith("card_")
    for name in metric.series
}
"""What is exported before it has happened, so that a rate of it can be taken."""

EMPTY: Mapping[str, Histogram] = {
    name: Histogram() for m in METRICS if m.kind == "histogram" for name in m.series
}
"""Histograms that are exported before their first duration; not to be changed."""

_BY_NAME = {metric.name: metric for metric in METRICS}
_HISTOGRAMS = {"get": "get_seconds", "put": "put_seconds"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment.

    Attributes:
        info: labels of the info metric.
        values: counters and gauges by name or name:label.
        durations: histograms by name:label.
    """

    info: Mapping[str, str]
    values: Mapping[str, float]
    durations: Mapping[str, Histogram]


def histogram_name(name: str) -> str:
    """Return the family:label of a counter's histogram: get:ranks is get_seconds:ranks."""
    family, _, label = name.partition(":")
    return f"{_HISTOGRAMS[family]}:{label}"


def render(snapshot: Snapshot) -> str:
    """Return a snapshot in Prometheus's text format."""
    lines: list[str] = []
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in snapshot.info.items())
    _head(lines, _BY_NAME["info"])
    lines.append(f"{PREFIX}info{{{labels}}} 1")
    for metric, samples in _families(snapshot.values):
        _head(lines, metric)
        suffix = "_total" if metric.kind == "counter" else ""
        for label, value in samples:
            lines.append(f"{PREFIX}{metric.name}{suffix}{_label(metric, label)} {_number(value)}")
    for metric, histograms in _families(snapshot.durations):
        _head(lines, metric)
        for label, histogram in histograms:
            lines.extend(_buckets(metric, label, histogram))
    return "\n".join(lines) + "\n"


def _families(samples: Mapping[str, _T]) -> Iterable[tuple[Metric, list[tuple[str, _T]]]]:
    """Group samples by family; of one with a label only those that have it."""
    grouped: dict[str, list[tuple[str, _T]]] = {}
    for name, value in samples.items():
        family, _, label = name.partition(":")
        grouped.setdefault(family, []).append((label, value))
    for family in sorted(grouped):
        metric = _BY_NAME.get(family) or Metric(family, "counter", "of the card; docs/cards.md")
        chosen = [one for one in grouped[family] if bool(one[0]) == bool(metric.labels)]
        if chosen:
            yield metric, sorted(chosen, key=lambda one: one[0])


def _head(lines: list[str], metric: Metric) -> None:
    suffix = "_total" if metric.kind == "counter" else ""
    lines.append(f"# HELP {PREFIX}{metric.name}{suffix} {metric.meaning}")
    lines.append(f"# TYPE {PREFIX}{metric.name}{suffix} {metric.kind}")


def _label(metric: Metric, label: str, extra: str = "") -> str:
    parts = [f'{metric.labels[0]}="{_escaped(label)}"'] if metric.labels else []
    parts += [extra] if extra else []
    return "{" + ",".join(parts) + "}" if parts else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _buckets(metric: Metric, label: str, histogram: Histogram) -> Iterable[str]:
    name = PREFIX + metric.name
    total = 0
    for bound, count in zip((*SECONDS, float("inf")), histogram.counts, strict=True):
        total += count
        shown = "+Inf" if bound == float("inf") else f"{bound:g}"
        bucket = f'le="{shown}"'
        yield f"{name}_bucket{_label(metric, label, bucket)} {total}"
    yield f"{name}_sum{_label(metric, label)} {histogram.total_s:.9g}"
    yield f"{name}_count{_label(metric, label)} {total}"

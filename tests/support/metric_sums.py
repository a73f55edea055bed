"""Metrics by name, and the sums that docs/metrics.md says must hold among them."""

import re
import urllib.request
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import PREFIX
from tests.support.process import REPO

DOCS = REPO / "docs" / "metrics.md"


class Values(dict):
    """Values by short name, summed over labels; short["name"] by label."""

    def __init__(self, text):
        super().__init__()
        self.labelled = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    continue
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                self[name] = self.get(name, 0) + sample.value
                for value in sample.labels.values():
                    self.labelled[name][value] = sample.value

    def __missing__(self, name):
        return 0


def sums(kind):
    """Return the lines of a block of docs/metrics.md: "always" or "idle"."""
    (block,) = re.findall(rf"```sums-{kind}\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return block.strip().splitlines()


def broken(values, kinds=("always",)):
    """Return the sums that do not hold, with their two sides."""
    found = []
    for kind in kinds:
        for line in sums(kind):
            left, relation, right = re.fullmatch(r"(.+?) (<=|==) (.+)", line).groups()
            a, b = (_side(values, side) for side in (left, right))
            if not (a <= b if relation == "<=" else a == b):
                found.append(f"{line}: {a:g} and {b:g}")
    return found


def _side(values, text):
    return sum(_term(values, term) for term in text.split(" + "))


def _term(values, term):
    if term.isdigit():
        return int(term)
    name, _, label = term.removesuffix("]").partition("[")
    return values.labelled[name].get(label, 0) if label else values[name]


def scrape(port, path="/metrics"):
    """Return what the gateway on this port answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
        return reply.read().decode()

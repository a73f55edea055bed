"""Write the tables of docs/ that come from the code, or say that they are stale.

    python -m scripts.generate_docs            write
    python -m scripts.generate_docs --check    exit 1 if a file would change

A table stands between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import msgspec

import adp_kv.config
import gateway.config
from adp_kv.metrics import ENGINE_METRICS, ENGINE_PREFIX, Metric
from adp_kv.units import KiB, format_bytes
from gateway.cards.memory import MemorySettings
from gateway.cards.mooncake.settings import MooncakeSettings
from gateway.cards.nvme.settings import NvmeKvSettings
from gateway.cards.resp.settings import RespSettings
from gateway.cards.slab_settings import SlabSettings
from gateway.metrics import METRICS, PREFIX

DOCS = Path(__file__).parents[1] / "docs"
CARDS: dict[str, type[msgspec.Struct]] = {
    "slab": SlabSettings,
    "nvme_kv": NvmeKvSettings,
    "resp": RespSettings,
    "mooncake": MooncakeSettings,
    "memory": MemorySettings,
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shown(default: object) -> str:
    """Return a default as documents show it."""
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        whole = isinstance(default, int) and default >= KiB and default % KiB == 0
        return format_bytes(int(default)).replace(".0 ", " ") if whole else f"{default:g}"
    if isinstance(default, str) and default:
        return f"`{default}`"
    return "empty" if not default else f"`{default}`"


def settings_table(module: ModuleType, struct: type[msgspec.Struct]) -> str:
    """Return the settings of a config module, in the order of its struct."""
    told: Mapping[str, str] = module.HELP
    fields = msgspec.structs.fields(struct)
    rows = [(f"`{f.name}`", shown(_default(f)), told[f.name]) for f in fields]
    return table(("setting", "default", "meaning"), rows)


def _default(field: msgspec.structs.FieldInfo) -> object:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def card_table(struct: type[msgspec.Struct]) -> str:
    """Return a card's settings, required ones first, with what its docstring and its bases' say."""
    told: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        told |= attributes(base) if issubclass(base, msgspec.Struct) else {}
    fields = sorted(msgspec.structs.fields(struct), key=lambda field: not field.required)
    rows = [(f"`{f.name}`", shown(_default(f)), told[f.name]) for f in fields]
    return table(("setting", "default", "meaning"), rows)


def attributes(struct: type[object]) -> dict[str, str]:
    """Return the Attributes of a docstring by name; `a, b: text` gives both the text."""
    text = inspect.getdoc(struct) or ""
    section = text.partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for entry in re.findall(r"^    (\S.*(?:\n        .*)*)", section, re.MULTILINE):
        names, _, meaning = entry.partition(":")
        for name in names.split(","):
            found[name.strip()] = " ".join(meaning.split())
    return found


def metrics_table(metrics: Iterable[Metric], prefix: str) -> str:
    """Return a table of metrics."""
    rows = (
        (
            f"`{prefix}{m.name}{'_total' if m.kind == 'counter' else ''}`",
            m.kind,
            ", ".join(m.labels) + (f": {', '.join(m.values)}" if m.values else ""),
            m.meaning,
        )
        for m in metrics
    )
    return table(("metric", "kind", "labels", "meaning"), rows)


def blocks() -> dict[str, str]:
    """Return every generated table by name."""
    made = {
        "connector-settings": settings_table(adp_kv.config, adp_kv.config.ConnectorSettings),
        "gateway-settings": settings_table(gateway.config, gateway.config.Settings),
        "gateway-metrics": metrics_table(METRICS, PREFIX),
        "engine-metrics": metrics_table(ENGINE_METRICS, ENGINE_PREFIX),
    }
    return made | {f"card-{kind}": card_table(struct) for kind, struct in CARDS.items()}


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a document with its tables written anew.

    Raises:
        KeyError: It names a table that nobody makes.
    """
    pattern = r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated:\2 -->)"
    return re.sub(pattern, lambda m: f"{m[1]}\n{made[m[2]]}\n\n{m[3]}", text, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Write or check; return 1 if something was stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    made, stale = blocks(), []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        fresh = filled(text, made)
        if fresh != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(fresh)
    if stale and args.check:
        sys.stderr.write(f"stale: {', '.join(stale)}; run python -m scripts.generate_docs\n")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())

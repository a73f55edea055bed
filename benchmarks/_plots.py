"""Plots of benchmark rows; matplotlib (extra `plot`) is imported only when one is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._results import Row

_SPEED = re.compile(r"\w+\.(?P<kind>\w+)\.(?P<kib>\d+)KiB(?:-of-\d+KiB)?\.(?P<way>.+)")


def speed_plots(name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw NAME.KIND.png from rows NAME.KIND.SIZE.WAY in GB/s, and the link as a line.

    Returns:
        What was drawn; nothing for a benchmark without such rows.
    """
    kinds: dict[str, dict[str, list[tuple[float, float]]]] = {}
    link = next((row.value for row in rows if row.metric == f"{name}.link"), None)
    for row in rows:
        found = _SPEED.fullmatch(row.metric)
        if found and row.unit == "GB/s" and row.value is not None:
            series = kinds.setdefault(found["kind"], {})
            series.setdefault(found["way"], []).append((float(found["kib"]), row.value))
    drawn = []
    for kind, unsorted in kinds.items():
        series = {way: sorted(points) for way, points in unsorted.items()}
        if link is not None:
            sizes = sorted({x for points in series.values() for x, _ in points})
            series["link"] = [(sizes[0], link), (sizes[-1], link)]
        drawn.append(
            line_plot(
                folder / f"{name}.{kind}.png",
                series,
                title=f"{name}, {kind}, {rows[0].gpu}",
                x_label="KiB",
                y_label="GB/s",
                log_x=True,
            )
        )
    return drawn


_BARS = {
    "restore": [
        (r"restore\.(?P<part>\w+)\.(?P<bar>\w+)(\.first_token)?", "ms", "time to the first token")
    ],
    "load_mode": [
        (r"load_mode\.(?P<part>\w+)\.(?P<bar>[\w.]+)\.first_token", "ms", "first token"),
        (r"load_mode\.(?P<part>\w+)\.(?P<bar>[\w.]+)\.others\.longest", "ms a token", "others"),
    ],
    "interference": [
        (r"interference\.(?P<part>\w+)\.(?P<bar>.+)\.slowdown", "x", "slowdown beside restores")
    ],
    "save_overhead": [(r"save\.(?P<part>\w+)\.(?P<bar>on|off)", "ms a step", "saving")],
    "memory_card": [
        (r"memory_card\.(?P<part>read)\.(?P<bar>.+)", "GB/s", "memory card to ring"),
    ],
}
"""Benchmark → (metric, unit, title): a plot for each `part`, with a bar for each `bar`."""


def bar_plots(name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw NAME.PART.png, and NAME.PART.TITLE.png for the second kind and on, with bars.

    Returns:
        What was drawn; nothing for a benchmark without bars.
    """
    drawn = []
    for number, (pattern, unit, title) in enumerate(_BARS.get(name, ())):
        parts: dict[str, dict[str, float]] = {}
        for row in rows:
            found = re.fullmatch(pattern, row.metric)
            if found and row.unit == unit:
                parts.setdefault(found["part"], {})[found["bar"]] = row.value
        for part, bars in parts.items():
            suffix = f".{title}" if number else ""
            path = folder / f"{name}.{part}{suffix}.png"
            drawn.append(
                bar_plot(path, bars, title=f"{title}, {part}, {rows[0].gpu}", x_label=unit)
            )
    return drawn


def bar_plot(path: Path, bars: Mapping[str, float], *, title: str, x_label: str) -> Path:
    """Write a plot of named bars, the first on top, and return its path."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 1 + 0.4 * len(bars)), layout="constrained")
    names = list(bars)[::-1]
    drawn = axes.barh(names, [bars[name] for name in names])
    axes.bar_label(drawn, fmt="%.3g", padding=3)
    axes.set(title=title, xlabel=x_label)
    axes.margins(x=0.12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def line_plot(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
) -> Path:
    """Write a plot of named (x, y) series and return its path; the suffix picks the format."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in series.items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    if log_x:
        axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path

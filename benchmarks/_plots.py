"""Plots of benchmark rows; matplotlib (extra `plot`) is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


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

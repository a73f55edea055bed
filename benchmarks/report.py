"""Put the tables of all results into README.md and docs, between their markers.

    python -m benchmarks.report            rewrite the tables, draw the plots
    python -m benchmarks.report --check    change nothing; exit 1 if a table is out of date

`<!-- results:NAME -->` ... `<!-- /results:NAME -->` holds the table of
benchmarks/results/NAME.json, or, as NAME.targets, of its rows with a target. A row is
marked when it misses its target, and when the code that it measures (CODE in
benchmarks/NAME.py) has changed since its commit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

from benchmarks import _plots
from benchmarks._results import DIRTY, REPO, RESULTS, UNKNOWN_COMMIT, Row, git, read_rows

MARKER = re.compile(
    r"(<!-- results:(?P<name>[\w.-]+) -->\n).*?(<!-- /results:(?P=name) -->)", re.DOTALL
)
HEADER = (
    "| what | value | unit | target | baseline | against baseline | note |\n"
    "| --- | ---: | --- | ---: | ---: | ---: | --- |"
)
MISSED = "**misses its target**"
STALE = "**code changed since**"
UNVERIFIED = "**commit not in this history**"
UNCOMMITTED = "**uncommitted code**"


def code_paths(benchmark: Path) -> tuple[str, ...]:
    """Return CODE of a benchmark's source, without importing it.

    Raises:
        ValueError: There is no CODE, or it is no tuple of strings.
    """
    for node in ast.parse(benchmark.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Name) and target.id == "CODE" for target in targets):
            assert isinstance(node, ast.Assign)
            value = ast.literal_eval(node.value)
            if isinstance(value, tuple) and all(isinstance(path, str) for path in value):
                return value
    raise ValueError(f'{benchmark}: declare the paths it measures, CODE = ("adp_kv/kernels", ...)')


def freshness(commit: str, paths: tuple[str, ...], repo: Path = REPO) -> str:
    """Return "" if the code at paths is what it was at commit, else the mark for the row."""
    if commit.endswith(DIRTY):
        return UNCOMMITTED
    if commit == UNKNOWN_COMMIT or git("cat-file", "-e", f"{commit}^{{commit}}", cwd=repo) is None:
        return UNVERIFIED
    last = git("log", "-1", "--format=%H", "--", *paths, cwd=repo)
    if not last or git("merge-base", "--is-ancestor", last, commit, cwd=repo) is not None:
        return ""
    return STALE


def notes(row: Row, paths: tuple[str, ...], repo: Path = REPO) -> str:
    """Return the marks of a row, joined by commas."""
    marks = [MISSED if row.misses_target else "", freshness(row.commit, paths, repo)]
    return ", ".join(filter(None, marks))


def number(value: float | None) -> str:
    """Return a figure with three or four significant digits, "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def against(row: Row) -> str:
    """Return how many times better than the baseline the row is: "1.8x"; "" without one."""
    if not row.baseline or not row.value:
        return ""
    ratio = row.value / row.baseline if row.better == "higher" else row.baseline / row.value
    return f"{ratio:.2f}x"


def table(rows: list[Row], paths: tuple[str, ...], repo: Path = REPO) -> str:
    """Return a markdown table of rows and a line that says where they come from."""
    lines = [HEADER]
    for row in rows:
        target = number(row.target)
        if target:
            target = ("≥ " if row.better == "higher" else "≤ ") + target
        cells = [row.metric, number(row.value), row.unit, target, number(row.baseline)]
        cells += [against(row), notes(row, paths, repo)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    origins = dict.fromkeys(
        f"{row.gpu}, commit {row.commit[:12]}, {row.date[:10]}"
        + "".join(
            f", {name} {row.versions[name]}" for name in ("torch", "vllm") if name in row.versions
        )
        for row in rows
    )
    return "\n".join([*lines, "", *(f"Measured on {origin}." for origin in origins)]) + "\n"


def fill(text: str, tables: dict[str, str]) -> str:
    """Return text with the tables between their markers; a marker without results stays empty."""

    def replace(match: re.Match[str]) -> str:
        body = tables.get(match["name"], "Not measured yet.\n")
        return f"{match[1]}{body}{match[3]}"

    return MARKER.sub(replace, text)


def all_tables(repo: Path = REPO) -> dict[str, str]:
    """Return the table of each results file by benchmark name."""
    tables = {}
    for path in sorted((repo / RESULTS.relative_to(REPO)).glob("*.json")):
        paths = code_paths(repo / "benchmarks" / f"{path.stem}.py")
        rows = read_rows(path)
        tables[path.stem] = table(rows, paths, repo)
        with_target = [row for row in rows if row.target is not None]
        if with_target:
            tables[f"{path.stem}.targets"] = table(with_target, paths, repo)
    return tables


def documents(repo: Path = REPO) -> list[Path]:
    """Return the files that may hold markers."""
    return [repo / "README.md", *sorted((repo / "docs").rglob("*.md"))]


def main(argv: list[str] | None = None, repo: Path = REPO) -> int:
    """Rewrite or check the documents; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a table is out of date")
    check = parser.parse_args(argv).check
    tables = all_tables(repo)
    outdated = []
    for path in documents(repo):
        text = path.read_text()
        filled = fill(text, tables)
        if filled != text:
            outdated.append(path)
            if not check:
                path.write_text(filled)
    if not check:
        for path in sorted((repo / RESULTS.relative_to(REPO)).glob("*.json")):
            rows = read_rows(path)
            lines = _plots.speed_plots(path.stem, rows, path.parent)
            for plot in [*lines, *_plots.bar_plots(path.stem, rows, path.parent)]:
                print(f"drawn: {plot.relative_to(repo)}")
    for path in outdated:
        print(("out of date: " if check else "rewritten: ") + str(path.relative_to(repo)))
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())

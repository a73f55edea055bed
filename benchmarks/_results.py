"""Rows of figures: what was measured, on what, at which commit, against which target.

    results = Results("copy_engine")
    results.add("restore 24 KiB slices", 51.2, "GB/s", better="higher", target=46.0)
    results.write(args.out)          # DIR/copy_engine.json, an array of rows

The commit is the checkout's; machines that run from an archive without .git set
ADP_KV_COMMIT. A checkout with changes adds "-dirty", which the report marks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"
DIRTY = "-dirty"
UNKNOWN_COMMIT = "unknown"
_DISTRIBUTIONS = (
    "numpy",
    "torch",
    "triton",
    "vllm",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        metric: what was measured, unique within its benchmark.
        value: the figure.
        unit: its unit, such as "GB/s" (10^9), "µs" or "tokens".
        better: whether "higher" or "lower" is better.
        target: what it should reach; None if there is no target.
        baseline: the same figure of what we compare with; None if there is none.
        gpu: device name, or the CPU's where there is no GPU.
        commit: of the code that was measured.
        versions: distribution → version, of what bears on the figure.
        date: ISO 8601, UTC, to the second.
    """

    metric: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    target: float | None
    baseline: float | None
    gpu: str
    commit: str
    versions: dict[str, str]
    date: str

    @property
    def misses_target(self) -> bool:
        """Whether there is a target and the value does not reach it."""
        if self.target is None:
            return False
        return self.value < self.target if self.better == "higher" else self.value > self.target


class Results:
    """The rows of one benchmark, all with the same machine, commit and time.

    Args:
        name: the benchmark's module name without package; also the file's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[Row] = []
        self._gpu = device_name()
        self._commit = current_commit()
        self._versions = versions()
        self._date = datetime.now(UTC).replace(microsecond=0).isoformat()

    def add(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        better: Literal["higher", "lower"],
        target: float | None = None,
        baseline: float | None = None,
    ) -> Row:
        """Add a row, print it and return it; ValueError if the metric is there already."""
        if any(row.metric == metric for row in self.rows):
            raise ValueError(f"metric {metric!r} twice in {self.name}")
        machine = (self._gpu, self._commit, self._versions, self._date)
        row = Row(metric, value, unit, better, target, baseline, *machine)
        self.rows.append(row)
        missed = f"  (misses {target:g})" if row.misses_target else ""
        print(f"{self.name}: {metric}: {value:.4g} {unit}{missed}", flush=True)
        return row

    def write(self, folder: Path | None = None) -> Path:
        """Write FOLDER/<name>.json (benchmarks/results by default) and return its path."""
        folder = RESULTS if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        rows = [asdict(row) for row in self.rows]
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        return path


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a results file.

    Raises:
        ValueError: It is no array of rows; the message names the file.
    """
    try:
        return [Row(**row) for row in json.loads(path.read_text())]
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows --out, which every benchmark takes."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the JSON file [benchmarks/results]")
    return parser


def git(*args: str, cwd: Path = REPO) -> str | None:
    """Return the output of a git command, or None where it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", *args], cwd=cwd, capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def current_commit() -> str:
    """Return ADP_KV_COMMIT, else the checkout's commit, "-dirty" if it has changes in code."""
    given = os.environ.get("ADP_KV_COMMIT")
    if given:
        return given
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return UNKNOWN_COMMIT
    changed = git("status", "--porcelain", "--", "*.py")
    return commit + (DIRTY if changed else "")


def device_name() -> str:
    """Return the GPUs' name, "2x " before it if there are two, else the CPU's."""
    query: Sequence[str] = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return _cpu_name()
    names = done.stdout.split("\n")[:-1]
    if not names:
        return _cpu_name()
    return names[0] if len(names) == 1 else f"{len(names)}x {names[0]}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {models[0] if models else platform.machine()} ({os.cpu_count()} cores)"


def versions() -> dict[str, str]:
    """Return the versions of what bears on a figure, as far as it is installed."""
    kernel = platform.release().split("-")[0]
    found: dict[str, Any] = {"python": platform.python_version(), "linux": kernel}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found

"""What the commands have in common: rows for a terminal or JSON, and progress while they wait.

Threads: one. Results go to stdout, progress to stderr and only where that is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

BAR_CHARACTERS = 24


def show_json(result: object) -> None:
    """Write a result as JSON."""
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def show_rows(rows: Sequence[Sequence[object]]) -> None:
    """Write rows as columns; the last one is not padded."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]) - 1)] if texts else []
    for row in texts:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*padded, row[-1]]).rstrip() + "\n")


def show_facts(facts: Mapping[str, object]) -> None:
    """Write names and values, one a line."""
    show_rows([(name.replace("_", " "), value) for name, value in facts.items()])


class Progress:
    """A bar on stderr; nothing where that is no terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()

    def step(self, done: float, note: str = "") -> None:
        """Show how much is done, 0 to 1."""
        if not self._shown:
            return
        full = int(min(max(done, 0.0), 1.0) * BAR_CHARACTERS)
        bar = "#" * full + "." * (BAR_CHARACTERS - full)
        sys.stderr.write(f"\r{self._what} [{bar}] {note:<30}")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the bar away."""
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

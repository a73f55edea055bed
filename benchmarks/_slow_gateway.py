"""A gateway whose card reads no faster than a file says, in bytes a second; empty: as it can.

Run as `python -m benchmarks._slow_gateway`; arguments as for `python -m gateway`. A batch is
answered when a device of that speed, which serves one batch after the other, would be done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import gateway.__main__ as program
from gateway.cards.base import Batch, Card, Op
from gateway.cards.faulty import FaultyCard
from gateway.cards.registry import create_card

SPEED_FILE = "ADP_BENCH_SPEED_FILE"


class SlowCard(FaultyCard):
    """A card whose reads are answered late."""

    def __init__(self, inner: Card, speed_file: Path) -> None:
        super().__init__(inner)
        self._speed_file = speed_file
        self._free_at = 0.0

    def _decide(self, batch: Batch):
        verdict = super()._decide(batch)
        if batch.op is Op.READ and batch.lengths is not None:
            verdict.delay_s = self._delay_s(int(batch.lengths.sum()))
        return verdict

    def _delay_s(self, num_bytes: int) -> float:
        text = self._speed_file.read_text().strip() if self._speed_file.exists() else ""
        if not text:
            return 0.0
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + num_bytes / float(text)
        return self._free_at - now


def main() -> int:
    """Run the gateway with its card wrapped."""
    speed_file = Path(os.environ[SPEED_FILE])

    def create(kind: str, settings: Mapping[str, object]) -> Card:
        return SlowCard(create_card(kind, settings), speed_file)

    program.create_card = create  # imported there by name
    return program.main()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gateway.bench`: how fast a card takes values and gives them back, as JSON.

Takes the flags of adp-gateway that concern a card, and --seconds and --value-bytes. What is
written is deleted again. Writing ends early when the card is full.

    write new keys for some seconds ─► read them for as long ─► delete them

Threads: the main one submits and waits; the card answers from its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import queue
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import AdpError, CardError
from adp_kv.units import align_up
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Batch, Card, Op, StatusArray
from gateway.cards.registry import create_card
from gateway.config import load

VALUES_A_BATCH = 32
LANES = 8
WAIT_S = 60.0


@dataclass(slots=True)
class Tally:
    """What one phase did.

    Attributes:
        whole: keys of batches without a failed value.
    """

    num_bytes: int = 0
    failed: int = 0
    seconds: float = 0.0
    durations: list[float] = field(default_factory=list)
    whole: list[KeyArray] = field(default_factory=list)

    def told(self) -> dict[str, float]:
        """Return rates and percentiles."""
        took = np.array(self.durations or [0.0])
        return {
            "gb_s": round(self.num_bytes / max(self.seconds, 1e-9) / 1e9, 3),
            "batch_p50_ms": round(float(np.percentile(took, 50)) * 1e3, 3),
            "batch_p99_ms": round(float(np.percentile(took, 99)) * 1e3, 3),
            "failed_values": self.failed,
        }


class CardBench:
    """Writes, reads and deletes values of one size; the card is opened and closed here.

    Args:
        card: not open yet.
        value_bytes: of every value.
        seconds: of each phase.

    Raises:
        CardError: It can't be opened, or takes no value of that size.
    """

    def __init__(self, card: Card, value_bytes: int, seconds: float) -> None:
        self._card = card
        self._bytes = value_bytes
        self._seconds = seconds
        self._done: queue.Queue[tuple[int, StatusArray]] = queue.Queue()
        if value_bytes > card.limits.max_value_bytes:
            raise CardError(
                f"--value-bytes {value_bytes}: the card takes {card.limits.max_value_bytes}"
            )
        stride = align_up(value_bytes, 4096)
        self._memory = mmap.mmap(-1, stride * VALUES_A_BATCH * LANES)
        view: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, stride, dtype=np.uint8)
        for start in range(0, len(view), stride):
            view[start : start + stride] = noise
        first = view.ctypes.data + stride * np.arange(VALUES_A_BATCH * LANES, dtype=np.uint64)
        self._lanes = first.astype(np.uint64).reshape(LANES, VALUES_A_BATCH)
        card.open(lambda token, status: self._done.put((token, status)))
        card.register(view.ctypes.data, len(view))

    def run(self) -> dict[str, object]:
        """Return what was measured, and delete what was written."""
        written: list[KeyArray] = []
        rng = np.random.default_rng()

        def fresh() -> Iterator[KeyArray]:
            while True:
                written.append(rng.integers(0, 2**64, (VALUES_A_BATCH, 2), dtype=np.uint64))
                yield written[-1]

        try:
            wrote = self._phase(Op.WRITE, fresh(), self._seconds)
            if not wrote.whole:
                raise CardError("the card took no value: is it full?")
            read = self._phase(Op.READ, cycle(wrote.whole), min(self._seconds, wrote.seconds + 1))
        finally:
            self._phase(Op.DELETE, iter(written), None)
            self._card.unregister()
            self._card.close()
        return {
            "value_bytes": self._bytes,
            "num_databases": self._card.limits.num_databases,
            "write": wrote.told(),
            "read": read.told(),
        }

    def _phase(self, op: Op, keys: Iterator[KeyArray], seconds: float | None) -> Tally:
        """Keep LANES batches in flight until the time is over, or the keys are."""
        tally, began = Tally(), time.monotonic()
        free, under_way = deque(range(LANES)), dict[int, tuple[KeyArray, float]]()
        more = True
        while more or under_way:
            full = op is Op.WRITE and tally.failed > 0
            more = more and not full and (seconds is None or time.monotonic() < began + seconds)
            batch_keys = next(keys, None) if more and free else None
            if more and free and batch_keys is None:
                more = False
            if batch_keys is not None:
                lane = free.popleft()
                under_way[lane] = (batch_keys, time.monotonic())
                self._card.submit(self._batch(op, lane, batch_keys))
            elif under_way:
                self._take(tally, free, under_way)
        tally.seconds = time.monotonic() - began
        return tally

    def _take(
        self, tally: Tally, free: deque[int], under_way: dict[int, tuple[KeyArray, float]]
    ) -> None:
        try:
            lane, status = self._done.get(timeout=WAIT_S)
        except queue.Empty as error:
            raise CardError(f"the card did not answer for {WAIT_S:g} s") from error
        keys, since = under_way.pop(lane)
        free.append(lane)
        bad = int(np.count_nonzero(status))
        tally.failed += bad
        if not bad:
            tally.whole.append(keys)
        tally.num_bytes += (len(keys) - bad) * self._bytes
        tally.durations.append(time.monotonic() - since)

    def _batch(self, op: Op, lane: int, keys: KeyArray) -> Batch:
        moves = op in (Op.READ, Op.WRITE)
        lengths = np.full(len(keys), self._bytes, dtype=np.uint32)
        return Batch(
            op=op,
            token=lane,
            databases=(keys[:, 0] % np.uint64(self._card.limits.num_databases)).astype(np.uint16),
            keys=keys,
            addresses=self._lanes[lane] if moves else None,
            lengths=lengths if moves else None,
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure and write JSON; return 2 if it can't."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--value-bytes", type=int, default=0)
    own, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    try:
        settings = load(rest)
        card = create_card(settings.card, settings.card_options)
        longest = min(settings.effective_fragment_size, card.limits.max_value_bytes)
        result = CardBench(card, own.value_bytes or longest, own.seconds).run()
    except AdpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps({"card": settings.card} | result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

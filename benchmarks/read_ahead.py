"""What reading ahead gains while a request waits in the queue, from a card of one SSD's speed.

python -m benchmarks.read_ahead [--out DIR] [--quick]

A real gateway with a memory card that reads at 2 GB/s and a real rank client whose mover moves
nothing. The scheduler side says what will be restored; the request's gets follow after the
time it waits in the queue. Rows: from the gets to the first and to the last layer's pages
in the ring, without and with reading ahead. Runs without a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from adp_kv.sdk.lookup import LookupClient
from adp_kv.units import MiB
from benchmarks._results import Results, argument_parser
from benchmarks._slow_gateway import SPEED_FILE
from benchmarks.control_path import Case, Rig
from gateway.config import Settings

CODE = ("gateway", "adp_kv/sdk", "adp_kv/connector/read_ahead.py")
CARD_BYTES_S = 2e9
CASE = Case("read_ahead", 8, 32, MiB, 16)
QUICK_CASE = Case("read_ahead", 4, 4, MiB, 16)
WAITS_MS = (0, 50, 200)


def measure(case: Case, ahead_bytes: int, waits_ms: Sequence[int], repeats: int, folder: Path):
    """Return wait → (seconds to the first layer, to the last), medians."""
    speed = folder / "speed"
    speed.write_text("")
    rig = Rig(
        case,
        32 * MiB,
        case.object_bytes,
        num_slots=2 * case.num_chunks * case.num_layers,
        program="benchmarks._slow_gateway",
        env={SPEED_FILE: str(speed)},
        read_ahead_bytes=ahead_bytes,
    )
    scheduler = LookupClient(rig.hello(-1, []), rig.gateway.address, 10.0, 10.0)
    scheduler.start()
    try:
        assert scheduler.wait_settled(), scheduler.off_reason
        rig.store()
        speed.write_text(f"{CARD_BYTES_S:g}")
        found = {}
        number = 2
        for wait_ms in waits_ms:
            runs = []
            for _ in range(repeats):
                told = scheduler.read_ahead(rig.chunks, 0)
                time.sleep(wait_ms / 1e3)  # what is measured: the wait in vLLM's queue
                layers = rig.restore(number)
                runs.append((layers[0], layers[-1]))
                scheduler.forget(told)
                number += 1
            found[wait_ms] = tuple(statistics.median(column) for column in zip(*runs, strict=True))
        return found
    finally:
        rig.client.close()
        scheduler.close()
        rig.close()


def run(results: Results, case: Case, waits_ms: Sequence[int], repeats: int) -> None:
    """Measure without and with reading ahead and add the rows."""
    with tempfile.TemporaryDirectory(prefix="adp-bench-") as folder:
        without = measure(case, 0, waits_ms, repeats, Path(folder))
        ahead = measure(case, Settings().read_ahead_bytes, waits_ms, repeats, Path(folder))
    for wait_ms in waits_ms:
        for i, layer in enumerate(("first_layer", "last_layer")):
            prefix = f"read_ahead.wait{wait_ms}ms.{layer}"
            value, baseline = ahead[wait_ms][i] * 1e3, without[wait_ms][i] * 1e3
            results.add(prefix, value, "ms", better="lower", baseline=baseline)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="little data, one repeat")
    given = parser.parse_args(argv)
    results = Results("read_ahead")
    if given.quick:
        run(results, QUICK_CASE, (20,), 1)
    else:
        run(results, CASE, WAITS_MS, 5)
    results.write(given.out)


if __name__ == "__main__":
    main()

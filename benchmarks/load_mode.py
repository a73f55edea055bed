"""What a restore costs the one that waits for it and the others, layer by layer or beside them.

python -m benchmarks.load_mode [--out DIR] [--quick]

Two engines of the 8B Llama shape, load_mode layerwise and async, each with a gateway whose memory
card runs as fast as it can or at the speed of one SSD. While 16 requests decode (full CUDA
graphs), one more comes whose prompt is restored: 0.1, 1 and 8 GB. Rows: time to its first
token, the others' time between tokens meanwhile (mean and longest), beside what it was before.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from adp_kv.units import MiB
from benchmarks import _engines
from benchmarks._engines import MEMORY, Contender, Field, Setup, Shape
from benchmarks._results import Results, argument_parser
from benchmarks._slow_gateway import SPEED_FILE
from gateway.config import parse_size
from tests.support.device import find_device

CODE = ("adp_kv/connector", "adp_kv/sdk", "adp_kv/transfer", "gateway")
MODES = ("layerwise", "async")
SLOW_BYTES_S = 2e9
NUM_OTHERS = 16
OTHERS_TOKENS = 256
STEPS = 24
RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """A restore: how many chunks of the shape's prompt."""

    name: str
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Load:
    """What runs beside a restore: how many decode, and tokens of each before and after it."""

    num_others: int
    steps: int


FULL, QUICK = Load(NUM_OTHERS, STEPS), Load(2, 6)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds: to the first token, between the others' tokens before, and meanwhile."""

    first_token_s: float
    before_s: float
    mean_s: float
    longest_s: float


class Mode(Contender):
    """An engine in one load mode, whose card can be slowed down."""

    engine_program = "benchmarks._engine_child"

    def __init__(
        self, mode: str, shape: Shape, setup: Setup, sizes: Sequence[Size], load: Load
    ) -> None:
        self._speed_file = setup.folder / f"{mode}.speed"
        setup = replace(setup, connector=dict(setup.connector) | {"load_mode": mode})
        arguments: dict[str, Any] = {"max_num_seqs": 2 * load.num_others}
        if not setup.eager:
            arguments["compilation_config"] = _engines.GRAPHS
        super().__init__(MEMORY, shape, setup, arguments)
        self.mode, self.sizes, self.load = mode, sizes, load
        self.name = f"{shape.name}.{mode}"
        self.gateway_program = {
            "program": "benchmarks._slow_gateway",
            "env": {SPEED_FILE: str(self._speed_file)},
        }

    def set_speed(self, bytes_s: float | None) -> None:
        """Set how fast the card reads; None: as fast as it can."""
        self._speed_file.write_text("" if bytes_s is None else f"{bytes_s:g}")

    def prompt_of(self, size: Size) -> list[int]:
        """Return a prompt of which so many chunks are stored: the start of the long one."""
        return self.prompt[: size.num_chunks * self.shape.chunk + self.shape.tail]

    def run_beside(self, size: Size) -> Outcome:
        """Restore one prompt while others decode."""
        self.forget()
        vocab = self.shape.config["vocab_size"]
        numbers = range(self.load.num_others)
        others = [_engines.random_prompt(i + 7, OTHERS_TOKENS, vocab) for i in numbers]
        steps, prompt = self.load.steps, self.prompt_of(size)
        request = {"op": "beside", "others": others, "prompt": prompt, "steps": steps}
        reply = self.engine.call(request, RUN_TIMEOUT_S)
        if (reply["cached"] or 0) < size.num_chunks * self.shape.chunk:
            raise AssertionError(f"{self.name}: only {reply['cached']} tokens were restored")
        return outcome(reply, steps)


def outcome(reply: dict[str, Any], steps: int = STEPS) -> Outcome:
    """Return what a reply of the engine's child says after so many steps of the others."""
    added, first = reply["added_s"], reply["first_token_s"]
    gaps = list(itertools.pairwise(reply["times"]))
    before = [b - a for a, b in gaps if b <= added]
    # Those that overlap the wait: the one in which the token came as well.
    during = [b - a for a, b in gaps if b > added and a < first]
    return Outcome(
        first_token_s=first - added,
        before_s=statistics.median(before[-steps // 2 :]),
        mean_s=statistics.mean(during),
        longest_s=max(during),
    )


def measure(modes: Field, sizes: Sequence[Size], repeats: int, results: Results) -> None:
    """Restore every size from both cards in both modes, in turn, and add rows."""
    for speed_name, speed in (("fast", None), ("slow", SLOW_BYTES_S)):
        for mode in modes.contenders:
            mode.set_speed(speed)
        for size in sizes:
            outcomes: dict[str, list[Outcome]] = {}
            for _ in range(repeats + 1):
                for mode in list(modes.contenders):
                    done = modes.attempt(mode, partial(mode.run_beside, size))
                    outcomes.setdefault(mode.mode, []).append(done)
            for mode in modes.contenders:
                warm = outcomes[mode.mode][1:]
                add_rows(results, f"load_mode.{speed_name}.{size.name}.{mode.mode}", warm)


def add_rows(results: Results, prefix: str, found: Sequence[Outcome]) -> None:
    """Add the medians."""

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in found) * 1e3

    before = median("before_s")
    results.add(f"{prefix}.first_token", median("first_token_s"), "ms", better="lower")
    for name, field in (("others.mean", "mean_s"), ("others.longest", "longest_s")):
        value = median(field)
        results.add(f"{prefix}.{name}", value, "ms a token", better="lower", baseline=before)


def all_sizes(shape: Shape) -> list[Size]:
    """Return restores of about 0.1 GB, 1 GB and everything."""
    per_chunk = shape.total_bytes / shape.num_chunks
    sizes = [Size(name, max(1, round(n / per_chunk))) for name, n in (("0.1GB", 1e8), ("1GB", 1e9))]
    return [*sizes, Size("8GB", shape.num_chunks)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; status 1 if an engine failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs for decode")
    parser.add_argument("--ring", default="6GiB", help="shared_memory_size")
    given = parser.parse_args(argv)
    device = find_device()
    shape = _engines.shape("8b", "llama-8b", 60_000)
    if given.quick:
        shape = _engines.tiny_shape("8b", "llama", 4, device)
    sizes = [Size("8GB", shape.num_chunks)] if given.quick else all_sizes(shape)
    ring = 64 * MiB if given.quick else parse_size(given.ring, "--ring")
    results = Results("load_mode")
    with _engines.work_folder(None) as folder:
        setup = Setup(
            device=device,
            folder=folder,
            eager=given.eager or device == "cpu",
            separate_core=not given.quick,
            gateway={"shared_memory_size": _engines.ring_bytes(ring, 2)},
            extra_tokens=NUM_OTHERS * (OTHERS_TOKENS + 4096),
        )
        _engines.write_models(folder, [shape])
        load = QUICK if given.quick else FULL
        contenders = [Mode(mode, shape, setup, sizes, load) for mode in MODES]
        with Field(contenders, together=device == "cuda") as running:
            measure(running, sizes, 1 if given.quick else given.repeats, results)
            failed = running.failed
    return _engines.finish(results, given.out, failed)


if __name__ == "__main__":
    sys.exit(main())

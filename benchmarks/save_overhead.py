"""What saving costs: prefill and decode with saving on against saving off.

python -m benchmarks.save_overhead [--out DIR] [--quick]

Two engines of the 8B Llama shape, one without a connector, one that saves to the memory card, both
with full CUDA graphs for decode. Prefill: prompts of 16,000 tokens, one a step, all of them
new; decode: 32 sequences whose chunks become full at different steps, so that deferred writes
go out all the time. A decode step is timed from when all sequences decode; the whole batch, with
the steps that admit the sequences one by one, has rows of its own. Engines take turns; a round's
overhead is its time against the other's in the same round.
"""

from __future__ import annotations

import statistics
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from adp_kv.units import MiB
from benchmarks import _engines
from benchmarks._engines import MEMORY, PLAIN, Contender, Field, Setup, Shape
from benchmarks._results import Results, argument_parser
from gateway.config import parse_size
from tests.support.device import find_device

CODE = ("adp_kv/connector", "adp_kv/sdk", "adp_kv/transfer", "adp_kv/kernels", "gateway")
PREFILL_TARGET = 3.0
DECODE_TARGET = 1.0
RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one round, all new: their number and length, and tokens to decode.

    Attributes:
        stagger: the i-th prompt is so many tokens times i longer.
    """

    name: str
    num_prompts: int
    num_tokens: int
    stagger: int
    max_tokens: int
    target: float

    def prompts(self, round_number: int, vocab: int) -> list[list[int]]:
        """Return the prompts of a round."""
        return [
            _engines.random_prompt(
                zlib.crc32(f"{self.name} {round_number} {i}".encode()),
                self.num_tokens + i * self.stagger,
                vocab,
            )
            for i in range(self.num_prompts)
        ]

    def chunks(self, chunk: int) -> int:
        """Return how many chunks a round fills."""
        lengths = (self.num_tokens + i * self.stagger for i in range(self.num_prompts))
        return sum((n + self.max_tokens - 1) // chunk for n in lengths)


PREFILL = Load("prefill", 2, 16_000, 0, 1, PREFILL_TARGET)
DECODE = Load("decode", 32, 64, 8, 512, DECODE_TARGET)
QUICK = (
    replace(PREFILL, num_tokens=600),
    replace(DECODE, num_prompts=4, num_tokens=200, max_tokens=80),
)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a round: until its last token, and a step while all sequences decode."""

    batch_s: float
    step_s: float


def one_round(contender: Contender, load: Load, round_number: int) -> Round:
    """Run a round's prompts as one batch."""
    prompts = load.prompts(round_number, contender.shape.config["vocab_size"])
    done = contender.engine.generate(prompts, max_tokens=load.max_tokens, timeout_s=RUN_TIMEOUT_S)
    batch_s = contender.engine.elapsed_s
    if load.max_tokens == 1:
        return Round(batch_s, batch_s / load.num_prompts)
    # The sequence that was admitted last gets a token a step, and so do all others beside it.
    first_s, last_s = max((one.first_token_s or 0.0, one.last_token_s or 0.0) for one in done)
    assert first_s > 0, "vLLM tells no times: disable_log_stats"
    return Round(batch_s, (last_s - first_s) / (load.max_tokens - 1))


def measure(running: Field, load: Load, repeats: int) -> dict[str, list[Round]]:
    """Return the rounds by kind of engine; what saves must have saved everything."""
    times: dict[str, list[Round]] = {}
    for round_number in range(repeats + 1):  # the first one warms up
        order = list(running.contenders)
        for contender in order if round_number % 2 else reversed(order):
            took = running.attempt(contender, partial(one_round, contender, load, round_number))
            if round_number and took is not None:
                times.setdefault(contender.kind, []).append(took)
            if took is not None:
                running.attempt(contender, partial(settle, contender, load, round_number + 1))
    return times


def settle(contender: Contender, load: Load, rounds: int) -> None:
    """Wait until all rounds so far are stored: the next one must find an idle gateway.

    Raises:
        ChildError: They were not: something was dropped.
    """
    if contender.kind == MEMORY:
        contender.wait_committed(rounds * load.chunks(contender.shape.chunk))


def add_rows(results: Results, load: Load, times: dict[str, list[Round]]) -> None:
    """Add one load's rows."""
    off, on = times[PLAIN], times[MEMORY]
    prefix = f"save.{load.name}"
    for name, found in (("off", off), ("on", on)):
        value = statistics.median(one.step_s for one in found) * 1e3
        results.add(f"{prefix}.{name}", value, "ms a step", better="lower")
    overheads = [(a.step_s / b.step_s - 1) * 100 for a, b in zip(on, off, strict=True)]
    value = statistics.median(overheads)
    results.add(f"{prefix}.overhead_pct", value, "%", better="lower", target=load.target)
    results.add(f"{prefix}.overhead_pct.max", max(overheads), "%", better="lower")
    if load.max_tokens > 1:
        for name, found in (("off", off), ("on", on)):
            value = statistics.median(one.batch_s for one in found) * 1e3
            results.add(f"{prefix}.batch.{name}", value, "ms", better="lower")
        overheads = [(a.batch_s / b.batch_s - 1) * 100 for a, b in zip(on, off, strict=True)]
        value = statistics.median(overheads)
        results.add(f"{prefix}.batch.overhead_pct", value, "%", better="lower")


def room_for(loads: Sequence[Load], shape: Shape, repeats: int) -> int:
    """Return bytes of a card that holds every round."""
    chunks = sum(load.chunks(shape.chunk) for load in loads) * (repeats + 1)
    return (chunks + 16) * shape.object_bytes * shape.num_layers


def contenders_for(
    loads: Sequence[Load], shape: Shape, setup: Setup, repeats: int
) -> list[Contender]:
    """Return the two engines."""
    card = {MEMORY: {"capacity_bytes": room_for(loads, shape, repeats)}}
    longest = max(n.num_tokens + n.num_prompts * n.stagger + n.max_tokens for n in loads)
    arguments = {"max_num_seqs": max(load.num_prompts for load in loads)}
    arguments["max_model_len"] = longest + 16
    if setup.device == "cuda":
        arguments |= {"enforce_eager": False, "compilation_config": _engines.GRAPHS}
    # Both may hit nothing: every prompt is new, and what is left of the last round goes.
    setup = replace(setup, card=card)
    return [Contender(kind, shape, setup, arguments) for kind in (PLAIN, MEMORY)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; status 1 if an engine failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two repeats")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ring", default="6GiB", help="shared_memory_size")
    given = parser.parse_args(argv)
    device = find_device()
    repeats = 2 if given.quick else given.repeats
    loads = QUICK if given.quick else (PREFILL, DECODE)
    shape = _engines.shape("save", "llama-8b", 33_000)
    if given.quick:
        shape = _engines.tiny_shape("save", "llama", 6, device)
    ring = 64 * MiB if given.quick else parse_size(given.ring, "--ring")
    results = Results("save_overhead")
    with _engines.work_folder(None) as folder:
        setup = Setup(
            device=device,
            folder=folder,
            separate_core=not given.quick,
            gateway={"shared_memory_size": _engines.ring_bytes(ring, 1)},
        )
        _engines.write_models(folder, [shape])
        contenders = contenders_for(loads, shape, setup, repeats)
        with Field(contenders, together=device == "cuda", prime=False) as running:
            for load in loads:
                for contender in running.contenders:
                    contender.note_committed()
                times = measure(running, load, repeats)
                if not running.failed:
                    add_rows(results, load, times)
            failed = running.failed
    return _engines.finish(results, given.out, failed)


if __name__ == "__main__":
    sys.exit(main())

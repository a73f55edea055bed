"""Time to the first token of a long prompt that was computed before, by everyone's way.

python -m benchmarks.restore [--out DIR] [--only 60k] [--repeats 5] [--quick]

60k: the attention shape of an 8B Llama, 60,000 tokens: recomputed, hit in the GPU's own cache,
restored by vLLM's OffloadingConnector (and LMCache where it can be imported), and by
adp_kv from the memory card and from the slab card. 196k: the latent cache of
DeepSeek-V3, 196,000 tokens in 61 layers, from the memory card. All engines start together
and are idle but for the one that is timed; rounds go through the contenders in turn.
--quick: tiny models, two repeats; on a machine without CUDA that is a dry run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from adp_kv.units import GiB, MiB
from benchmarks import _engines
from benchmarks._engines import (
    ADP,
    LMCACHE,
    MEMORY,
    OFFLOADING,
    PLAIN,
    SLAB,
    Contender,
    Field,
    Setup,
    Shape,
)
from benchmarks._results import Results, argument_parser
from gateway.config import parse_size
from tests.support.device import find_device

CODE = ("adp_kv", "gateway")
OVER_LINK_TARGET = 1.10
LINK_REPEATS = 5


@dataclass(slots=True)
class Times:
    """Seconds to the first token, a value a round.

    Attributes:
        same_tokens: whether a restored prompt led to those of the GPU's own cache.
        stages: seconds after which a restore of ours passed each stage, a value a round.
        counted: what our gateway counted during the rounds; cpu: what it used.
    """

    first_token_s: list[float] = field(default_factory=list)
    hit_s: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    same_tokens: bool = False
    cpu: _engines.Usage | None = None

    @property
    def median_s(self) -> float:
        """The median round."""
        return statistics.median(self.first_token_s)


def measure(field_: Field, repeats: int) -> dict[str, Times]:
    """Run rounds; return times by contender's name."""
    times = {c.name: Times() for c in field_.contenders}
    for contender in list(field_.contenders):
        if contender.kind != PLAIN:
            same = field_.attempt(contender, contender.restores_same_tokens)
            times[contender.name].same_tokens = bool(same)
        if contender.kind in ADP:
            field_.attempt(contender, partial(contender.engine.rpc, "adp_watch"))
    for round_number in range(repeats):
        order = list(field_.contenders)
        turn = round_number % max(1, len(order))
        for contender in order[turn:] + order[:turn]:
            field_.attempt(contender, partial(_one_round, contender, times[contender.name]))
    for contender in list(field_.contenders):
        if contender.kind == MEMORY:
            field_.attempt(contender, contender.check_zeros_are_seen)
    return {c.name: times[c.name] for c in field_.contenders}


def _one_round(contender: Contender, times: Times) -> None:
    gateway = contender.gateway
    contender.forget()
    before = gateway.counters() if gateway else {}
    cpu = _engines.cpu_usage(gateway.child.pid) if gateway else None
    seconds = contender.first_token_s(forget=False)
    if contender.kind == PLAIN:
        times.hit_s.append(contender.first_token_s(forget=False))
    elif contender.cached < contender.shape.hit_tokens:
        raise AssertionError(f"{contender.name}: only {contender.cached} tokens were restored")
    times.first_token_s.append(seconds)
    if gateway is None or cpu is None:
        return
    used = _engines.cpu_usage(gateway.child.pid).since(cpu)
    (timeline,) = contender.engine.rpc("adp_timeline")
    for stage, at in timeline.items():
        times.stages.setdefault(stage, []).append(at - contender.engine.began_s)
    times.cpu = used if times.cpu is None else times.cpu.plus(used)
    for name, value in gateway.counters().items():
        times.counted[name] = times.counted.get(name, 0) + value - before.get(name, 0)


def add_rows(results: Results, shape: Shape, times: dict[str, Times], link: float) -> None:
    """Add one shape's rows.

    Args:
        results: where they go.
        shape: what was restored.
        times: by contender's name.
        link: GB/s of a contiguous copy in the same run.
    """
    prefix = f"restore.{shape.name}"
    at_link_s = shape.total_bytes / (link * 1e9)
    results.add(f"{prefix}.bytes", shape.total_bytes / 1e9, "GB", better="lower")
    results.add(f"{prefix}.at_link", at_link_s * 1e3, "ms", better="lower")
    by_kind = {name.removeprefix(f"{shape.name}."): t for name, t in times.items()}
    plain, theirs = by_kind.pop(PLAIN, None), by_kind.get(OFFLOADING)
    if plain is not None:
        results.add(f"{prefix}.recomputed", plain.median_s * 1e3, "ms", better="lower")
        hit = statistics.median(plain.hit_s)
        results.add(f"{prefix}.gpu_cache", hit * 1e3, "ms", better="lower")
    baseline = theirs.median_s if theirs else None
    for kind, one in by_kind.items():
        _add_restored(results, f"{prefix}.{kind}", one, at_link_s, link, baseline)
        same = float(one.same_tokens)
        results.add(f"{prefix}.{kind}.same_tokens", same, "of 1", better="higher", target=1.0)
        if plain is not None:
            # What a restore adds to an answer from the GPU's own cache.
            added = (one.median_s - statistics.median(plain.hit_s)) / at_link_s
            results.add(f"{prefix}.{kind}.added_over_link", added, "x", better="lower")
        if theirs is not None and kind in ADP:
            pairs = zip(one.first_token_s, theirs.first_token_s, strict=False)
            worst = max(ours / other for ours, other in pairs)
            target = 1.0 if kind == MEMORY else None
            metric = f"{prefix}.{kind}.over_offloading"
            results.add(metric, worst, "x", better="lower", target=target)
        if one.cpu is not None:
            _add_gateway(results, f"{prefix}.{kind}", one)


def _add_restored(
    results: Results,
    prefix: str,
    one: Times,
    at_link_s: float,
    link: float,
    baseline_s: float | None,
) -> None:
    seconds = one.median_s
    results.add(f"{prefix}.first_token", seconds * 1e3, "ms", better="lower")
    results.add(f"{prefix}.first_token.max", max(one.first_token_s) * 1e3, "ms", better="lower")
    results.add(f"{prefix}.speed", at_link_s / seconds * link, "GB/s", better="higher")
    results.add(f"{prefix}.link_share", at_link_s / seconds, "of the link", better="higher")
    target = OVER_LINK_TARGET if prefix.endswith(f"60k.{MEMORY}") else None
    results.add(
        f"{prefix}.over_link", seconds / at_link_s, "x", better="lower", target=target,
        baseline=None if baseline_s is None else baseline_s / at_link_s,
    )  # fmt: skip


def _add_gateway(results: Results, prefix: str, one: Times) -> None:
    """Add what a restore cost the gateway."""
    assert one.cpu is not None
    for stage, seconds in one.stages.items():
        value = statistics.median(seconds) * 1e3
        results.add(f"{prefix}.stage.{stage}", value, "ms", better="lower")
    runs, counted = len(one.first_token_s), one.counted
    objects = max(1, counted.get("objects_read", 0))
    results.add(f"{prefix}.requests", counted.get("gets", 0) / runs, "requests", better="lower")
    results.add(f"{prefix}.objects", objects / runs, "objects", better="lower")
    results.add(f"{prefix}.grants", counted.get("get_grants", 0) / runs, "grants", better="lower")
    for name, seconds in (("main_thread", one.cpu.main_s), ("cpu", one.cpu.all_s)):
        per = seconds / objects * 1e6
        results.add(f"{prefix}.gateway.{name}", per, "µs an object", better="lower")


def run(setup: Setup, shapes: Sequence[Shape], repeats: int, results: Results) -> dict[str, str]:
    """Measure every shape and add its rows; return what failed."""
    _engines.write_models(setup.folder, shapes)
    contenders = [
        Contender(kind, one, setup) for one in shapes for kind in kinds_of(one, setup.device)
    ]
    failed: dict[str, str] = {}
    for wave in waves(contenders):
        with Field(wave, together=setup.device == "cuda") as running:
            if not running.contenders:
                return failed | running.failed
            link = link_speed(running, setup.device)
            if results.rows:
                results.add("restore.link.again", link, "GB/s", better="higher")
            else:
                results.add("restore.link", link, "GB/s", better="higher")
            for one in dict.fromkeys(c.shape.name for c in wave):
                part = Field([c for c in running.contenders if c.shape.name == one], together=False)
                times = measure(part, repeats)
                running.failed |= part.failed
                if times:
                    shape = next(c.shape for c in wave if c.shape.name == one)
                    add_rows(results, shape, times, link)
            failed |= running.failed
    return failed


def waves(contenders: list[Contender]) -> list[list[Contender]]:
    """Return who is up at the same time: all, unless one more would not fit on a GPU."""
    if not any(c.kind == LMCACHE for c in contenders):
        return [contenders]
    first = contenders[0].shape.name
    parts = [[c for c in contenders if (c.shape.name == first) == same] for same in (True, False)]
    return [part for part in parts if part]


def kinds_of(shape: Shape, device: str) -> list[str]:
    """Return the contenders of a shape that can run here."""
    kinds = [MEMORY]
    if "kv_lora_rank" not in shape.config:
        kinds = [PLAIN, OFFLOADING, LMCACHE, MEMORY, SLAB]
    return [kind for kind in kinds if _engines.available(kind, device)]


def link_speed(running: Field, device: str) -> float:
    """Return GB/s of a contiguous copy to the device, measured in an idle engine's worker."""
    num_bytes = GiB if device == "cuda" else 64 * MiB
    (speed, *_) = running.contenders[0].engine.rpc("adp_link", num_bytes, LINK_REPEATS)
    return float(speed)


def all_shapes(device: str, *, quick: bool) -> list[Shape]:
    """Return what is restored."""
    if quick:
        tiny = _engines.tiny_shape
        return [tiny("60k", "llama", 4, device), tiny("196k", "mla", 2, device)]
    return [
        _engines.shape("60k", "llama-8b", 60_000),
        _engines.shape("196k", "deepseek-v3-mla", 196_000),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; status 1 if a contender failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, two repeats")
    parser.add_argument("--only", choices=["60k", "196k"], help="one shape alone")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs instead of eager")
    parser.add_argument("--load-mode", default="auto")
    parser.add_argument("--ring", default="6GiB", help="shared_memory_size")
    parser.add_argument("--batch-bytes", help="the gateway's batch_bytes [its default]")
    parser.add_argument("--copy-threads", type=int, help="of the memory card [its default]")
    parser.add_argument("--block-size", type=int, help="of all engines [vLLM's default]")
    parser.add_argument("--offloading-block", type=int, default=0, help="[vLLM's default]")
    parser.add_argument("--folder", type=Path, help="where the slab card lies [temporary]")
    given = parser.parse_args(argv)
    device = find_device()
    shapes = [
        one for one in all_shapes(device, quick=given.quick) if given.only in (None, one.name)
    ]
    num_gateways = sum(k in ADP for one in shapes for k in kinds_of(one, device))
    if given.block_size:
        own = {"block_size": given.block_size}
        shapes = [replace(one, engine_args={**one.engine_args, **own}) for one in shapes]
    ring = 64 * MiB if given.quick else parse_size(given.ring, "--ring")
    ring = _engines.ring_bytes(ring, num_gateways)
    gateway: dict[str, object] = {"shared_memory_size": ring}
    if given.batch_bytes:
        gateway["batch_bytes"] = given.batch_bytes
    card = {MEMORY: {"copy_threads": given.copy_threads}} if given.copy_threads else {}
    results = Results("restore")
    with _engines.work_folder(given.folder) as folder:
        setup = Setup(
            device=device,
            folder=folder,
            eager=not given.graphs,
            separate_core=not given.quick,
            offloading_block=given.offloading_block,
            gateway=gateway,
            connector={"load_mode": given.load_mode},
            card=card,
        )
        failed = run(setup, shapes, 2 if given.quick else given.repeats, results)
    return _engines.finish(results, given.out, failed)


if __name__ == "__main__":
    sys.exit(main())

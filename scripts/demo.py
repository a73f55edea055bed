"""A restore from start to end on this machine: `make demo`.

    gateway + engine start ─► prompts computed and stored ─► kill -9 of both
    both start again       ─► the same prompts come back from the card ─► compare

A tiny model with random weights, on the GPU where there is one with vLLM, else on CPU. Exit
status 0 only if every token is the same and every prompt was hit. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from adp_kv.units import format_bytes
from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Completion, Engine
from tests.support.process import ChildError

CHUNK = 256
LENGTHS = (2049, 2056, 3081)  # a few tokens beyond whole chunks: see live()
MAX_TOKENS = 16
CARD = {"capacity_bytes": "512MiB", "num_databases": 4}
WARM_UP = prompt(999, 300)


@dataclass
class Life:
    """What one pair of processes did."""

    device: str = ""
    start_s: float = 0.0
    completions: list[Completion] = field(default_factory=list)
    again: list[Completion] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


def say(text: str) -> None:
    """Print at once, with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:5.1f} s] {text}", flush=True)


_BEGAN = time.monotonic()


def live(deployment: Deployment, model: str, prompts: list[list[int]]) -> Life:
    """Start an engine, run the prompts one after the other, kill engine and gateway.

    In the first life each prompt runs once more, now hit in the engine's own prefix cache as
    far as it will be hit on the card: in bf16 only runs of the same shape say the same tokens.
    """
    with Engine() as engine:
        facts = engine.start(model, deployment.connector(chunk_size=CHUNK), max_model_len=4096)
        life = Life(facts["device"], facts["start_s"])
        say(f"  vLLM {facts['vllm']} on {life.device} is up after {life.start_s:.0f} s")
        engine.generate([WARM_UP], max_tokens=2)  # the first request of a process is always slow
        before = deployment.counters()
        for tokens in prompts:
            (done,) = engine.generate([tokens], max_tokens=MAX_TOKENS)
            life.completions.append(done)
            if not done.num_cached_tokens:
                life.again += engine.generate([tokens], max_tokens=MAX_TOKENS)
            say(
                f"  prompt of {len(tokens)} tokens: {done.num_cached_tokens} from the card, first "
                f"token after {1000 * (done.ttft_s or 0):.0f} ms"
            )
        after = deployment.counters()
        life.counters = {name: value - before.get(name, 0) for name, value in after.items()}
        if not any(done.num_cached_tokens for done in life.completions):
            expected = sum(len(tokens) // CHUNK for tokens in prompts)
            deployment.wait_committed(expected)
            life.counters = deployment.counters()
        say("  kill -9 of the gateway and of the engine")
        deployment.kill9(engine)
    return life


def run(model: str, folder: Path) -> int:
    """Run the demonstration in a folder; return the exit status."""
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    say(f"First life: a gateway with {CARD['num_databases']} databases, and an engine ({model})")
    with Deployment(folder, CARD) as deployment:
        cold = live(deployment, model, prompts)
        stored = cold.counters
        say(
            f"  stored {stored['objects_written']} objects, "
            f"{format_bytes(stored['bytes_written'])}, {stored['chunks_committed']} chunks whole"
        )
        say("Second life: both start again, on the same card")
        deployment.restart()
        warm = live(deployment, model, prompts)
    return report(prompts, cold, warm)


def report(prompts: list[list[int]], cold: Life, warm: Life) -> int:
    """Print the table; return 0 if every token is the same and every hit is complete."""
    print("\nprompt   hit   expected   first token cold   restored   same tokens")
    good = True
    rows = zip(prompts, cold.completions, cold.again, warm.completions, strict=True)
    for tokens, first, local, again in rows:
        same = local.token_ids == again.token_ids
        hit, expected = again.num_cached_tokens or 0, expected_hit(len(tokens), CHUNK)
        good &= same and hit == expected > 0 and not first.num_cached_tokens
        cold_ms, warm_ms = 1000 * (first.ttft_s or 0), 1000 * (again.ttft_s or 0)
        print(
            f"{len(tokens):6}  {hit:4}   {expected:8}   {cold_ms:13.0f} ms   {warm_ms:5.0f} ms   "
            f"{'yes' if same else 'NO'}"
        )
    read = warm.counters
    print(
        f"\nread from the card: {read.get('objects_read', 0)} objects, "
        f"{format_bytes(read.get('bytes_read', 0))}; device: {warm.device}"
    )
    print("the same tokens, restored after kill -9" if good else "FAILED", flush=True)
    return 0 if good and read.get("objects_read", 0) > 0 else 1


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__)
    parser.add_argument("--model", choices=["llama", "mla"], default="llama")
    parser.add_argument("--folder", type=Path, help="where the card lives; default: temporary")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="adp-demo-", dir=chosen.folder) as folder:
        try:
            return run(chosen.model, Path(folder))
        except ChildError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())

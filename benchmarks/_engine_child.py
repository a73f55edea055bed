"""The child that benchmarks run engines in: what tests can ask for, and requests side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.support.engine_child import Session, main

MAX_STEPS = 100_000
ENDLESS = 1 << 16


class Decoding:
    """Prompts that decode in an engine, and one that is added to them.

    Attributes:
        times: when tokens of the others came.
        added_s, first_token_s, cached: of the added prompt; None before.
    """

    def __init__(self, engine: Any, others: list[list[int]]) -> None:
        self.times: list[float] = []
        self.added_s: float | None = None
        self.first_token_s: float | None = None
        self.cached: int | None = None
        self._engine = engine
        self._seen = {f"other-{i}": 0 for i in range(len(others))}
        for name, prompt in zip(self._seen, others, strict=True):
            self._start(name, prompt, ENDLESS)

    def add(self, prompt: list[int]) -> None:
        """Add a prompt of which one token is wanted."""
        self.added_s = time.perf_counter()
        self._start("added", prompt, 1)

    def _start(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._engine.vllm_config.model_config.max_model_len - len(prompt) - 1
        how = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=min(max_tokens, room),
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, how)

    def step(self) -> int:
        """Take the next outputs; return how many tokens each of the others has at least."""
        outputs = self._engine.step()
        now = time.perf_counter()
        came = False
        for output in outputs:
            num_tokens = sum(len(part.token_ids) for part in output.outputs)
            if output.request_id in self._seen:
                self._seen[output.request_id] += num_tokens
                came |= num_tokens > 0
            elif num_tokens:
                self.first_token_s, self.cached = now, output.num_cached_tokens
        if came:
            self.times.append(now)
        return min(self._seen.values())

    def run(self, until: Callable[[int], bool]) -> int:
        """Step until it holds of the others' least number of tokens; return that."""
        for _ in range(MAX_STEPS):
            least = self.step()
            if until(least):
                return least
        raise TimeoutError(f"not within {MAX_STEPS} steps")

    def end(self) -> None:
        """Abort the others."""
        self._engine.abort_request(list(self._seen))


class BenchSession(Session):
    """Adds what needs more than a batch of prompts."""

    def beside(self, request: dict[str, Any]) -> dict[str, Any]:
        """Let prompts decode, add one more, and note when whose tokens came.

        Args:
            request: others: prompts that decode all the time; steps: of theirs before
                and after; prompt: the one that is added.

        Returns:
            times: when tokens of the others came; added_s and first_token_s on the same
            clock; cached: tokens that the added prompt hit.
        """
        steps = request["steps"]
        decoding = Decoding(self.llm.llm_engine, request["others"])
        decoding.run(lambda least: least >= steps)
        decoding.add(request["prompt"])
        least = decoding.run(lambda _: decoding.first_token_s is not None)
        decoding.run(lambda now: now >= least + steps)
        decoding.end()
        self._drain()
        return {
            "times": decoding.times,
            "added_s": decoding.added_s,
            "first_token_s": decoding.first_token_s,
            "cached": decoding.cached,
        }


if __name__ == "__main__":
    main(BenchSession())

"""Agents that take turns on a GPU cache too small for all of them: fan-out on and off.

python -m benchmarks.agents [--out DIR] [--agents N] [--gpus N] [--pairs N] [--tiny]

Every agent has a prompt of a prefix that its group shares, a history of its own that grows, and
asks again and again for a few tokens. All ask at once; most of what they need comes back from a
card in RAM. One engine with tensor parallelism and an MLA shape serves all turns, half of them
with the exchange and half with every rank reading all, in pairs. --tiny is for trying it out,
on a CPU too (where there is nothing to exchange).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from adp_kv.units import GiB, KiB, MiB
from benchmarks._results import Results, argument_parser

CODE = ("adp_kv/connector", "adp_kv/fanout", "adp_kv/sdk", "adp_kv/transfer", "gateway")
CHUNK = 256
OBJECT_BYTES = 288 * KiB  # a chunk of a layer: one value on the card
ON, OFF = "size", "never"
PAIR = 2
START_TIMEOUT_S, TURN_TIMEOUT_S = 280.0, 240.0
SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16", "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 256,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 32,
    "moe_layer_freq": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "topk_method": "greedy", "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "norm_topk_prob": False, "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 65536, "initializer_range": 0.02,
    "tie_word_embeddings": False,
}  # fmt: skip
"""DeepSeek-V2-Lite's attention without its experts: 36 KiB of KV a token."""


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks for what.

    Attributes:
        agents, groups: agents of a group share a prefix of `shared` tokens.
        gpus: ranks.
        private: tokens of an agent's own history at first.
        new: tokens that an agent adds to its history with every turn, beside the answer.
        answer: tokens it is answered.
        cache_bytes: of GPU memory for KV on each rank.
        card_bytes: of the card.
    """

    agents: int = 32
    gpus: int = 2
    groups: int = 4
    shared: int = 4096
    private: int = 8192
    new: int = 64
    answer: int = 64
    cache_bytes: int = 5 * GiB
    card_bytes: int = 40 * GiB
    ring_bytes: int = 4 * GiB
    copy_threads: int = 12

    @property
    def num_chunks(self) -> int:
        """Distinct chunks of all first prompts."""
        whole = (self.shared + self.private) // CHUNK
        return self.groups * (self.shared // CHUNK) + self.agents * (whole - self.shared // CHUNK)


TINY = Load(
    agents=4, groups=2, shared=512, private=300, new=8, answer=4, cache_bytes=20 * MiB,
    card_bytes=256 * MiB, ring_bytes=64 * MiB, copy_threads=1,
)  # fmt: skip


@dataclass(slots=True)
class Turn:
    """What one turn of all agents took.

    Attributes:
        seconds: until the last had its answer.
        ttft_s: of each agent.
        answers: token ids of each; cached: tokens that were not computed.
    """

    seconds: float
    ttft_s: list[float]
    answers: list[list[int]]
    cached: list[int]


class Engine(Protocol):
    """What serves the agents; a stand-in replaces it in tests."""

    def exchange(self, when: str) -> bool:
        """Exchange by size, or never; return whether ranks can exchange at all."""

    def turn(self, prompts: list[list[int]], answer: int) -> Turn:
        """Answer all prompts at once."""

    def wait_stored(self, num_chunks: int) -> None:
        """Return when so many chunks are stored."""


def first_prompts(load: Load) -> list[list[int]]:
    """Return the agents' first prompts; equal for equal loads."""
    from tests.support.deployment import prompt

    prefixes = [prompt(100 + group, load.shared) for group in range(load.groups)]
    return [
        prefixes[agent % load.groups] + prompt(1000 + agent, load.private)
        for agent in range(load.agents)
    ]


@dataclass(slots=True)
class Side:
    """All measured turns of one mode."""

    speeds: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def add(self, turn: Turn, prompts: Sequence[list[int]]) -> None:
        """Take a turn in."""
        self.speeds.append(sum(map(len, turn.answers)) / turn.seconds)
        self.ttfts.append(statistics.mean(turn.ttft_s))
        self.hits.append(sum(turn.cached) / sum(map(len, prompts)))


def run(engine: Engine, results: Results, load: Load, pairs: int) -> None:
    """Let the agents take their turns and add the rows.

    Args:
        engine: serves them.
        results: what the rows are added to.
        load: who asks for what.
        pairs: measured turns of each mode, after one pair that is not.
    """
    from tests.support.deployment import prompt

    prompts = first_prompts(load)
    engine.exchange(OFF)
    first = engine.turn(prompts, load.answer)
    print(f"agents: all prompts computed: {first.seconds:.2f} s", flush=True)
    engine.wait_stored(load.num_chunks)
    sides = {ON: Side(), OFF: Side()}
    for pair in range(pairs + 1):
        order = (ON, OFF) if pair % 2 else (OFF, ON)
        for number, mode in enumerate(order):
            engine.exchange(mode)
            turn = engine.turn(prompts, load.answer)
            print(f"agents: pair {pair}, exchange {mode}: {turn.seconds:.2f} s", flush=True)
            if pair:
                sides[mode].add(turn, prompts)
            for agent, answer in enumerate(turn.answers):
                seed = 10_000 + (2 * pair + number) * load.agents + agent
                prompts[agent] = prompts[agent] + answer + prompt(seed, load.new)
    _rows(results, load, sides)


def _rows(results: Results, load: Load, sides: dict[str, Side]) -> None:
    name = f"agents.{load.agents}" + ("" if load.gpus == PAIR else f".{load.gpus}gpu")
    on, off = sides[ON], sides[OFF]
    for side, suffix in ((on, "on"), (off, "off")):
        speed, ttft = statistics.median(side.speeds), statistics.median(side.ttfts)
        results.add(f"{name}.tokens_per_s.{suffix}", speed, "tokens/s", better="higher")
        results.add(f"{name}.ttft.{suffix}", ttft * 1e3, "ms", better="lower")
    gains = statistics.median(a / b for a, b in zip(on.speeds, off.speeds, strict=True))
    ttft = statistics.median(a / b for a, b in zip(on.ttfts, off.ttfts, strict=True))
    hits = statistics.median(on.hits + off.hits)
    results.add(f"{name}.hits", hits, "of the tokens", better="higher")
    results.add(f"{name}.tokens_per_s.gain", gains, "on ÷ off", better="higher", target=1.0)
    results.add(f"{name}.ttft.gain", ttft, "time ÷ time", better="lower", target=1.0)


class RealEngine:
    """vLLM with tensor parallel 2 and a gateway with a card in RAM.

    Args:
        load: sizes.
        folder: for the model's config.
        tiny: use the tests' tiny model.
    """

    def __init__(self, load: Load, folder: Path, *, tiny: bool) -> None:
        from tests.support import engine as harness
        from tests.support.gateways import Gateway

        self._stack = ExitStack()
        card = {"capacity_bytes": load.card_bytes, "max_value_bytes": OBJECT_BYTES}
        card |= {"copy_threads": load.copy_threads}
        settings = {"shared_memory_size": load.ring_bytes, "fragment_size": OBJECT_BYTES}
        self._gateway = self._stack.enter_context(Gateway.serve("memory", card, **settings))
        self._engine = self._stack.enter_context(harness.Engine(separate_core=True))
        extra = {
            "gateway": self._gateway.address, "chunk_size": CHUNK, "nvlink_fanout": True,
            "lookup_timeout_s": 30.0, "gateway_timeout_s": 60.0, "load_timeout_s": 60.0,
        }  # fmt: skip
        connector = {
            "kv_connector": "AdpConnector", "kv_connector_module_path": "adp_kv.connector",
            "kv_role": "kv_both", "kv_connector_extra_config": extra,
        }  # fmt: skip
        args: dict[str, Any] = {"tensor_parallel_size": load.gpus, "max_num_seqs": load.agents}
        model: str | Path = "mla"
        if not tiny:
            model = folder
            (folder / "config.json").write_text(_json(SHAPE))
            args |= {"load_format": "dummy", "block_size": 64, "max_model_len": 32 * KiB}
        args["kv_cache_memory_bytes"] = load.cache_bytes
        try:
            self._engine.start(model, connector, timeout_s=START_TIMEOUT_S, **args)
        except BaseException:
            self.close()
            raise

    def exchange(self, when: str) -> bool:
        """Exchange by size, or never; return whether ranks can exchange at all."""
        return all(self._engine.rpc("adp_exchange", when))

    def turn(self, prompts: list[list[int]], answer: int) -> Turn:
        """Answer all prompts at once."""
        import time

        began = time.perf_counter()
        done = self._engine.generate(prompts, max_tokens=answer, timeout_s=TURN_TIMEOUT_S)
        seconds = time.perf_counter() - began
        return Turn(
            seconds,
            [one.ttft_s or seconds for one in done],
            [one.token_ids for one in done],
            [one.num_cached_tokens for one in done],
        )

    def wait_stored(self, num_chunks: int) -> None:
        """Return when so many chunks are stored."""
        from tests.support.process import wait_until

        def stored() -> bool:
            return self._gateway.counters().get("chunks_committed", 0) >= num_chunks

        wait_until(stored, 120.0, f"{num_chunks} chunks stored")

    def close(self) -> None:
        """End everything."""
        self._stack.close()


def _json(config: dict[str, Any]) -> str:
    import json

    return json.dumps(config)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--agents", type=int, default=Load().agents, help="how many [32]")
    parser.add_argument("--gpus", type=int, default=PAIR, help="tensor-parallel ranks [2]")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each mode [5]")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens")
    given = parser.parse_args()
    load = replace(TINY, gpus=given.gpus) if given.tiny else Load(given.agents, given.gpus)
    results = Results("agents")
    with tempfile.TemporaryDirectory() as folder:
        engine = RealEngine(load, Path(folder), tiny=given.tiny)
        try:
            if not engine.exchange(ON):
                print("agents: the ranks can't exchange here: both modes are the same", flush=True)
            run(engine, results, load, given.pairs)
        finally:
            engine.close()
    results.write(given.out)


if __name__ == "__main__":
    main()

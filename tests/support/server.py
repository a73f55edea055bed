"""A real `vllm serve` (OpenAI HTTP) in a child process, spoken to in token ids.

The tiny models have no tokenizer, so that prompts and answers are lists of token ids
(`return_token_ids`), streamed, which also shows the time to the first token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import tiny_models
from tests.support.engine import Completion
from tests.support.process import PYTHON, Child, free_port, wait_until

START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 120.0
MODEL_NAME = "tiny"


class Server:
    """`vllm serve` on a port of its own; start(), then complete().

    Args:
        env: added to the child's environment.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self._child: Child | None = None
        self._env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | dict(env or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def child(self) -> Child:
        """The running child; only after start()."""
        assert self._child is not None, "start() first"
        return self._child

    def start(
        self,
        model: str | Path,
        kv_transfer_config: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = START_TIMEOUT_S,
        **engine_args: Any,
    ) -> None:
        """Start the server and wait until it is healthy; arguments as for Engine.start()."""
        folder, model_args = tiny_models.resolve(model)
        engine_args |= {
            "model": str(folder),
            "served_model_name": MODEL_NAME,
            "host": "127.0.0.1",
            "port": self.port,
            "enable_prompt_tokens_details": True,
        }
        if kv_transfer_config is not None:
            engine_args["kv_transfer_config"] = dict(kv_transfer_config)
        request = json.dumps({"engine_args": engine_args, "model_args": model_args})
        argv = [PYTHON, "-m", "tests.support.server_child", request]
        child = self._child = Child(argv, self._env, "server")
        wait_until(lambda: self.healthy() or not child.alive(), timeout_s, "vllm serve is ready")
        if not child.alive():
            raise child.fail("died before it was ready")

    def healthy(self) -> bool:
        """Return whether GET /health answers 200 within a second."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        cache_salt: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        **sampling: Any,
    ) -> Completion:
        """Run one prompt of token ids, greedy unless `sampling` says otherwise.

        Raises:
            ChildError: The server answered with an error; its body and log are shown.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        began = time.monotonic()
        tokens: list[int] = []
        ttft_s, reason, cached = None, None, None
        for event in self._stream("/v1/completions", body | sampling, timeout_s):
            for choice in event.get("choices", []):
                if ttft_s is None:
                    ttft_s = time.monotonic() - began
                tokens += choice.get("token_ids") or []
                reason = choice.get("finish_reason") or reason
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens", cached)
        return Completion(tokens, [None] * len(tokens), cached, ttft_s, reason)

    def metrics(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return GET /metrics by name, summed over labels."""
        totals: dict[str, float] = {}
        with contextlib.closing(self._connect(timeout_s)) as connection:
            connection.request("GET", "/metrics")
            for line in connection.getresponse().read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def kill9(self) -> None:
        """Kill the server with its engine and workers."""
        self.child.kill9()

    def shutdown(self, timeout_s: float = 60.0) -> None:
        """Send SIGTERM and wait until nothing of it runs; its exit status is not judged."""
        self.child.terminate(timeout_s)
        wait_until(lambda: not self.child.members(), timeout_s, "the server's workers are gone")

    def close(self) -> None:
        """Kill what is left and clean up; safe to call twice."""
        if self._child is not None:
            self._child.cleanup()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def _stream(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Iterator[dict[str, Any]]:
        with contextlib.closing(self._connect(timeout_s)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self.child.fail(f"HTTP {response.status}: {response.read().decode()[:2000]}")
            for line in response:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    event = json.loads(text.removeprefix("data: "))
                    if "error" in event:
                        raise self.child.fail(f"error in mid-stream: {event['error']}")
                    yield event

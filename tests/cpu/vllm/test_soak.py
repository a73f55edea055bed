"""Half an hour of whatever comes, on a real server, against an engine without the cache.

Random prompts in parallel with and without salts, requests whose client goes away, preemption,
slow and failing reads and writes, gateways killed and started again (with `reconnect`). Every
answer is compared; at the end nothing is left and the gateway's sums hold.

ADP_SOAK_S sets the seconds, ADP_SOAK_OUT a file for the result; docs/design/soak.md has the last.
"""

import concurrent.futures
import http.client
import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.metric_sums import Values, broken, scrape
from tests.support.process import free_port, wait_until
from tests.support.server import MODEL_NAME, Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SECONDS = float(os.environ.get("ADP_SOAK_S", "1800"))
CHUNK = 64
TOKENS = 8
CLEAR_MARGIN = 1e-3
TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 128, "max_model_len": 512}
SALTS = [None, None, "a", "b"]


def make_prompts():
    """Prompts that share heads of different lengths, and some that share nothing."""
    rng = random.Random(17)
    heads = [prompt(500 + i, n) for i, n in enumerate((64, 130, 200))]
    shared = [rng.choice(heads) + prompt(600 + i, rng.randrange(5, 200)) for i in range(40)]
    return shared + [prompt(700 + i, rng.randrange(20, 420)) for i in range(20)]


@pytest.fixture(scope="module")
def reference(engine):
    prompts = make_prompts()
    engine.start("llama")
    done = engine.generate(prompts, max_tokens=TOKENS, logprobs=True, timeout_s=300)
    pairs = zip(prompts, done, strict=True)
    return [(tokens, one.token_ids) for tokens, one in pairs if one.margin > CLEAR_MARGIN]


class Soak:
    """One run: what was done, and what came out wrong."""

    def __init__(self, server, deployment, reference, rng):
        self.server, self.deployment, self.reference, self.rng = server, deployment, reference, rng
        self.counts = dict.fromkeys(
            ("requests", "aborts", "faults", "gateways", "cached_tokens"), 0
        )
        self.wrong = []

    def ask(self, number):
        tokens, want = self.reference[number]
        done = self.server.complete(
            tokens, max_tokens=TOKENS, cache_salt=self.rng.choice(SALTS), timeout_s=120
        )
        self.counts["requests"] += 1
        self.counts["cached_tokens"] += done.num_cached_tokens or 0
        if done.token_ids != want:
            self.wrong.append((number, want, done.token_ids))

    def leave(self, number):
        """Ask, and go away before the answer."""
        body = {"model": MODEL_NAME, "prompt": self.reference[number][0], "max_tokens": 300}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        time.sleep(self.rng.random() / 2)
        connection.close()
        self.counts["aborts"] += 1

    def turn(self, pool):
        """Some requests at once, while perhaps something breaks."""
        numbers = [self.rng.randrange(len(self.reference)) for _ in range(self.rng.randint(1, 6))]
        waiting = [pool.submit(self.ask, number) for number in numbers]
        what = self.rng.random()
        if what < 0.2:
            self.leave(self.rng.randrange(len(self.reference)))
        elif what < 0.3:
            self.deployment.inject(self.rng.choice(["read 0.3", "write 0.3", "read error", ""]))
            self.counts["faults"] += 1
        elif what < 0.33:
            self.deployment.kill9()
            time.sleep(self.rng.random())
            self.deployment.restart()
            self.counts["gateways"] += 1
        for one in waiting:
            one.result(180)


@pytest.mark.timeout(SECONDS + 900)
def test_soak(reference, tmp_path):
    rng = random.Random(int(time.monotonic_ns()))
    port = free_port()
    settings = {"slot_bytes": "64KiB"}
    with (
        Deployment(tmp_path, settings, faulty=True, metrics=f"127.0.0.1:{port}") as deployment,
        Server() as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        connector = deployment.connector("recompute", chunk_size=CHUNK, reconnect=True)
        server.start("llama", connector, **TIGHT)
        soak = Soak(server, deployment, reference, rng)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not soak.wrong:
            soak.turn(pool)
        deployment.inject("")
        for number in range(len(reference)):
            soak.ask(number)
        log = server.child.log()
        metrics = server.metrics()
        server.shutdown()
        wait_until(lambda: not broken(Values(scrape(port)), ("always",)), 30, "the sums hold")
        deployment.gateway.stop()
    result = soak.counts | {
        "seconds": round(SECONDS),
        "wrong": len(soak.wrong),
        "turned_off": off_lines(log),
        "restored_tokens": int(metrics["vllm:adp_kv_tokens_restored_total"]),
        "preemptions": int(metrics["vllm:num_preemptions_total"]),
    }
    if out := os.environ.get("ADP_SOAK_OUT"):
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    assert not soak.wrong, soak.wrong[:3]
    assert result["restored_tokens"] > 0
    assert soak.counts["requests"] > SECONDS / 10

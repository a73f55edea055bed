"""`vllm serve` killed and started again: usage and metrics show what came from the card."""

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.process import wait_until
from tests.support.server import Server

pytestmark = pytest.mark.vllm

PROMPT = prompt(71, 700)


def line_with(text, server):
    """Return the one line of a server's log that has a text: ours go where vLLM's go."""
    (line,) = [line for line in server.child.log().splitlines() if text in line]
    return line


def test_server_reports_cached_tokens_after_a_restart(tmp_path):
    hit = expected_hit(len(PROMPT))
    with Deployment(tmp_path) as deployment:
        with Server() as server:
            server.start("llama", deployment.connector())
            cold = server.complete(PROMPT)
            assert cold.num_cached_tokens in {0, None}
            deployment.wait_committed(len(PROMPT) // 256)
            deployment.kill9(server)
        deployment.restart()
        with Server() as server:
            server.start("llama", deployment.connector())
            restored = server.complete(PROMPT)
            other = server.complete(PROMPT, cache_salt="another tenant")
            metrics = server.metrics()
            assert "INFO" in line_with("keys of this engine", server)
            deployment.gateway.kill9()
            off = {}

            def both_sides_are_off():
                """Each notices by itself, and says so with its next step."""
                server.complete(prompt(72, 300), max_tokens=30)
                off.update(server.metrics())
                return off["vllm:adp_kv_off"] == off["vllm:adp_kv_turned_off_total"] == 1

            wait_until(both_sides_are_off, 60, "both sides have turned the cache off")
            server.shutdown()
    assert restored.token_ids == cold.token_ids
    assert restored.num_cached_tokens == hit
    assert other.num_cached_tokens in {0, None}
    assert metrics["vllm:external_prefix_cache_hits_total"] == hit
    ours = {
        name.removeprefix("vllm:adp_kv_"): value
        for name, value in metrics.items()
        if name.startswith("vllm:adp_kv_")
    }
    assert ours["tokens_restored_total"] == hit
    assert ours["lookups_total"] == 2
    assert ours["lookup_chunks_total"] == 2 * (len(PROMPT) // 256)
    assert ours["lookup_chunks_found_total"] == hit // 256
    assert ours["lookup_seconds_count"] == 2
    assert ours["restore_wait_seconds_count"] == 4  # layers
    assert ours["restore_seconds_count"] == 1
    page_bytes = 32 * 2 * 2 * 64 * 4  # tokens, keys and values, heads, size, float32
    assert ours["bytes_restored_total"] == hit // 32 * 4 * page_bytes
    assert ours["chunks_saved_total"] == 2  # the other tenant's
    assert ours["off"] == 0
    assert off["vllm:adp_kv_turned_off_total"] == 1, "once"

"""`vllm serve` killed and started again: usage and metrics show what came from the card."""

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.server import Server

pytestmark = pytest.mark.vllm

PROMPT = prompt(71, 700)


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
            server.shutdown()
        deployment.gateway.stop()
    assert restored.token_ids == cold.token_ids
    assert restored.num_cached_tokens == hit
    assert other.num_cached_tokens in {0, None}
    assert metrics["vllm:external_prefix_cache_hits_total"] == hit

"""Store, kill -9, restore on two GPUs with tensor parallel 2."""

from __future__ import annotations

import pytest

from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.vllm]

CHUNK = 256
PROMPTS = [prompt(21, 4 * CHUNK + 76), prompt(22, 3 * CHUNK + 1)]
MAX_TOKENS = 6


@pytest.mark.parametrize("model", ["llama", "mla"])
def test_two_ranks_restore_their_slices(model, tmp_path):
    card = {"capacity_bytes": "1GiB"}
    with Deployment(tmp_path, card, shared_memory_size="256MiB") as deployment:
        with Engine(separate_core=True) as engine:
            engine.start(model, deployment.connector(), tensor_parallel_size=2)
            # The same prefix in the GPUs' own cache as will be restored: the same batch shape.
            local = []
            for tokens in PROMPTS:
                engine.generate([tokens[: expected_hit(len(tokens), CHUNK) + 1]], max_tokens=1)
                local += engine.generate([tokens], max_tokens=MAX_TOKENS)
            deployment.wait_committed(sum(len(tokens) // CHUNK for tokens in PROMPTS))
            deployment.kill9(engine)
        deployment.restart()
        with Engine(separate_core=True) as engine:
            engine.start(model, deployment.connector(), tensor_parallel_size=2)
            for tokens, before in zip(PROMPTS, local, strict=True):
                (after,) = engine.generate([tokens], max_tokens=MAX_TOKENS)
                assert after.num_cached_tokens == expected_hit(len(tokens), CHUNK)
                assert after.token_ids == before.token_ids
            counts = engine.rpc("adp_counts")
            read = deployment.counters()["bytes_read"]
            # Sharded caches are read in halves; a replicated one whole by every rank.
            shares = [count["bytes_restored"] for count in counts]
            assert shares == ([read // 2] * 2 if model == "llama" else [read] * 2)
            engine.reset_prefix_cache()
            engine.rpc("adp_zero_restores", True)
            (zeroed,) = engine.generate(PROMPTS[:1], max_tokens=MAX_TOKENS)
            assert zeroed.token_ids != local[0].token_ids, "the restored bytes are not seen"
        deployment.gateway.stop()

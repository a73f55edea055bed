"""A real engine whose card, ring file or predecessor goes away: same tokens, hits afterwards."""

import shutil

import pytest

from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.engine import Engine
from tests.support.gateways import ring_files
from tests.support.phases import Phases
from tests.support.process import wait_until

pytestmark = pytest.mark.vllm

CHUNK = 128
TOKENS = 12
A, B, C = (prompt(910 + i, 3 * CHUNK + 9) for i in range(3))
HIT = 3 * CHUNK
SMALL_RING = {"shared_memory_size": "2MiB"}  # too small for three chunks at once
PATIENT = {"card_deadline_s": 300, "rank_deadline_s": 300}


@pytest.fixture(scope="module")
def want(engine):
    """Return what an engine without a connector says."""
    engine.start("llama")
    return [done.token_ids for done in engine.generate([A, B, C], max_tokens=TOKENS)]


def say(engine, tokens):
    """Return (tokens, cached prompt tokens), without vLLM's own prefix cache."""
    done = engine.answer(tokens, TOKENS)
    return done.token_ids, done.num_cached_tokens


class Gone:
    """An engine beside a card that fails when it is told to."""

    def __init__(self, engine, deployment, folder):
        self.engine, self.deployment = engine, deployment
        self.phases = Phases(engine, deployment, folder, ranks=1)

    def committed(self):
        return self.deployment.counters().get("chunks_committed", 0)

    def back(self):
        """Let the card work, and return when the gateway knows."""
        self.deployment.inject("")
        wait_until(
            lambda: self.deployment.counters()["card_databases_out"] == 0, 30, "databases work"
        )

    def between_requests(self, want):
        assert say(self.engine, A) == (want[0], 0)
        self.deployment.wait_committed(3)
        assert not ring_files(), "while an engine is served there is no file to be removed"
        self.deployment.inject("card gone")
        assert say(self.engine, A) == (want[0], 0), "nothing is found"
        assert say(self.engine, B) == (want[1], 0)
        assert self.committed() == 3, "nothing is stored"
        self.back()
        assert say(self.engine, A) == (want[0], HIT), "what was stored is still there"

    def amid_a_get(self, want):
        """What was read before arrives, the rest does not."""
        self.engine.reset_prefix_cache()
        self.phases.enter("get reads", A, TOKENS)
        self.deployment.inject("card gone")
        assert self.engine.finish_generate(60)[0].token_ids == want[0]
        assert self.deployment.counters()["objects_missed"] > 0
        self.back()

    def amid_a_put(self, want):
        self.phases.enter("put writes", C, TOKENS)
        before = self.committed()
        self.deployment.inject("card gone")
        assert self.engine.finish_generate(60)[0].token_ids == want[2]
        assert self.committed() == before
        self.back()
        assert say(self.engine, C) == (want[2], 0), "half of it was written"


def test_card_gone_while_serving_and_back(engine, want, tmp_path):
    """It fails between requests, in the middle of a get and of a put; the cache stays on."""
    settings = SMALL_RING | PATIENT | {"quarantine_s": 1}
    with Deployment(tmp_path, faulty=True, **settings) as deployment:
        before = off_lines(engine.child.log())
        engine.start("llama", deployment.connector("recompute", chunk_size=CHUNK))
        gone = Gone(engine, deployment, tmp_path)
        gone.between_requests(want)
        gone.amid_a_get(want)
        gone.amid_a_put(want)
        for tokens, expected in zip((A, B, C), want, strict=True):
            assert say(engine, tokens)[0] == expected  # stored again, where it was lost
        wait_until(lambda: say(engine, C) == (want[2], HIT), 30, "hits are back")
        shutil.rmtree(tmp_path / "card")  # the gateway has its files open
        assert say(engine, C) == (want[2], HIT)
        assert off_lines(engine.child.log()) == before, "the gateway lives: the cache stays on"
        deployment.gateway.stop()
        deployment.restart()
        assert deployment.counters()["card_groups"] == 0
        deployment.gateway.stop()


def test_ring_file_removed_while_a_real_engine_joins(engine, want, tmp_path):
    with Deployment(tmp_path, faulty=True) as deployment:
        before = off_lines(engine.child.log())
        deployment.inject("ring removed")
        connector = deployment.connector("recompute", chunk_size=CHUNK, connect_timeout_s=20)
        engine.start("llama", connector)
        assert say(engine, A) == (want[0], 0)
        assert off_lines(engine.child.log()) == before + 1
        assert "can't open the ring" in engine.rpc("adp_off")[0]
        assert say(engine, A) == (want[0], 0)
        assert off_lines(engine.child.log()) == before + 1
        deployment.gateway.stop()


def test_engine_killed_amid_a_restore_and_a_save_is_followed_by_another(engine, want, tmp_path):
    with Deployment(tmp_path, faulty=True, **PATIENT) as deployment:
        connector = deployment.connector("recompute", chunk_size=CHUNK, load_mode="async")
        with Engine() as first:
            first.start("llama", connector)
            assert say(first, A) == (want[0], 0)
            deployment.wait_committed(3)
            first.reset_prefix_cache()
            written = deployment.counters()["card_bytes_written"]
            deployment.inject("read hold\nwrite hold")
            first.begin_generate([A, B], max_tokens=TOKENS)
            wait_until(lambda: deployment.counters()["card_bytes_read"] > 0, 60, "a get is read")
            wait_until(
                lambda: deployment.counters()["card_bytes_written"] > written,
                60,
                "a put is written",
            )
            first.kill9()
        deployment.inject("")
        wait_until(lambda: deployment.counters().get("sessions_ended", 0) == 1, 30, "it noticed")
        assert not deployment.gateway.rings()
        engine.start("llama", connector)
        assert say(engine, A) == (want[0], HIT)
        for _ in range(2):
            assert say(engine, B)[0] == want[1]
        deployment.gateway.stop()

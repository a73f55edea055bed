"""The cache never holds the engine hostage: gateway absent, killed, or settings that are wrong."""

import pytest

from tests.support.deployment import Deployment, off_lines, prompt
from tests.support.engine import Engine
from tests.support.process import ChildError, free_port, wait_until

pytestmark = pytest.mark.vllm

CHUNK = 128
PROMPTS = [prompt(51, 3 * CHUNK + 9), prompt(52, 2 * CHUNK + 40)]


@pytest.fixture(scope="module")
def want(engine):
    """Return what an engine without a connector says, at length."""
    engine.start("llama")
    return [done.token_ids for done in engine.generate(PROMPTS, max_tokens=400)]


def absent(**settings):
    """A connector's settings whose gateway is not there."""
    extra = {"gateway": f"tcp://127.0.0.1:{free_port()}", "connect_timeout_s": 1.0} | settings
    return {
        "kv_connector": "AdpConnector",
        "kv_connector_module_path": "adp_kv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def test_gateway_killed_while_serving(want, tmp_path):
    """Two ranks: each says so once, and generation goes on to the same tokens."""
    with Deployment(tmp_path) as deployment, Engine(separate_core=True) as engine:
        connector = deployment.connector(chunk_size=CHUNK)
        engine.start("llama", connector, tensor_parallel_size=2)
        engine.begin_generate(PROMPTS, max_tokens=400)
        wait_until(lambda: deployment.counters().get("puts", 0) > 0, 60, "saves have begun")
        deployment.gateway.kill9()
        done = engine.finish_generate()
        assert [one.token_ids for one in done] == want
        wait_until(lambda: off_lines(engine.child.log()) == 2, 20, "both ranks are off")
        again = engine.generate(PROMPTS[:1], max_tokens=20)
        assert again[0].token_ids == want[0][:20]
        assert off_lines(engine.child.log()) == 2
        assert all("gateway" in reason for reason in engine.rpc("adp_off"))
        engine.reset_prefix_cache()  # no block is still pinned
        engine.kill9()
        deployment.restart()
        assert not deployment.gateway.rings(), "what the killed gateway left is swept by the next"


def test_gateway_absent_at_start(engine, want):
    before = off_lines(engine.child.log())
    engine.start("llama", absent(chunk_size=CHUNK))
    done = engine.generate(PROMPTS, max_tokens=20)
    assert [one.token_ids for one in done] == [tokens[:20] for tokens in want]
    assert [one.num_cached_tokens for one in done] == [0, 0]
    assert off_lines(engine.child.log()) == before + 1
    assert "start adp-gateway" in engine.rpc("adp_off")[0]


def test_gateway_required_and_absent_refuses_to_start(engine):
    with pytest.raises(ChildError, match=r"no gateway answers at .*gateway_required is set"):
        engine.start("llama", absent(gateway_required=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunksize": 256}, "unknown setting 'chunksize'; there are: gateway, "),
        ({"chunk_size": "256"}, r"Expected `int`, got `str` - at `\$.chunk_size`"),
        ({"chunk_size": 100}, "chunk_size = 100 is no multiple of vLLM's block size 32: use 128"),
        ({"load_mode": "sometimes"}, r"'sometimes' - at `\$.load_mode`"),
        ({"gateway": "localhost"}, "gateway = 'localhost': expected tcp://HOST:PORT"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s = 0.*: more than 0 seconds"),
    ],
)
def test_wrong_setting_is_named(engine, settings, message):
    with pytest.raises(ChildError, match=message):
        engine.start("llama", absent(**settings))


def test_layerwise_restores_of_recurrent_states_are_refused(engine):
    """vLLM copies a state before any layer could wait for it."""
    with pytest.raises(ChildError, match="load_mode = layerwise with recurrent states"):
        engine.start("granite_hybrid", absent(load_mode="layerwise"))

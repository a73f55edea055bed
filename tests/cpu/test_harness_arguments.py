"""How the harness turns what a test asks for into engine arguments."""

from tests.support import tiny_models
from tests.support.device import cpu_binding, engine_args
from tests.support.server_child import as_flags


def test_cores_are_shared_out_to_ranks():
    assert cpu_binding([0, 1], 1) == "0,1"
    assert cpu_binding([0, 1], 2) == "0|1"
    assert cpu_binding([4, 5, 6, 7, 8], 2) == "4,5|6,7"
    assert cpu_binding([3], 2) == "3|3"


def test_later_arguments_win():
    model = {"cpu": {"block_size": 32, "dtype": "float32"}, "cuda": {"block_size": 64}}
    assert engine_args("cpu", model, {})["block_size"] == 32
    assert engine_args("cuda", model, {})["block_size"] == 64
    assert engine_args("cpu", model, {"block_size": 128})["block_size"] == 128
    assert engine_args("cuda", model, {})["kv_cache_memory_bytes"] == 1 << 30
    assert "enforce_eager" not in engine_args("cuda", model, {})
    assert "distributed_executor_backend" not in engine_args("cpu", model, {})
    two = engine_args("cpu", model, {"tensor_parallel_size": 2})
    assert two["distributed_executor_backend"] == "mp"


def test_flags_of_engine_arguments():
    given = {"enforce_eager": True, "seed": 0, "nothing": None, "off": False, "config": {"a": [1]}}
    assert as_flags(given) == ["--enforce-eager", "--seed", "0", "--config", '{"a": [1]}']


def test_every_tiny_model_loads():
    assert {"dsa", "gemma3", "llama", "mla", "qwen3_next"} <= set(tiny_models.names())
    for name in tiny_models.names():
        tiny = tiny_models.load(name)
        assert tiny.config["model_type"]
        assert set(tiny.engine_args) == {"cpu", "cuda"}

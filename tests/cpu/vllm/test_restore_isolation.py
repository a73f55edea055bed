"""Who shares what is stored: the same namespace; no other salt, chunk size, weights, adapter."""

import json

import pytest

from tests.support import adapters, tiny_models
from tests.support.deployment import Deployment, expected_hit, prompt
from tests.support.engine import lora

pytestmark = pytest.mark.vllm

CHUNK = 128
PROMPT = prompt(21, 3 * CHUNK + 5)
HIT = expected_hit(len(PROMPT), CHUNK)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("isolation")) as deployment:
        yield deployment
        deployment.gateway.stop()


@pytest.fixture(scope="module")
def first(deployment, engine):
    """Store PROMPT in namespace "a"; return what it leads to."""
    start(engine, deployment)
    (done,) = engine.generate([PROMPT])
    assert done.num_cached_tokens == 0
    deployment.wait_committed(len(PROMPT) // CHUNK)
    return done


def start(engine, deployment, model="llama", **how):
    settings = {"chunk_size": CHUNK, "key_namespace": "a"} | how.pop("settings", {})
    engine.start(model, deployment.connector(**settings), **how)


def test_two_salts_never_share(deployment, engine, first):
    (salted,) = engine.generate([PROMPT], cache_salt="one")
    deployment.wait_committed(2 * (len(PROMPT) // CHUNK))
    assert salted.num_cached_tokens == 0
    engine.reset_prefix_cache()
    hits = {
        salt: engine.generate([PROMPT], cache_salt=salt)[0].num_cached_tokens
        for salt in ("two", "one", None)
    }
    assert hits == {"two": 0, "one": HIT, None: HIT}
    assert salted.token_ids == first.token_ids


def test_two_namespaces_never_share_on_one_card(deployment, engine, first):
    start(engine, deployment, settings={"key_namespace": "b"})
    (other,) = engine.generate([PROMPT])
    start(engine, deployment)
    (same,) = engine.generate([PROMPT])
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, HIT)
    assert other.token_ids == same.token_ids == first.token_ids


def test_nothing_from_before_a_reset_is_hit_by_this_engine(deployment, engine, first):
    """Weights were changed in place, say; what is computed from then on is its own alone."""
    start(engine, deployment)
    hits, chunks = [], len(PROMPT) // CHUNK
    committed = deployment.counters()["chunks_committed"]
    for connector in (False, True, False):
        engine.reset_prefix_cache(connector=connector)
        (done,) = engine.generate([PROMPT])
        hits.append(done.num_cached_tokens)
        assert done.token_ids == first.token_ids
        if connector:
            deployment.wait_committed(committed + chunks)
    assert hits == [HIT, 0, HIT]
    start(engine, deployment)
    (again,) = engine.generate([PROMPT])
    assert again.num_cached_tokens == HIT, "the card is others' too: nothing is deleted"
    assert deployment.counters()["chunks_committed"] == committed + chunks


def test_another_chunk_size_never_shares(deployment, engine, first):
    start(engine, deployment, settings={"chunk_size": 2 * CHUNK})
    (other,) = engine.generate([PROMPT])
    assert other.num_cached_tokens == 0
    assert other.token_ids == first.token_ids


def test_other_weights_in_the_same_folder_never_share(deployment, engine, first, tmp_path):
    """A fine-tune saved over its base: same path, same shapes, other bytes."""
    base = tiny_models.random_weights(tiny_models.load("llama").config)
    folder = tmp_path / "model"
    folder.mkdir()
    args = tiny_models.load("llama").engine_args["cpu"]
    (folder / "config.json").write_text((base / "config.json").read_text())
    weights = folder / "model.safetensors"
    weights.write_bytes((base / "model.safetensors").read_bytes())
    start(engine, deployment, folder, **args)
    (before,) = engine.generate([PROMPT])
    assert before.num_cached_tokens == 0, "another path is another model"
    adapters.shuffle_rows(weights)
    start(engine, deployment, folder, **args)
    (after,) = engine.generate([PROMPT])
    assert after.num_cached_tokens == 0
    assert after.token_ids != before.token_ids


def test_adapters_of_one_name_and_path_but_other_content_never_share(
    deployment, engine, first, tmp_path
):
    config = tiny_models.load("llama").config
    folder = tmp_path / "adapter"
    lora_args = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    outcomes = []
    for seed in (1, 1, 2):
        adapters.write(folder, config, seed)
        start(engine, deployment, **lora_args)
        (done,) = engine.generate([PROMPT], lora_adapter=lora("tuned", folder))
        outcomes.append((done.num_cached_tokens, done.token_ids))
    (plain,) = engine.generate([PROMPT])
    (cold, tokens), (again, same_tokens), (other, other_tokens) = outcomes
    assert (cold, again, other) == (0, HIT, 0)
    assert same_tokens == tokens
    assert other_tokens != tokens
    assert plain.num_cached_tokens == HIT
    assert plain.token_ids == first.token_ids
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"

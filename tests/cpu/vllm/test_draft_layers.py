"""Which of vLLM's layers are a draft's, by their names in both releases."""

import importlib
import warnings
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm

NUM_LAYERS = 4
TARGET = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_LAYERS)]


def found(method, name):
    """Return the draft's layers in an engine whose last layer has this name."""
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        module = importlib.import_module("adp_kv.connector.vllm_drafts")
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: NUM_LAYERS)
    speculative = None if method is None else SimpleNamespace(method=method)
    config = SimpleNamespace(model_config=model, speculative_config=speculative)
    groups = [SimpleNamespace(layer_names=TARGET), SimpleNamespace(layer_names=[name])]
    return module.draft_layers(config, SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("eagle", "model.layers.4.self_attn.attn"),
        ("eagle3", "model.layers.4.self_attn.attn"),
        ("mtp", "model.layers.4.self_attn.mla_attn"),
        ("mtp", "mtp.layers.0.self_attn.attn"),
        ("mtp", "model.mtp.layers.0.self_attn"),
        ("draft_model", "draft_model.model.layers.0.self_attn.attn"),
    ],
)
def test_layers_beyond_the_target_s_and_in_modules_of_their_own_are_a_draft_s(method, name):
    assert found(method, name) == {name}


@pytest.mark.parametrize("method", [None, "ngram"])
def test_without_a_draft_there_are_none(method):
    assert found(method, "model.layers.4.self_attn.attn") == frozenset()

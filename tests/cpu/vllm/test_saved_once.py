"""Requests with a prompt that another one is just storing, on a card that takes its time."""

import pytest

from tests.support import tiny_models
from tests.support.deployment import Deployment, prompt
from tests.support.engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHUNKS = 3


def test_prompt_that_comes_again_while_it_is_stored_is_stored_once(tmp_path):
    with Deployment(tmp_path, faulty=True) as deployment, Engine() as engine:
        engine.start("llama", deployment.connector(chunk_size=256))
        tokens = prompt(7, CHUNKS * 256 + 1)
        deployment.inject("write hold")
        for _ in range(3):
            engine.generate([tokens], max_tokens=2)
        deployment.inject("")
        deployment.wait_committed(CHUNKS)
        num_layers = tiny_models.load("llama").config["num_hidden_layers"]
        assert deployment.counters()["put_objects"] == CHUNKS * num_layers

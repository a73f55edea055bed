"""One engine child for all tests that need no process of their own: a start takes 1 s, not 10."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.engine import Engine


@pytest.fixture(scope="session")
def shared_engines() -> Iterator[list[Engine]]:
    """Hold the child; the list is empty until somebody needs one."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(shared_engines: list[Engine]) -> Engine:
    """Return a child to start() engines in, one after the other; a new one if it died."""
    if not shared_engines or not shared_engines[-1].child.alive():
        shared_engines.append(Engine())
    return shared_engines[-1]


@pytest.fixture(scope="session")
def vllm() -> SimpleNamespace:
    """Return vLLM's specs and our views of its configuration, without an engine."""
    names = {
        "specs": "vllm.v1.kv_cache_interface",
        "utils": "vllm.v1.core.kv_cache_utils",
        "state": "vllm.distributed.parallel_state",
        "caches": "adp_kv.connector.vllm_caches",
        "dcp": "adp_kv.connector.vllm_dcp",
        "view": "adp_kv.connector.vllm_view",
        "torch": "torch",
    }
    with warnings.catch_warnings():  # vLLM's and torch's own
        warnings.simplefilter("ignore")
        return SimpleNamespace(**{k: importlib.import_module(name) for k, name in names.items()})

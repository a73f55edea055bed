"""One engine child for all tests that need no process of their own: a start takes 1 s, not 10."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adp_kv.config import ConnectorSettings
from adp_kv.layout.parts import Part
from tests.support.engine import Engine
from tests.support.scheduler_rig import CHUNK, Client, Pool, scheduler_module


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


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """Return the scheduler side's module."""
    return scheduler_module()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Any:
    """Return a scheduler side of one part, whose gateway has nothing."""
    monkeypatch.setattr(module, "LookupClient", Client)
    monkeypatch.setattr(module, "hashes_repeatable", lambda: True)
    monkeypatch.setattr(module, "root_hash", lambda: b"root")
    engine = module.EngineView(
        engine_id="e",
        world_size=1,
        parts=(Part(0, 32, CHUNK // 32),),
        hash_tokens=32,
        chunk_tokens=CHUNK,
        address="tcp://127.0.0.1:1",
        async_loads=False,
        facts={},
    )
    side = module.SchedulerSide(engine, ConnectorSettings(), b"n" * 16)
    side.bind_pool(Pool(9))
    return side

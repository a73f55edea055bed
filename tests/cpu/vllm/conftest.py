"""One engine child for all tests that need no process of their own: a start takes 1 s, not 10."""

from __future__ import annotations

from collections.abc import Iterator

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

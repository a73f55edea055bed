"""What the tests on CUDA share; without a device they fail.

With pytest-xdist (`-n 12 --dist loadgroup`) whatever shares an engine stays in one process:
the tests of one life of an engine, or one test that starts its own. A file without engines is a
group, since its pool is large. Engines come first, as they take longest.
"""

from pathlib import Path

import pytest

from adp_kv.units import GiB
from tests.support.cuda_rig import GUARD

_LIVES = ("story", "life")
"""Fixtures that start engines for several tests, one by one for their parameters."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell pytest-xdist what belongs together."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)


def _group(item: pytest.Item) -> str:
    if not item.get_closest_marker("vllm"):
        return item.path.stem
    params = getattr(getattr(item, "callspec", None), "params", {})
    shared = [str(params[name]) for name in _LIVES if name in params]
    return "-".join([item.path.stem, *(shared or [item.name])]).replace("@", "-")


@pytest.fixture(scope="session")
def pool():
    """Six GiB of pages, so that offsets pass 2**31 and 2**32; every byte is GUARD."""
    import torch

    return torch.full((6 * GiB,), GUARD, dtype=torch.uint8, device="cuda")

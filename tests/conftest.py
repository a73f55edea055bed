"""Fixtures of every test: nothing is left in /dev/shm, and no child process survives.

Children started by tests/support run with PYTHONHASHSEED=0, because hashes that repeat
across processes are what persistence rests on. The pytest process itself needs no seed;
a test that hashes in-process must not depend on one. Kernel tests run in Triton's
interpreter where there is no GPU.

With pytest-xdist (`-n 2`, as `make test` does) a file stays in one process, and so do all real
engines of tests/cpu/vllm: they take turns in one child, and two at once would want more cores
than there may be. They come first, since they take longest.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateways import ring_files
from tests.support.process import RUN, descendants, mapped_by, parents

# Before anything imports triton: without a GPU its interpreter runs the kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

VLLM_TIMEOUT_S = 400
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 3.0
_ENGINES = "tests/cpu/vllm/"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_configure(config: pytest.Config) -> None:
    """Make orphans of dead children ours, so that a leaked grandchild is seen too."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): ignored without pytest-timeout")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Say what stays in one process, unless the command line does (`--dist loadgroup`)."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _ENGINES if nodeid.startswith(_ENGINES) else nodeid.partition("::")[0]

    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False  # by number of tests
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of a real engine the time that one needs; with others meanwhile, begin with it."""
    if RUN:
        items.sort(key=lambda item: not item.nodeid.startswith(_ENGINES))
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(VLLM_TIMEOUT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail, rather than skip, a selected test whose vLLM or GPU is not there."""
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.fail("vLLM is not installed; `make env` installs one", pytrace=False)
    gpus_needed = 2 if item.get_closest_marker("multi_gpu") else 1
    if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
        import torch

        if torch.cuda.device_count() < gpus_needed:
            found = torch.cuda.device_count()
            pytest.fail(f"needs {gpus_needed} CUDA devices, found {found}", pytrace=False)


def _children() -> dict[int, str]:
    """Return the live children of this process with their command lines."""
    found = {}
    for pid in (child for child, parent in parents().items() if parent == os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if not any(helper in command for helper in _HELPERS):
                found[pid] = command.strip()
    return found


def _leaked_children(before: dict[int, str]) -> dict[int, str]:
    deadline = time.monotonic() + _GRACE_S
    while True:
        leaked = {pid: cmd for pid, cmd in _children().items() if pid not in before}
        if not leaked or time.monotonic() > deadline:
            return leaked
        time.sleep(0.05)


def _left_rings(before: set[Path]) -> set[Path]:
    """Return new ring files, but not those that a process of another test run uses."""
    left = set()
    for ring in ring_files() - before:
        with contextlib.suppress(FileNotFoundError):
            if not mapped_by(ring) - descendants(os.getpid()):
                left.add(ring)
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves ring files or child processes; they are removed all the same."""
    rings, children = ring_files(), _children()
    yield
    leaked = _leaked_children(children)
    for pid in leaked:
        with contextlib.suppress(OSError):
            os.kill(pid, 9)
    left = _left_rings(rings)
    for ring in left:
        ring.unlink(missing_ok=True)
    assert not leaked, f"child processes left behind: {leaked}"
    assert not left, f"ring files left behind: {sorted(map(str, left))}"

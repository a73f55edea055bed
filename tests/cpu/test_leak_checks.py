"""The fixtures of conftest.py catch what they claim to catch."""

import os
import subprocess
import sys

import pytest

from tests.support import process
from tests.support.gateways import own_name, ring_files
from tests.support.process import REPO, SHM, descendants, mapped_by

LEAKY = {
    "ring": "def test_it():\n    open({shm!r}, 'w').close()\n",
    "child": "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '60'])\n",
    "grandchild": (
        "import subprocess\ndef test_it():\n"
        "    subprocess.run(['sh', '-c', 'sleep 60 & exit 0'], check=True)\n"
    ),
}
WORDS = {"ring": "ring files left", "child": "processes left", "grandchild": "processes left"}


@pytest.mark.parametrize("kind", LEAKY)
def test_leak_is_an_error(kind, tmp_path):
    shm = SHM / f"adp_kv-{own_name('leak')}-{tmp_path.name}-{id(tmp_path)}"
    test = tmp_path / "test_leaky.py"
    test.write_text(LEAKY[kind].format(shm=str(shm)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-W", "default", test],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert WORDS[kind] in done.stdout
    assert "1 error" in done.stdout
    assert not shm.exists()


def test_ring_of_another_run_is_left_alone(tmp_path):
    """Two runs on one machine: a ring that a stranger holds is neither ours nor removed."""
    shm = SHM / f"adp_kv-{own_name('stranger')}-{id(tmp_path)}"
    shm.touch()
    try:
        assert mapped_by(shm) == set()
        with shm.open():
            assert mapped_by(shm) == {os.getpid()}
            assert mapped_by(shm) <= descendants(os.getpid())
            assert mapped_by(shm) - descendants(os.getpid() + 10**7)
    finally:
        shm.unlink()


def test_ring_of_another_worker_is_not_seen():
    """Two processes run tests at once (pytest-xdist): each looks after its own rings."""
    shm = SHM / f"adp_kv-gw99-{os.getpid()}"
    shm.touch()
    try:
        assert shm not in ring_files()
        ours = shm.rename(SHM / f"adp_kv-{own_name('seen')}-{os.getpid()}")
        shm = ours
        assert ours in ring_files()
    finally:
        shm.unlink()


def test_process_that_ends_while_others_are_listed_is_passed_over(monkeypatch):
    ended = subprocess.Popen(["true"])  # its number is free once it was waited for
    ended.wait()
    monkeypatch.setattr(process.os, "listdir", lambda _: [str(ended.pid), "self", str(os.getpid())])
    assert process.parents() == {os.getpid(): os.getppid()}

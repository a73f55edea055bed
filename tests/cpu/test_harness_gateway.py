"""The gateway harness, on stand-ins: start, readiness, clean stop, kill."""

import os
import signal
import sys
import time

import pytest

from tests.support.gateways import Gateway, own_name
from tests.support.process import SHM, Child, ChildError, session_members, wait_until


def test_child_log_is_shown_when_it_dies():
    child = Child([sys.executable, "-c", "raise SystemExit('no card')"], {}, "stand-in")
    try:
        with pytest.raises(ChildError, match=r"(?s)exit status 1.*no card"):
            child.wait_for_log("serving", timeout_s=10)
    finally:
        child.cleanup()


def test_kill9_reaches_workers_in_own_process_groups():
    code = (
        "import subprocess, os, time\n"
        "subprocess.Popen(['sleep', '60'])\n"
        "subprocess.Popen(['sleep', '60'], process_group=0)\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    child = Child([sys.executable, "-c", code], {}, "stand-in")
    try:
        child.wait_for_log("up", timeout_s=10)
        wait_until(lambda: len(child.members()) == 3, 5, "three processes")
        child.kill9()
        assert session_members(child.pid) == []
    finally:
        child.cleanup()
    assert not child.folder.exists()


def test_terminate_past_deadline_kills_and_raises():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    child = Child([sys.executable, "-c", code], {}, "stubborn")
    try:
        child.wait_for_log("up", timeout_s=10)
        with pytest.raises(ChildError, match="no exit within"):
            child.terminate(timeout_s=0.3)
        assert not child.alive()
    finally:
        child.cleanup()


def test_ring_left_after_kill_is_seen():
    name = own_name(f"harness-{os.getpid()}")
    ring = SHM / f"adp_kv-{name}.ring"
    with Gateway(["--help"], ring_name=name) as gateway:
        ring.touch()
        try:
            assert gateway.rings() == {ring}
            with pytest.raises(ChildError, match="gone from"):
                gateway.assert_no_rings(timeout_s=0.05)
        finally:
            ring.unlink()
        gateway.assert_no_rings()


def test_gateway_that_dies_early_is_an_error():
    with Gateway(["--no-such-flag"]) as gateway:
        began = time.monotonic()
        with pytest.raises(ChildError, match="not ready"):
            gateway.wait_ready("this is never printed", timeout_s=20)
        assert time.monotonic() - began < 15
        assert gateway.child.popen.returncode not in (0, -signal.SIGKILL)

"""The gateway as a process: signals, a taken address, and what is left behind."""

import os
import platform
import re
import signal
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from adp_kv.errors import ConfigError
from adp_kv.ring.region import ring_path
from gateway.config import Settings
from gateway.server import Server
from tests.support.cards import memory_card
from tests.support.gateways import Gateway, own_name
from tests.support.process import PYTHON, REPO, free_port, wait_until
from tests.support.serving import Rank, Serving, random_chunks, replicated, store

SMALL = {
    "card": "memory",
    "card_options": {"capacity_bytes": "16MiB", "max_value_bytes": "64KiB"},
    "shared_memory_size": "1MiB",
}
MEMORY = ["--card=memory", "--card-option=capacity_bytes=1MiB"]


def joined(gateway):
    rank = Rank(gateway.address, 0, replicated(1, 1)[0])
    rank.send(rank.hello)
    rank.attach(rank.welcomed())
    return rank


def test_sigterm_says_goodbye_and_leaves_nothing():
    with Gateway.serve(**SMALL) as gateway:
        rank = joined(gateway)
        store([rank], random_chunks(3))
        gateway.stop()
        assert "shutting down" in rank.expect_goodbye()
        rank.close()
        gateway.assert_no_rings()


def test_sigterm_while_the_ring_is_named_leaves_nothing():
    with Gateway.serve(**SMALL) as gateway:
        rank = Rank(gateway.address, 0, replicated(1, 1)[0])
        rank.send(rank.hello)
        rank.welcomed()
        assert gateway.rings()
        gateway.stop()
        rank.close()


def test_signals_in_a_row_are_one():
    with Gateway.serve(**SMALL) as gateway:
        for _ in range(5):
            gateway.child.popen.send_signal(signal.SIGINT)
        gateway.stop()
        assert "Traceback" not in gateway.log()


def test_kill9_leaves_what_the_next_sweeps():
    with Gateway.serve(**SMALL) as gateway:
        rank = Rank(gateway.address, 0, replicated(1, 1)[0])
        rank.send(rank.hello)
        welcome = rank.welcomed()
        rank.attach(welcome)
        rank.lookup(random_chunks(1))
        gateway.kill9()
        gateway.assert_no_rings(1)  # every rank had mapped it
        rank.mapping.data[:] = 1
        rank.close()


def test_kill9_before_attach_is_swept_by_the_next():
    with Gateway.serve(**SMALL) as gateway:
        rank = Rank(gateway.address, 0, replicated(1, 1)[0])
        rank.send(rank.hello)
        path = rank.welcomed().ring_path
        gateway.kill9()
        assert {str(p) for p in gateway.rings()} == {path}
        rank.close()
        with Gateway.serve(address=gateway.address, **SMALL) as successor:
            assert not successor.rings()
            rank = joined(successor)
            store([rank], random_chunks(2))
            rank.close()
            successor.stop()


def run_gateway(*arguments):
    return subprocess.run(
        [PYTHON, "-m", "gateway", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_taken_port_exits_with_2_and_names_listen():
    with Gateway.serve(**SMALL) as gateway:
        second = run_gateway(f"--listen={gateway.address}", *MEMORY, "--shared-memory-size=1MiB")
        assert second.returncode == 2
        assert f"listen = {gateway.address}" in second.stderr
        assert "Traceback" not in second.stderr
        rank = joined(gateway)
        store([rank], random_chunks(1))
        rank.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lease-s=soon"], "lease_s"),
        (["--card=floppy"], "floppy"),
        (["--card=slab"], "path"),
        (["--card-option=nonsense=1", "--card=memory"], "nonsense"),
        (["--shared-memory-size=900TiB", *MEMORY], "shared_memory_size"),
        (["--config=/nowhere/x.toml"], "/nowhere/x.toml"),
    ],
)
def test_wrong_setting_exits_with_2_and_names_it(arguments, named):
    done = run_gateway(f"--listen=tcp://127.0.0.1:{free_port()}", *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_ipc_address_is_refused():
    with Serving() as serving:
        settings = Settings(
            listen=serving.address, ring_name=own_name("other"), shared_memory_size=1 << 16
        )
        with pytest.raises(ConfigError, match=r"listen = ipc://"):
            Server(settings, memory_card())
        (rank,) = serving.join(replicated(1, 1))
        store([rank], random_chunks(1))


def test_missing_folder_of_an_ipc_address_is_what_to_make(tmp_path):
    folder = tmp_path / "none"
    done = run_gateway(f"--listen=ipc://{folder}/s", *MEMORY, "--shared-memory-size=1MiB")
    assert done.returncode == 2
    assert f"mkdir -m 700 {folder}" in done.stderr
    assert "another gateway" not in done.stderr


def test_dead_ipc_address_is_taken_over(tmp_path):
    script = (
        "import os, signal, zmq\n"
        "s = zmq.Context().socket(zmq.ROUTER)\n"
        f"s.bind('ipc://{tmp_path}/s')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([PYTHON, "-c", script], check=False)
    assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)
    with Serving(listen=f"ipc://{tmp_path}/s") as serving:
        store(serving.join(replicated(1, 1)), random_chunks(1))
    assert not (tmp_path / "s").exists()


def test_card_that_does_not_open_leaves_nothing(monkeypatch):
    card = memory_card()
    monkeypatch.setattr(card, "open", lambda _on_done: 1 / 0)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    settings = Settings(
        listen=f"tcp://127.0.0.1:{free_port()}",
        ring_name=own_name("shut"),
        shared_memory_size=1 << 20,
    )
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            Server(settings, card)
    assert not ring_path(settings.effective_ring_name).exists()
    left = set(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
    assert len(left) <= 1, left


def test_stop_after_the_end_is_harmless():
    with Serving() as serving:
        serving.server.stop()
        wait_until(lambda: not serving.alive, 5, "it has stopped")
        serving.server.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("adp-card")]


def tunables(gateway):
    """Return what glibc was told when this process last started; glibc cuts its string up."""
    environ = Path(f"/proc/{gateway.child.pid}/environ").read_bytes().decode()
    parts = re.split("[\0:]", environ.replace("GLIBC_TUNABLES=", "\0"))
    return [part for part in parts if part.startswith("glibc.")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="glibc has the setting on x86-64 only")
def test_gateway_whose_card_copies_has_streaming_copies_and_keeps_what_was_given():
    with Gateway.serve(**SMALL, env={"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}) as gateway:
        given, streaming = tunables(gateway)
        assert given == "glibc.malloc.perturb=0"
        assert streaming == "glibc.cpu.x86_non_temporal_threshold=0x80000"
        gateway.stop()


def test_threshold_that_was_given_is_left_alone():
    given = "glibc.cpu.x86_non_temporal_threshold=0x100000"
    with Gateway.serve(**SMALL, env={"GLIBC_TUNABLES": given}) as gateway:
        assert tunables(gateway) == [given]
        gateway.stop()


def test_gateway_whose_card_does_not_copy_starts_once(tmp_path):
    options = {"path": tmp_path / "card", "capacity_bytes": "16MiB"}
    with Gateway.serve(**SMALL | {"card": "slab", "card_options": options}) as gateway:
        assert tunables(gateway) == []
        gateway.stop()

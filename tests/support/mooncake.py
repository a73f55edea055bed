"""A real Mooncake store of a test's own; its absence is an error, never a skip."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from adp_kv.units import MiB
from gateway.cards.mooncake.engine import load
from tests.support.process import free_port, send_signal

# Once in a process, when the wheel is loaded.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

START_S = 30
STARTS = 3  # a free port may be taken by the time it is used
HOST = "127.0.0.1"
SEGMENT_BYTES = 16 * MiB  # the least that the engine takes


def program(name):
    """Return a program of the wheel."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "no Mooncake: pip install mooncake-transfer-engine-non-cuda (the `test` extra)"
        )
    return Path(spec.submodule_search_locations[0]) / name


def check_libraries():
    """Raise with what to do if the wheel's programs can't start here."""
    listed = subprocess.run(
        ["ldd", program("mooncake_master")], capture_output=True, text=True, check=False
    ).stdout
    missing = sorted({line.split()[0] for line in listed.splitlines() if "not found" in line})
    if missing:
        raise RuntimeError(
            f"Mooncake's wheel lacks {', '.join(missing)}: scripts/setup_env.sh brings them where "
            "it finds apt-get; else install libibverbs1 libnuma1 libcurl4 (Debian's names)"
        )


class MooncakeStore:
    """A master and a process that holds values in RAM, over TCP on the loopback interface.

    Args:
        segment_bytes: of the values' RAM.
        flags: of the master.
    """

    def __init__(self, segment_bytes=SEGMENT_BYTES, **flags):
        self._dir = Path(tempfile.mkdtemp(prefix="adp-mooncake-"))
        self._segment_bytes = segment_bytes
        self._flags = {
            "rpc_address": HOST,
            "metrics_host": HOST,
            "enable_metric_reporting": "false",
            "client_ttl": 60,  # seconds until a holder that died is noticed, or one that starves
        } | flags
        self._take_ports()
        self._holder_port = free_port()
        self.master = None
        self.holder = None
        self._client = None

    @property
    def address(self):
        return f"{HOST}:{self._port}"

    def start(self):
        check_libraries()
        try:
            for left in reversed(range(STARTS)):
                try:
                    self.start_master()
                    break
                except RuntimeError:
                    if not left or self.master.poll() is None:
                        raise
                    self._take_ports()
            self.start_holder()
        except BaseException:
            self.stop()
            raise
        return self

    def _take_ports(self):
        self._port, self._flags["metrics_port"] = free_port(), free_port()
        self._flags["rpc_port"] = self._port

    def start_master(self):
        flags = [f"--{name}={value}" for name, value in self._flags.items()]
        self.master = self._run("mooncake_master", flags)
        self._wait("mooncake_master", self.master, lambda: self._ask("health") is not None)

    def start_holder(self):
        """Start the process that holds values, and wait until the master knows it."""
        flags = [
            f"--master_server_address={self.address}",
            f"--host={HOST}",
            f"--port={self._holder_port}",
            f"--global_segment_size={self._segment_bytes}",
            "--protocol=tcp",
            "--metadata_server=P2PHANDSHAKE",
        ]
        self.holder = self._run("mooncake_client", flags)
        self._wait("mooncake_client", self.holder, lambda: bool(self.segments()))

    def segments(self):
        """Return the names of the segments that the master has."""
        return (self._ask("get_all_segments") or "").split()

    @property
    def client(self):
        """Another client than the card's, made when it is first asked for."""
        if self._client is None:
            store = load().MooncakeDistributedStore()
            code = store.setup(
                HOST, "P2PHANDSHAKE", 0, SEGMENT_BYTES, "tcp", "", f"{HOST}:{self._port}"
            )
            assert code == 0, code
            self._client = store
        return self._client

    def signal(self, process, number):
        send_signal(process.pid, number)

    def kill_holder(self):
        self.holder = self._kill(self.holder)

    def kill_master(self):
        self.master = self._kill(self.master)

    def stop(self):
        if self._client is not None:
            self._client.close()
            self._client = None
        self.kill_holder()
        self.kill_master()
        shutil.rmtree(self._dir, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def _run(self, name, flags):
        with (self._dir / name).open("ab") as log:
            return subprocess.Popen(
                [program(name), *flags], stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, name, process, condition):
        deadline = time.monotonic() + START_S
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{(self._dir / name).read_text()}")
            time.sleep(0.02)

    def _ask(self, path):
        with contextlib.suppress(OSError):
            url = f"http://{HOST}:{self._flags['metrics_port']}/{path}"
            with urllib.request.urlopen(url, timeout=1) as answer:
                return answer.read().decode()
        return None

    @staticmethod
    def _kill(process):
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(10)

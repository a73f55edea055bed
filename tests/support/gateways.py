"""A gateway in a child process, and a look at what it leaves in /dev/shm.

(Not gateway.py: beside a script that runs from this folder, that would hide the package.)

with Gateway.serve(card="memory", shared_memory_size="64MiB") as gateway:
    ... gateway.address ...
    gateway.stop()
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from adp_kv.errors import GatewayError
from adp_kv.sdk.channel import Channel
from adp_kv.wire.messages import StatsReply, StatsRequest
from tests.support.process import PYTHON, RUN, SHM, Child, free_port, wait_until

RING_PREFIX = "adp_kv"
SERVING = r"serving (?:tcp|ipc)://"
START_TIMEOUT_S = 60.0
_POLL_S = 0.02


def own_name(text: str) -> str:
    """Return a ring's name by which ring_files() tells whose it is if several run tests."""
    return f"{RUN}-{text}" if RUN else text


def ring_files(name: str = "") -> set[Path]:
    """Return the ring files that exist now; only those with name in theirs.

    Whoever they belong to, but not those of a process that runs other tests meanwhile.
    """
    found = {path for path in SHM.glob(f"{RING_PREFIX}*") if name in path.name}
    return {path for path in found if not _is_of_others(path.name)}


def _is_of_others(file_name: str) -> bool:
    owner = re.match(rf"{RING_PREFIX}-(gw\d+)-", file_name)
    return owner is not None and owner[1] != RUN


class Gateway:
    """`python -m gateway` with the given arguments; Gateway.serve() for the usual case.

    Args:
        argv: what follows `python -m gateway`.
        env: added to the child's environment.
        ring_name: as argv has it, so that rings() sees this gateway's files alone.
        program: the module to run; tests.support.faulty_gateway has a card that fails.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        ring_name: str = "",
        program: str = "gateway",
    ) -> None:
        self.address = ""
        self.key_file = ""
        self._ring_name = ring_name
        self._rings_before = ring_files()
        self.child = Child([PYTHON, "-m", program, *argv], dict(env or {}), "gateway")

    @classmethod
    def serve(
        cls,
        card: str = "memory",
        card_options: Mapping[str, object] | None = None,
        address: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        program: str = "gateway",
        start_timeout_s: float = START_TIMEOUT_S,
        **settings: object,
    ) -> Self:
        """Start a gateway and wait until it serves.

        Args:
            card: kind of card.
            card_options: its options.
            address: where to listen; a free port of the loopback interface by default. Give
                the address of a gateway that is gone to restart it in its place.
            env: added to the child's environment.
            program: as for the class.
            start_timeout_s: a large card takes longer to make.
            settings: the gateway's other settings, by name.
        """
        address = address or f"tcp://127.0.0.1:{free_port()}"
        ring_name = own_name(re.sub(r"[^A-Za-z0-9]+", "-", address))
        argv = [f"--listen={address}", f"--card={card}", f"--ring-name={ring_name}"]
        argv += [f"--card-option={name}={value}" for name, value in (card_options or {}).items()]
        argv += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        gateway = cls(argv, env, ring_name=ring_name, program=program)
        gateway.address = address
        gateway.key_file = str(settings.get("key_file", ""))
        try:
            gateway.wait_ready(SERVING, start_timeout_s)
        except BaseException:
            gateway.close()
            raise
        return gateway

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_ready(
        self, ready: str | Callable[[], bool], timeout_s: float = START_TIMEOUT_S
    ) -> re.Match[str] | None:
        """Wait until the gateway serves.

        Args:
            ready: a regular expression to find in the log (its match is returned), or a
                function such as a ping that returns True.
            timeout_s: deadline.

        Raises:
            ChildError: It died, or the deadline passed.
        """
        found = None
        deadline = time.monotonic() + timeout_s
        while True:
            if isinstance(ready, str):
                found = re.search(ready, self.child.log())
            if found or (callable(ready) and ready()):
                return found
            if not self.child.alive() or time.monotonic() > deadline:
                raise self.child.fail(f"not ready within {timeout_s:g} s ({ready})")
            time.sleep(_POLL_S)

    def counters(self, timeout_s: float = 30.0) -> dict[str, int]:
        """Return its counters (StatsReply) since its start.

        Raises:
            ChildError: No answer in time.
        """
        deadline = time.monotonic() + timeout_s
        with Channel(self.address, timeout_s, key_file=self.key_file) as channel:
            asked = False
            while time.monotonic() < deadline:
                if not asked:
                    with contextlib.suppress(GatewayError):
                        channel.send(StatsRequest())
                        asked = True
                channel.wait(_POLL_S)
                message = channel.receive()
                if isinstance(message, StatsReply):
                    return message.counters
        raise self.child.fail(f"no counters within {timeout_s:g} s")

    def log(self) -> str:
        """Return what it has printed so far."""
        return self.child.log()

    def rings(self) -> set[Path]:
        """Return its ring files: those of its ring name, else those newer than itself."""
        if self._ring_name:
            return ring_files(self._ring_name)
        return ring_files() - self._rings_before

    def stop(self, timeout_s: float = 15.0) -> None:
        """Send SIGTERM; it must exit with 0 and leave nothing in /dev/shm.

        Raises:
            ChildError: It did not.
        """
        code = self.child.terminate(timeout_s)
        if code:
            raise self.child.fail(f"exit status {code} after SIGTERM")
        self.assert_no_rings()

    def kill9(self) -> None:
        """Kill it; whether a ring may be left then is for the test to say."""
        self.child.kill9()

    def assert_no_rings(self, timeout_s: float = 0.0) -> None:
        """Raise ChildError unless its ring files are gone within timeout_s."""
        wait_until(lambda: not self.rings(), timeout_s, f"{RING_PREFIX}* gone from {SHM}")

    def close(self) -> None:
        """Kill what is left and clean up; safe to call twice."""
        self.child.cleanup()

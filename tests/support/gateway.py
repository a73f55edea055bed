"""A gateway in a child process, and a look at what it leaves in /dev/shm."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.process import PYTHON, Child, wait_until

SHM = Path("/dev/shm")
RING_GLOB = "adp_kv*"
START_TIMEOUT_S = 30.0
_POLL_S = 0.02


def ring_files() -> set[Path]:
    """Return the ring files that exist now, of whatever process."""
    return set(SHM.glob(RING_GLOB))


class Gateway:
    """`python -m gateway` with the given arguments.

    Args:
        argv: what follows `python -m gateway`.
        env: added to the child's environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._rings_before = ring_files()
        self.child = Child([PYTHON, "-m", "gateway", *argv], dict(env or {}), "gateway")

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

    def log(self) -> str:
        """Return what it has printed so far."""
        return self.child.log()

    def rings(self) -> set[Path]:
        """Return the ring files that appeared since it was started."""
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
        wait_until(lambda: not self.rings(), timeout_s, f"{RING_GLOB} gone from {SHM}")

    def close(self) -> None:
        """Kill what is left and clean up; safe to call twice."""
        self.child.cleanup()

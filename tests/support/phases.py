"""A real engine in one phase of a lookup, a restore or a save, until the test lets it go on.

| phase                  | what stands still                                           |
| idle                   | nothing; no request                                         |
| lookup                 | the card has not answered which chunks are there            |
| get waits, put waits   | the last rank has not asked (two ranks or more)             |
| get reads              | the card has read and has not answered                      |
| get copies, put copies | copies of the last rank have begun and do not end           |
| put writes             | the card has written and has not answered                   |

Where the ring has too few slots for a request, the rest of it waits for them in each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.deployment import Deployment
from tests.support.engine import Engine
from tests.support.process import wait_until

REACHED_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """How a phase is entered and known.

    Attributes:
        fault: what the card does (faulty_gateway.py).
        hold: what the last rank holds (holds.py); "" for nothing.
        counter: of the gateway's, that has grown when the phase is there.
    """

    fault: str = ""
    hold: str = ""
    counter: str = ""


PHASES = {
    "idle": Phase(),
    "lookup": Phase(fault="exist hold", counter="lookups"),
    "get waits": Phase(hold="get", counter="gets"),
    "get reads": Phase(fault="read hold", counter="card_bytes_read"),
    "get copies": Phase(hold="restore", counter="get_grants"),
    "put waits": Phase(hold="put", counter="puts"),
    "put copies": Phase(hold="save", counter="put_grants"),
    "put writes": Phase(fault="write hold", counter="card_bytes_written"),
}


class Phases:
    """Brings an engine's requests into phases.

    Args:
        engine: with a connector to the deployment.
        deployment: faulty.
        folder: for files.
        ranks: of the engine.
    """

    def __init__(self, engine: Engine, deployment: Deployment, folder: Path, ranks: int) -> None:
        self._engine = engine
        self._deployment = deployment
        self._file = folder / "held"
        self._last_rank = ranks - 1
        self._reached = folder / f"held.{self._last_rank}"

    def enter(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Begin to generate, and return when that is in the phase."""
        phase = PHASES[name]
        if phase.hold:
            self._reached.unlink(missing_ok=True)
            self._file.touch()
            self._engine.rpc("adp_hold", phase.hold, str(self._file), [self._last_rank])
        before = self._count(phase)
        self._deployment.inject(phase.fault)
        if name == "idle":
            return
        self._engine.begin_generate([prompt], max_tokens=max_tokens)
        self._wait(lambda: self._count(phase) > before, name)
        if phase.hold:
            self._wait(self._reached.exists, f"{name} on rank {self._last_rank}")

    def _count(self, phase: Phase) -> int:
        # Patient: ranks that spin on every core can keep the gateway waiting for its turn.
        return self._deployment.gateway.counters(REACHED_TIMEOUT_S).get(phase.counter, 0)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or not self._engine.child.alive(), REACHED_TIMEOUT_S, what)

    def leave(self) -> None:
        """Let copies and requests go on; the card's faults stay."""
        self._file.unlink(missing_ok=True)

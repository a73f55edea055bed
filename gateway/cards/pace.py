"""Pauses of work in the background, so that what serves never waits long for it.

A lock that is let go and taken again at once is not had by whoever waits for it, nor is the
interpreter's: those who work piece by piece pause between two pieces, holding neither.
"""

from __future__ import annotations

import threading
import time
from typing import Final

_PAUSE_SHARE: Final = 1.0  # pauses are as long as the work
_MAX_PAUSE_S: Final = 0.05


class Pace:
    """Lets work have about half of the time, in small pieces."""

    def __init__(self, stop: threading.Event) -> None:
        """Begin with work.

        Args:
            stop: ends a pause.
        """
        self._stop = stop
        self._resumed = time.monotonic()

    def pause(self) -> bool:
        """Wait about as long as the work since the last pause took; true if it should end."""
        worked = time.monotonic() - self._resumed
        ending = self._stop.wait(min(worked * _PAUSE_SHARE, _MAX_PAUSE_S))
        self._resumed = time.monotonic()
        return ending

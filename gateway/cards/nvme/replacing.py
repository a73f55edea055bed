"""Reads beside a replacement in two steps, on devices that only store what is absent.

Replacing a value there is a DELETE and a STORE; a read that the device runs between the
two finds nothing, though the contract promises the old or the new value. So a read that
found nothing while a replacement was under way is run again once there is none.

Threads: any; callbacks run on the thread that ends the last replacement, or at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Replacements:
    """Counts replacements under way (see the module)."""

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        self._under_way = 0
        self._begun = 0
        self._waiting: list[Callable[[], None]] = []

    def mark(self) -> int:
        """Return what a read that starts now passes to may_have_hidden()."""
        with self._lock:
            return self._begun - self._under_way

    def begin(self) -> None:
        """Start one, before its DELETE."""
        with self._lock:
            self._under_way += 1
            self._begun += 1

    def end(self) -> None:
        """End one, after its STORE, however that went."""
        with self._lock:
            self._under_way -= 1
            ready: list[Callable[[], None]] = []
            if self._under_way == 0:
                ready, self._waiting = self._waiting, []
        for callback in ready:
            callback()

    def may_have_hidden(self, mark: int) -> bool:
        """Return whether one was under way at any time since mark()."""
        with self._lock:
            return self._begun != mark

    def when_none(self, callback: Callable[[], None]) -> None:
        """Call back when none is under way."""
        with self._lock:
            if self._under_way:
                self._waiting.append(callback)
                return
        callback()

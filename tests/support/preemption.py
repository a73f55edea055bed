"""What of a request's save was under way when vLLM preempted it (a core in this process).

Where a connector has blocks that come back soon, vLLM 0.29 and later waits and does not preempt
for want of blocks. So an overlap is made the other way it has: reset_running_requests.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any


class Preemptions:
    """Watches a scheduler.

    Args:
        scheduler: vLLM's.
        let_go: a file that holds copies of saves (holds.py): in the first step in which a
            running request has blocks pinned for a save, all that runs is preempted, and some
            steps later the file goes. None: only watch.

    Attributes:
        pinned: of each preempted request, how many of its blocks a save had pinned.
    """

    STEPS = 12

    def __init__(self, scheduler: Any, let_go: str | None) -> None:
        self.pinned: list[int] = []
        self._scheduler = scheduler
        self._let_go = None if let_go is None else Path(let_go)
        self._steps_left: int | None = None
        self._preempt, self._schedule = scheduler._preempt_request, scheduler.schedule
        scheduler._preempt_request = self._on_preempt
        scheduler.schedule = self._on_schedule

    def _num_pinned(self, request: Any) -> int:
        tables = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        owned = {block for table in tables for block in table}
        pins = self._scheduler.connector.scheduler.saves._pins
        return sum(block.block_id in owned for pin in pins.values() for block in pin.blocks)

    def _on_preempt(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.pinned.append(self._num_pinned(request))
        return self._preempt(request, *args, **kwargs)

    def _on_schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._let_go is not None:
            if self._steps_left is None and any(map(self._num_pinned, self._scheduler.running)):
                self._steps_left = self.STEPS
                with contextlib.suppress(RuntimeError):  # blocks that are pinned stay cached
                    self._scheduler.reset_prefix_cache(reset_running_requests=True)
            elif self._steps_left is not None:
                self._steps_left -= 1
                if self._steps_left <= 0:
                    self._let_go.unlink(missing_ok=True)
        return self._schedule(*args, **kwargs)

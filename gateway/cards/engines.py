"""Which executor of I/O a card gets.

Failure scope. CardError where the one that was asked for does not work here.
"""

from __future__ import annotations

import logging
from typing import Final, Literal, TypeAlias

from adp_kv.errors import CardError
from gateway.cards.io_engine import IoEngine, ThreadEngine
from gateway.cards.uring_engine import UringEngine

_logger: Final = logging.getLogger(__name__)

EngineKind: TypeAlias = Literal["auto", "io_uring", "threads"]


def start_engine(kind: EngineKind, queue_depth: int, num_threads: int) -> IoEngine:
    """Start an executor.

    Args:
        kind: "auto" takes io_uring where it works, and threads elsewhere.
        queue_depth: I/Os in flight at once, io_uring.
        num_threads: I/Os in flight at once, threads.

    Raises:
        CardError: "io_uring" was asked for and does not work here.
    """
    if kind != "threads":
        try:
            return UringEngine(queue_depth)
        except OSError as error:
            if kind == "io_uring":
                raise CardError(
                    f"io_engine='io_uring' does not work here: {error.strerror}; allow it "
                    "(kernel.io_uring_disabled=0, the container's seccomp profile) or set "
                    "io_engine to 'auto' or 'threads'"
                ) from error
            _logger.warning("no io_uring (%s): using %d I/O threads", error.strerror, num_threads)
    return ThreadEngine(num_threads)

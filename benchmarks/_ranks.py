"""Processes that measure together, one for each device, told what to do by their parent.

A child makes an object of its rank and calls the methods its parent names, all ranks the same
one at the same time; between two of them everyone() lets every rank say something to all.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_S = 150.0


def _serve(make: Callable[..., Any], rank: int, num_ranks: int, pipe: Any, args: Any) -> None:
    def everyone(text: bytes) -> list[bytes]:
        pipe.send(("say", text))
        return pipe.recv()

    try:
        worker = make(rank, num_ranks, everyone, *args)
        pipe.send(("result", None))
        while (asked := pipe.recv()) is not None:
            name, given = asked
            pipe.send(("result", getattr(worker, name)(*given)))
        worker.close()
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        raise


class Ranks:
    """num_ranks children, each with make(rank, num_ranks, everyone, *args)."""

    def __init__(self, make: Callable[..., Any], num_ranks: int, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._children = [], []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(make, rank, num_ranks, theirs, args))
            child.start()
            theirs.close()
            self._pipes.append(mine)
            self._children.append(child)
        try:
            self._results()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *given: Any) -> list[Any]:
        """Call a method on every rank; return what each returned."""
        for pipe in self._pipes:
            pipe.send((name, given))
        return self._results()

    def _results(self) -> list[Any]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            heard = [self._hear(rank, deadline) for rank in range(len(self._pipes))]
            kinds = {kind for kind, _ in heard}
            if kinds == {"result"}:
                return [value for _, value in heard]
            if kinds != {"say"}:
                raise RuntimeError(f"ranks are not in step: {kinds}")
            for pipe in self._pipes:
                pipe.send([value for _, value in heard])

    def _hear(self, rank: int, deadline: float) -> tuple[str, Any]:
        if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            raise RuntimeError(f"rank {rank} did not answer within {DEADLINE_S:g} s")
        kind, value = self._pipes[rank].recv()
        if kind == "error":
            raise RuntimeError(f"rank {rank}:\n{value}")
        return kind, value

    def close(self) -> None:
        """End all children; those that don't end are killed."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for child in self._children:
            child.join(20)
            if child.is_alive():
                child.kill()
                child.join()

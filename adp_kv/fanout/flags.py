"""What every rank says of its part in an exchange, in memory that all ranks of a group map.

    words  int64 [slots, ranks, 4]   number of the exchange, two words of a label, 1 or 0

A rank says before it queues an exchange what the exchange is and whether it brings its share,
and reads what all have said when its own device has ended the exchange: by then every rank
has queued it, and said so before. A slot is used again after 4 * max_ahead exchanges. No rank
can be further ahead of what another has yet to read than 2 * max_ahead: it has seen the end of
all exchanges but its last max_ahead, which means the other had queued them, and the other has
read all but its last max_ahead.

The memory has no name in a file system: the first rank makes it, the others open it through
its process. Owning thread: whoever holds the Fanout's lock. Failure scope: none of its own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = 4
_SHM = "/dev/shm"  # noqa: S108 - where a file is memory
_BYTES = 8 * WORDS


def flags_bytes(max_ahead: int, num_ranks: int) -> int:
    """Return bytes of the memory."""
    return 4 * max_ahead * num_ranks * _BYTES


class Flags:
    """One rank's view of the memory.

    Args:
        words: int64 [4 * max_ahead * num_ranks * WORDS], shared by the ranks.
        rank: in the group.
        num_ranks: of the group.
    """

    def __init__(self, words: NDArray[np.int64], rank: int, num_ranks: int) -> None:
        self._rows = words.reshape(-1, num_ranks, WORDS)
        self._rank = rank

    def say(self, number: int, label: tuple[int, int], *, brings: bool) -> None:
        """Say what this rank does in an exchange."""
        self._rows[number % len(self._rows), self._rank] = (number, *label, brings)

    def problem(self, number: int, label: tuple[int, int]) -> tuple[int, str] | None:
        """Return the first rank that did not bring its share of an exchange, and why."""
        rows = self._rows[number % len(self._rows)].tolist()
        expected = [number, *label, 1]
        for rank, said in enumerate(rows):
            if said == expected:
                continue
            if said == [*expected[:-1], 0]:
                return rank, "could not copy its share"
            return rank, f"took part with {said} in {expected}: its bytes are not used"
        return None


@contextmanager
def shared_memory(num_bytes: int) -> Iterator[str]:
    """Make memory without a name; yield where other processes may open it in the meantime.

    Raises:
        OSError: There is no room for it.
    """
    with tempfile.TemporaryFile(dir=_SHM) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full tmpfs is a SIGBUS in say()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def open_memory(path: str, num_bytes: int) -> NDArray[np.int64]:
    """Map the memory that another process has made.

    Raises:
        OSError: It is not there: the processes see each other's /proc differently, or may not.
    """
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.int64)

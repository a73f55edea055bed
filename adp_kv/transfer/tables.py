"""Address tables in pinned memory, never overwritten while the device may read them.

A chunk is filled from its start, one table after the other, and starts again once the
events behind its last tables have happened, one of each stream that read any: a stream runs
in order. When none can, a chunk is added: the caller never waits. Owning thread: the mover's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from adp_kv.transfer.device import Table, TorchDevice
from adp_kv.units import align_up

_ALIGN_WORDS = 16
"""Tables and their rows start at 128 bytes, so that no line of memory is written that a kernel may
be reading; the page kernel itself is compiled for rows at 16."""


@dataclass(slots=True)
class _Chunk:
    tensor: torch.Tensor
    array: NDArray[np.int64]
    used: int = 0
    ends: dict[int, torch.cuda.Event] = field(default_factory=dict)


def table_words(max_pages: int) -> int:
    """Return the words of a table of max_pages pages."""
    return 2 * align_up(max_pages, _ALIGN_WORDS)


class TablePool:
    """Pinned tables for one direction."""

    def __init__(self, device: TorchDevice, max_pages: int, num_chunks: int = 4) -> None:
        self._device = device
        self._chunk_words = 2 * table_words(max_pages)
        self._ready = deque(self._new_chunk() for _ in range(num_chunks))
        self._chunk = self._ready.popleft()
        self.num_chunks = num_chunks

    def take(self, src_addrs: NDArray[np.int64], dst_addrs: NDArray[np.int64]) -> Table:
        """Return a table that holds these addresses; hold_until() follows."""
        num_pages = src_addrs.size
        row = align_up(num_pages, _ALIGN_WORDS)
        assert 2 * row <= self._chunk_words
        if self._chunk.used + 2 * row > self._chunk_words:
            self._next_chunk()
        chunk = self._chunk
        first = chunk.used
        chunk.used += 2 * row
        chunk.array[first : first + num_pages] = src_addrs
        chunk.array[first + row : first + row + num_pages] = dst_addrs
        return Table(chunk.tensor, first, row, num_pages, chunk.ends)

    def _next_chunk(self) -> None:
        self._ready.append(self._chunk)
        oldest = self._ready[0]
        if all(end.query() for end in oldest.ends.values()):
            self._chunk = self._ready.popleft()
            self._chunk.used = 0
            self._chunk.ends.clear()
        else:
            self._chunk = self._new_chunk()
            self.num_chunks += 1

    def _new_chunk(self) -> _Chunk:
        tensor = self._device.allocate_pinned(self._chunk_words)
        return _Chunk(tensor, tensor.numpy())

"""Address tables in pinned memory, never overwritten while the device may read them.

A chunk is filled from its start, one table after the other, and starts again once the
event behind its last table has happened. When none has, a chunk is added: the caller
never waits. Owning thread: the mover's; one pool serves streams that run in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adp_kv.transfer.device import TorchDevice
from adp_kv.units import align_up

_ALIGN_WORDS = 2
"""Tables start at 16 bytes: the kernel is compiled once for that."""


@dataclass(slots=True)
class _Chunk:
    tensor: torch.Tensor
    array: NDArray[np.int64]
    used: int = 0
    last: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """int64 [2, capacity]: sources and targets of num_pages copies; valid until its event.

    Attributes:
        tensor: the words, both rows one after the other.
        num_pages: words used of each row.
        row_words: words from one row to the next.
    """

    tensor: torch.Tensor
    num_pages: int
    row_words: int
    chunk: _Chunk

    def hold_until(self, event: torch.cuda.Event) -> None:
        """Keep the table until the event has happened; called before the next take()."""
        self.chunk.last = event


class TablePool:
    """Pinned tables for one direction."""

    def __init__(self, device: TorchDevice, max_pages: int, num_chunks: int = 4) -> None:
        self._device = device
        self._chunk_words = 4 * align_up(max_pages, _ALIGN_WORDS)
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
        return Table(chunk.tensor[first : first + 2 * row], num_pages, row, chunk)

    def _next_chunk(self) -> None:
        self._ready.append(self._chunk)
        oldest = self._ready[0]
        if oldest.last is None or oldest.last.query():
            self._chunk = self._ready.popleft()
            self._chunk.used, self._chunk.last = 0, None
        else:
            self._chunk = self._new_chunk()
            self.num_chunks += 1

    def _new_chunk(self) -> _Chunk:
        tensor = self._device.allocate_pinned(self._chunk_words)
        return _Chunk(tensor, tensor.numpy())

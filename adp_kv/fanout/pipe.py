"""One rank's streams and staging: share → exchange → scatter, piece after piece.

    copy stream      ring → own region of a buffer                       (copy engine)
    exchange stream  regions of all ranks (NCCL), then buffer → pages     (page kernel)

Both carry successive pieces, of one layer and of the next, so that the copy of one runs beside
the exchange and the scatter of the one before it. A buffer is filled again only after the event
that ends its last use, waited for by the copy stream. The exchange's kernels take
multiprocessors and wait for other ranks: their stream has a priority of its own, because
streams of one priority may share a hardware queue with the model's and then wait behind
kernels that wait for them.

A piece has about as long on the host as its share has on the link (143 µs for a layer of 15 MiB
and two ranks), so it is one copy, one exchange, one launch and two events. Where its pages lie
in the buffer and where they belong the kernel reads from pinned memory, one place for each piece
in flight: a table that had to be copied would queue behind the ring's bytes on the copy engine.
Streams and events are torch's, but a wait goes by their handles through cupy's runtime, as copies
do: torch asks CUDA each time whether the current stream is being captured. A record does not, since
cupy keeps the GIL in it: should the stream's queue be full, the forward pass would stop, and
with it what the other ranks' exchanges wait for.

Owning thread: whoever holds the Fanout's lock. Failure scope: ExchangeError ends the group;
a copy that can't be queued concerns its piece, and all ranks hear of it by the flags.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from adp_kv.errors import TransferError
from adp_kv.fanout.exchange import Exchange
from adp_kv.fanout.flags import Flags
from adp_kv.fanout.plan import Piece, offsets_in_buffer
from adp_kv.fanout.settings import FanoutSettings
from adp_kv.fanout.shares import Source, Words, queue_share
from adp_kv.transfer.hardware import Hardware
from adp_kv.units import align_up

_URGENT = -1


@dataclass(slots=True)
class _Lane:
    """A staging buffer.

    Attributes:
        copied: recorded for each piece.
        free: what ends the last piece.
    """

    address: int
    copied: torch.cuda.Event
    free: torch.cuda.Event | None = None


class FanoutPipe:
    """Queues pieces on a device.

    Args:
        hardware: of the rank's mover.
        exchange: with the other ranks.
        flags: shared with them.
        settings: sizes.
    """

    def __init__(
        self, hardware: Hardware, exchange: Exchange, flags: Flags, settings: FanoutSettings
    ) -> None:
        assert settings.max_ahead >= settings.num_buffers > 1
        self._device = device = hardware.device
        self._engine, self._ring = hardware.engine, hardware.ring
        self._wait = hardware.engine.runtime.streamWaitEvent
        self._exchange, self._flags, self._settings = exchange, flags, settings
        self._copy_stream = device.stream(0)
        self._exchange_stream = device.stream(_URGENT)
        self._handles = self._copy_stream.cuda_stream, self._exchange_stream.cuda_stream
        words = align_up(settings.max_pages, 2)
        num, size = settings.num_buffers, settings.buffer_bytes
        self._staging = device.allocate(num * size)
        first = self._staging.data_ptr()
        self._lanes = deque(_Lane(first + i * size, device.event()) for i in range(num))
        # Of each piece in flight: where its pages lie in the buffer, and where they belong.
        self._pinned = device.allocate_pinned(settings.max_ahead * 2 * words)
        tables = self._pinned.view(settings.max_ahead, 2, words)
        words_of: Words = tables.numpy()
        self._tables = [(*table, *of) for table, of in zip(tables, words_of, strict=True)]
        self._ends = [device.event() for _ in range(settings.max_ahead)]
        self._last_mark: object = None

    def queue(
        self,
        number: int,
        piece: Piece,
        label: tuple[int, int],
        source: Source | None,
        after: object,
    ) -> tuple[torch.cuda.Event, str | None]:
        """Queue a piece.

        Args:
            number: of the exchange; the one max_ahead before it has ended.
            piece: its shares.
            label: what it belongs to.
            source: the whole transfer; None takes part without bytes and scatters nothing.
            after: mark before which no page may be touched.

        Returns:
            The event that ends the piece, and why this rank's part failed, if it did.

        Raises:
            ExchangeError, RuntimeError: The rank did not take part in the exchange.
        """
        slot = number % self._settings.max_ahead
        lane = self._lanes[0]
        self._lanes.rotate(-1)
        copying, exchanging = self._handles
        if lane.free is not None:
            self._wait(copying, lane.free.cuda_event)
        if after is not None and after is not self._last_mark:
            assert isinstance(after, torch.cuda.Event)
            self._wait(copying, after.cuda_event)
            self._last_mark = after
        error = self._queue_share(lane, piece, source)
        lane.copied.record(self._copy_stream)
        self._wait(exchanging, lane.copied.cuda_event)
        self._flags.say(number, label, brings=error is None)
        self._exchange.all_gather(lane.address, piece.region_bytes, exchanging)
        if source is not None and error is None:
            error = self._queue_scatter(lane, slot, piece, source)
        end = lane.free = self._ends[slot]
        end.record(self._exchange_stream)
        return end, error

    def end(self) -> torch.cuda.Event:
        """Return an event that happens when everything that was queued has ended."""
        copied = self._device.record(self._copy_stream)
        self._wait(self._handles[1], copied.cuda_event)
        return self._device.record(self._exchange_stream)

    def _queue_share(self, lane: _Lane, piece: Piece, source: Source | None) -> str | None:
        """Queue the copies of this rank's share into its region; return what is wrong."""
        if source is None:
            return "there is nothing to bring"
        rank = self._exchange.rank
        region = lane.address + rank * piece.region_bytes
        share = piece.borders[rank], piece.borders[rank + 1]
        try:
            queue_share(
                source, share, region, self._engine, self._ring.border_list, self._handles[0]
            )
        except (TransferError, RuntimeError) as error:
            return str(error)
        return None

    def _queue_scatter(self, lane: _Lane, slot: int, piece: Piece, source: Source) -> str | None:
        first, end = piece.borders[0], piece.borders[-1]
        num_pages = end - first
        lie, belong, lie_words, belong_words = self._tables[slot]
        np.add(offsets_in_buffer(piece.layout), lane.address, out=lie_words[:num_pages])
        belong_words[:num_pages] = source.pages[first:end]
        try:
            self._device.launch_prepared(
                self._exchange_stream,
                lie,
                belong,
                num_pages,
                source.copy.page_bytes,
                align=source.align(),
                num_programs=self._settings.page_programs,
            )
        except RuntimeError as error:
            return str(error)
        return None

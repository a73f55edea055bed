"""One rank of benchmarks.fanout: a ring that all ranks map, pages of its own, three ways."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from adp_kv.fanout.plan import Shape
from adp_kv.fanout.settings import FanoutSettings
from adp_kv.transfer.base import SliceCopy
from adp_kv.units import GiB, KiB, MiB

POOL_BYTES = 3 * GiB
PIECE_BYTES = 32 * MiB
NUM_CHECKED = 64
NUM_LANES = 4
WARM_UPS = 3
PAGES_PER_CHUNK = {18 * KiB: 16, 41 * KiB: 4, 72 * KiB: 4}
"""Page bytes → pages of a chunk of 256 tokens: MLA at 16 tokens a block, fp8 and bf16 at 64."""


class Rank:
    """Measures what its parent asks for, in step with the other ranks.

    Args:
        rank, num_ranks: of the group.
        everyone: a round of all ranks.
        ring_path: of the ring, as this process can open it.
        ring_bytes: of it.
        port: where the ranks of the baselines' process group meet.
    """

    def __init__(
        self, rank: int, num_ranks: int, everyone: Any, ring_path: str, ring_bytes: int, port: int
    ) -> None:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        import logging

        import torch
        import torch.distributed as dist

        from adp_kv.fanout.start import start_fanout
        from adp_kv.transfer.factory import open_mover

        logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
        self._torch, self._dist = torch, dist
        self._rank, self._num_ranks = rank, num_ranks
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=num_ranks,
            device_id=device,
        )
        with Path(ring_path).open("r+b") as file:
            self._ring = np.frombuffer(mmap.mmap(file.fileno(), ring_bytes), np.uint8)
        self._address = self._ring.ctypes.data
        self._mover = open_mover(device)
        self._mover.register_ring(self._address, ring_bytes)
        self._hardware = self._mover.hardware
        fanout = start_fanout(self._mover, rank, everyone, FanoutSettings())
        assert fanout is not None, "fan-out is off"
        assert len(fanout.ranks) == num_ranks, "the ranks form more groups than one"
        self._group = fanout
        self._num_labels = 0
        self._pool = torch.zeros(POOL_BYTES, dtype=torch.uint8, device=device)
        self._staging = torch.empty(NUM_LANES * PIECE_BYTES, dtype=torch.uint8, device=device)
        self._streams = [torch.cuda.Stream(device, priority) for priority in (0, -1, -1)]
        self._tables: dict[int, Any] = {}

    def close(self) -> None:
        """Let go of everything."""
        self._torch.cuda.synchronize()
        self._group.close(5.0)
        self._mover.close()
        self._dist.destroy_process_group()

    def link(self, num_bytes: int, repeats: int) -> list[float]:
        """Return seconds of a contiguous copy, all ranks at once, each of bytes of its own.

        As in an exchange: what one rank had just read would come to another from a cache.
        """
        runtime = self._hardware.engine.runtime
        stream = self._torch.cuda.current_stream().cuda_stream
        to, at = self._pool.data_ptr(), self._address + self._rank * num_bytes
        return self._times(lambda: runtime.memcpyAsync(to, at, num_bytes, 1, stream), repeats)

    def all_gather(self, num_bytes: int, repeats: int) -> list[float]:
        """Return seconds of an all-gather that ends with num_bytes on every rank."""
        part = num_bytes // self._num_ranks
        whole = self._pool[: part * self._num_ranks]
        mine = whole[self._rank * part : (self._rank + 1) * part]
        return self._times(lambda: self._dist.all_gather_into_tensor(whole, mine), repeats)

    def run(
        self, ways: tuple[str, ...], page_bytes: int, layer_bytes: int, layers: int, turns: int
    ) -> list[list[float]]:
        """Return seconds until this rank has all layers: for each way, those of every turn.

        In a turn all ways run one after the other, so that what disturbs the host disturbs all;
        bytes are checked before.

        Args:
            ways: of "readall", "rank0", "fanout" (always), "choice" (as a restore decides).
            page_bytes: of every page, one of PAGES_PER_CHUNK.
            layer_bytes: about how much a layer is.
            layers: one after the other, each with its own fence.
            turns: how often.
        """
        copies = self._copies(page_bytes, layer_bytes, layers)
        starts = [self._start_of(way, copies) for way in ways]
        for way, start in zip(ways, starts, strict=True):
            self._pool.fill_(0xA5)
            start()
            self._torch.cuda.synchronize()
            for copy in copies[:: max(1, layers // 4)]:
                self._check(copy, way)
        every = [[self._time(start) for start in starts] for _ in range(WARM_UPS + turns)]
        return [list(times) for times in zip(*every[WARM_UPS:], strict=True)]

    def _start_of(self, way: str, copies: list[SliceCopy]) -> Any:
        begin = getattr(self, f"begin_{way}")

        def start() -> None:
            mark = self._mover.mark()  # one for all layers, as a step has
            for copy in copies:
                begin(copy, mark)

        return start

    def _copies(self, page_bytes: int, layer_bytes: int, num_layers: int) -> list[SliceCopy]:
        """Return layers of chunks of 256 tokens, as many as fit, at least a page."""
        self._tables = {}
        per_slice = min(PAGES_PER_CHUNK[page_bytes], max(1, layer_bytes // page_bytes))
        num = max(1, layer_bytes // (page_bytes * per_slice))
        places = np.random.default_rng(1).permutation(POOL_BYTES // page_bytes).astype(np.int64)
        assert num * num_layers * per_slice * page_bytes <= self._ring.size
        copies = []
        for layer in range(num_layers):
            numbers = np.arange(layer * num, (layer + 1) * num, dtype=np.int64)
            chosen = places[layer * num * per_slice : (layer + 1) * num * per_slice]
            pages = (self._pool.data_ptr() + chosen * page_bytes).reshape(num, per_slice)
            slices = self._address + numbers * (per_slice * page_bytes)
            copies.append(SliceCopy(slices, pages, page_bytes))
        return copies

    def _check(self, copy: SliceCopy, way: str) -> None:
        per_slice = copy.page_addrs.shape[1]
        num = copy.slice_addrs.size * per_slice
        chosen = {0, num - 1, *np.random.default_rng(2).permutation(num)[:NUM_CHECKED].tolist()}
        for page in chosen:
            row, column = divmod(page, per_slice)
            at = int(copy.page_addrs[row, column]) - self._pool.data_ptr()
            there = self._pool[at : at + copy.page_bytes].cpu().numpy()
            first = int(copy.slice_addrs[row]) - self._address + column * copy.page_bytes
            if not np.array_equal(there, self._ring[first : first + copy.page_bytes]):
                raise AssertionError(f"{way}: page {page} of {num} arrived with other bytes")

    def _times(self, start: Any, repeats: int) -> list[float]:
        return [self._time(start) for _ in range(WARM_UPS + repeats)][WARM_UPS:]

    def _time(self, start: Any) -> float:
        """Return seconds from when all ranks are ready to the end of what start() began."""
        cuda = self._torch.cuda
        self._dist.barrier()
        cuda.synchronize()
        began = time.perf_counter()
        start()
        cuda.synchronize()
        return time.perf_counter() - began

    def begin_readall(self, copy: SliceCopy, mark: Any) -> None:
        """Every rank copies everything."""
        self._mover.restore(copy, mark).fence()

    def begin_choice(self, copy: SliceCopy, mark: Any) -> None:
        """What a restore does with a transfer of this size."""
        takes = self._group.takes(shape_of(copy))
        self.begin_fanout(copy, mark) if takes else self.begin_readall(copy, mark)

    def begin_fanout(self, copy: SliceCopy, mark: Any) -> None:
        """Every rank copies a share and the ranks exchange the rest."""
        self._num_labels += 1
        self._group.restore((self._num_labels, 0), shape_of(copy), copy, mark).fence()

    def begin_rank0(self, copy: SliceCopy, mark: Any) -> None:
        """Rank 0 copies, in pieces, and broadcasts; every rank scatters."""
        del mark
        torch, runtime = self._torch, self._hardware.engine.runtime
        read, send, scatter = self._streams
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        per_piece = PIECE_BYTES // copy.page_bytes
        pages, inside = self._device_tables(copy)
        free: list[Any] = [None] * NUM_LANES
        for number, first in enumerate(range(0, pages.numel(), per_piece)):
            count = min(per_piece, pages.numel() - first)
            num_bytes, lane = count * copy.page_bytes, number % NUM_LANES
            part = self._staging[lane * PIECE_BYTES :][:num_bytes]
            if free[lane] is not None:
                read.wait_event(free[lane])
                send.wait_event(free[lane])
            if self._rank == 0:
                source = int(copy.slice_addrs[0]) + first * copy.page_bytes
                runtime.memcpyAsync(part.data_ptr(), source, num_bytes, 1, read.cuda_stream)
            with torch.cuda.stream(send):
                send.wait_stream(read)
                self._dist.broadcast(part, 0)
            scatter.wait_stream(send)
            targets = pages[first : first + count]
            self._hardware.device.launch(
                scatter, inside[lane][:count], targets, copy.page_bytes, align=16, num_programs=64
            )
            free[lane] = self._hardware.device.record(scatter)
        main.wait_stream(scatter)

    def _device_tables(self, copy: SliceCopy) -> Any:
        """Return where pages belong, and where they lie in each staging buffer; made once."""
        if id(copy) not in self._tables:
            torch, device = self._torch, self._pool.device
            pages = torch.from_numpy(copy.page_addrs.reshape(-1)).to(device)
            steps = torch.arange(PIECE_BYTES // copy.page_bytes, device=device) * copy.page_bytes
            base = self._staging.data_ptr()
            inside = [steps + (base + lane * PIECE_BYTES) for lane in range(NUM_LANES)]
            self._tables[id(copy)] = pages, inside, copy
        return self._tables[id(copy)][:2]


def shape_of(copy: SliceCopy) -> Shape:
    """Return the sizes of a transfer."""
    return Shape(copy.slice_addrs.size, copy.page_addrs.shape[1], copy.page_bytes)

"""Cards beside fio, LMCache's raw-block package and files: GB/s, CPU s/GB, batch latency.

python -m benchmarks.card [--out DIR] [--path DIR] [--total BYTES] [--fio PROGRAM] [--quick]

Each card stores values in order and reads them in random order, in batches of 32 MiB, two at a
time, from registered memory; fio does the same I/O on the very same slab file, before and
after. Values are 128 KiB, 255 KiB and 2 MiB. Then a gateway process with the memory card: what a
get of 1500 objects of two fragments costs, and what eight ranks get out of one core. Last,
how long a slab card with 8 M records takes to open. Runs without a GPU.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from adp_kv.units import GiB, KiB, MiB
from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import CacheDecl, Get, Granted, Release
from benchmarks._card_peers import Figure, Files, RawBlock, buffers, find_fio, fio, measured
from benchmarks._card_start import time_to_open
from benchmarks._engines import cpu_usage
from benchmarks._results import Results, argument_parser
from gateway.cards.base import Batch, Card, Op
from gateway.cards.memory import MemoryCard, MemorySettings
from gateway.cards.mooncake.card import MooncakeCard
from gateway.cards.mooncake.settings import MooncakeSettings
from gateway.cards.slab import SlabCard
from gateway.cards.slab_settings import SlabSettings
from tests.support.gateways import Gateway
from tests.support.mooncake import MooncakeStore
from tests.support.serving import Rank, put, random_chunks, welcome_all

CODE = ("gateway",)
SIZES = {"128KiB": 128 * KiB, "255KiB": 255 * KiB, "2MiB": 2 * MiB}
BATCH_BYTES = 32 * MiB
IN_FLIGHT = 2
DEPTH = 128
ROUNDS = 3
TIMEOUT_S = 120.0
OVER_FIO = 0.95
CPU_CHECKED, CPU_UNCHECKED = 0.12, 0.06


class Rig:
    """An open card that moves values of one size, and how long its batches took."""

    def __init__(self, card: Card, memory: np.ndarray, size: int, total: int) -> None:
        self._card = card
        self._memory = memory
        self._size = size
        self._stride = -(-size // 4096) * 4096
        self.num_values = total // self._stride
        self._keys = np.random.default_rng(1).integers(
            1, 2**64, (self.num_values, 2), dtype=np.uint64
        )
        self._began: dict[int, float] = {}
        self._room = threading.Semaphore(IN_FLIGHT)
        self._latencies: list[float] = []
        self._bad = 0
        self._token = 0
        card.open(self._on_done)
        card.register(memory.ctypes.data, memory.size)

    def _on_done(self, token: int, status: np.ndarray) -> None:
        self._latencies.append(time.perf_counter() - self._began.pop(token))
        self._bad += int((status != 0).sum())
        self._room.release()

    def move(self, *, write: bool) -> tuple[Figure, list[float]]:
        """Store or load every value; return the figure and the batches' latencies in s."""
        order = np.arange(self.num_values)
        if not write:
            order = np.random.default_rng().permutation(order)
        self._latencies = []
        figure = measured(self.num_values * self._size, lambda: self._run(order, write=write))
        assert self._bad == 0, f"{self._bad} values failed"
        return figure, self._latencies

    def _run(self, order: np.ndarray, *, write: bool) -> None:
        rows = BATCH_BYTES // self._stride
        room = self._memory.size // self._stride
        for start in range(0, len(order), rows):
            mine = order[start : start + rows]
            places = np.arange(start, start + len(mine)) % room * self._stride
            self._token += 1
            assert self._room.acquire(timeout=TIMEOUT_S), "the card does not answer"
            self._began[self._token] = time.perf_counter()
            self._card.submit(
                Batch(
                    Op.WRITE if write else Op.READ,
                    self._token,
                    np.zeros(len(mine), np.uint16),
                    self._keys[mine],
                    (self._memory.ctypes.data + places).astype(np.uint64),
                    np.full(len(mine), self._size, np.uint32),
                )
            )
        for _ in range(IN_FLIGHT):
            assert self._room.acquire(timeout=TIMEOUT_S), "the card does not answer"
        for _ in range(IN_FLIGHT):
            self._room.release()

    def close(self) -> None:
        self._card.unregister()
        self._card.close()


def median(figures: list[Figure]) -> Figure:
    """Return the median of each column."""
    return Figure(
        statistics.median(f.gb_s for f in figures),
        statistics.median(f.cpu_s_per_gb for f in figures),
    )


def add(results: Results, name: str, figure: Figure, cpu_target: float | None = None) -> None:
    """Add the rows of one way."""
    results.add(f"{name}.gb_s", figure.gb_s, "GB/s", better="higher")
    results.add(
        f"{name}.cpu_s_per_gb", figure.cpu_s_per_gb, "CPU s/GB", better="lower", target=cpu_target
    )


def add_latencies(results: Results, name: str, latencies: list[float]) -> None:
    """Add the batch latencies."""
    for quantile in (50, 99):
        value = float(np.percentile(latencies, quantile)) * 1e3
        results.add(f"{name}.batch_p{quantile}_ms", value, "ms", better="lower")


def slab(path: Path, size: int, total: int, *, checksums: bool) -> SlabCard:
    """Return a closed slab card with room for the values twice: they are stored again."""
    slot = -(-size // 4096) * 4096
    return SlabCard(
        SlabSettings(
            path=str(path),
            capacity_bytes=total + 2 * BATCH_BYTES,
            slot_bytes=slot,
            checksums=checksums,
            queue_depth=DEPTH,
            scrub_bytes_per_s=0,
            evict_above=1.0,
        )
    )


def measure_slab(results: Results, path: Path, name: str, total: int, program: str | None) -> None:
    """A slab card with and without checksums, its peers in between, all on one file."""
    size, memory = SIZES[name], buffers(256 * MiB)
    file = path / "card" / "slab-0000.data"
    seen: dict[tuple[str, bool], list[Figure]] = {}
    latencies: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for kind, checksums in (("slab", True), ("slab-unchecked", False)):
            rig = Rig(slab(path / "card", size, total, checksums=checksums), memory, size, total)
            rig.move(write=True)  # a fresh file's extents are slow once
            for write in (True, False):
                figure, took = rig.move(write=write)
                seen.setdefault((kind, write), []).append(figure)
                if checksums:
                    latencies[write] += took
            rig.close()
            if program:
                for write in (True, False):
                    depth = min(DEPTH, IN_FLIGHT * (BATCH_BYTES // size))  # as a card is offered
                    figure = fio(program, file, size, total, write=write, depth=depth)
                    seen.setdefault(("fio", write), []).append(figure)
            # fio wrote over the values, and a card must not be measured on CORRUPT ones.
            (path / "card" / "card.json").unlink()
    measure_peers(seen, path, file, (memory, size, total))
    for (kind, write), figures in seen.items():
        way = f"card.{kind}.{'write' if write else 'read'}.{name}"
        limit = {"slab": CPU_CHECKED, "slab-unchecked": CPU_UNCHECKED}.get(kind)
        add(results, way, median(figures), limit if name == "128KiB" else None)
        if kind == "slab":
            add_latencies(results, way, latencies[write])
        if kind.startswith("slab") and program:
            ratio = median(figures).gb_s / median(seen["fio", write]).gb_s
            target = OVER_FIO if kind == "slab" and name == "128KiB" else None
            results.add(f"{way}.over_fio", ratio, "ratio", better="higher", target=target)


def measure_peers(
    seen: dict[tuple[str, bool], list[Figure]],
    path: Path,
    file: Path,
    load: tuple[np.ndarray, int, int],
) -> None:
    """LMCache's package on the same file, and one file a value on the same file system."""
    memory, size, total = load
    stride = -(-size // 4096) * 4096
    count = total // stride
    order = np.random.default_rng(3).permutation(count)
    try:
        raw = RawBlock(file, memory.data, DEPTH)
    except ImportError:
        print("lmcache_rust_raw_block_io: not installed; its rows are left out", flush=True)
        raw = None
    files = Files(path / "files", memory.data)
    for write in (True, False):
        for _ in range(ROUNDS if raw else 0):
            move = lambda: raw.move(size, order, stride, write=write)  # noqa: B023, E731
            seen.setdefault(("raw-block", write), []).append(measured(count * size, move))
        move = lambda: files.move(size, order, write=write)  # noqa: B023, E731
        seen.setdefault(("files", write), []).append(measured(count * size, move))
    if raw:
        raw.close()
    files.close()


def measure_memory(results: Results, name: str, total: int) -> None:
    """The memory card, with and without checksums."""
    size, memory = SIZES[name], buffers(256 * MiB)
    for kind, verify in (("memory", False), ("memory-verify", True)):
        settings = MemorySettings(
            capacity_bytes=total + 4 * BATCH_BYTES,
            max_value_bytes=-(-size // 4096) * 4096,
            verify=verify,
            evict_above=1.0,
        )
        rig = Rig(MemoryCard(settings), memory, size, total)
        rig.move(write=True)
        for write in (True, False):
            runs = [rig.move(write=write) for _ in range(ROUNDS)]
            way = f"card.{kind}.{'write' if write else 'read'}.{name}"
            add(results, way, median([figure for figure, _ in runs]))
            add_latencies(results, way, [took for _, some in runs for took in some])
        rig.close()


def measure_mooncake(results: Results, name: str, total: int) -> None:
    """A Mooncake store in processes beside this one, over TCP; CPU is the gateway's side alone."""
    size, memory = SIZES[name], buffers(256 * MiB)
    seen: dict[bool, list[tuple[Figure, list[float]]]] = {True: [], False: []}
    for _ in range(ROUNDS):  # a store takes a key once, so each round has one of its own
        with MooncakeStore(segment_bytes=total + total // 4 + 4 * BATCH_BYTES) as store:
            settings = MooncakeSettings(masters=(store.address,))
            rig = Rig(MooncakeCard(settings), memory, size, total)
            for write in (True, False):
                seen[write].append(rig.move(write=write))
            rig.close()
    for write, runs in seen.items():
        way = f"card.mooncake-tcp.{'write' if write else 'read'}.{name}"
        add(results, way, median([figure for figure, _ in runs]))
        add_latencies(results, way, [took for _, some in runs for took in some])


class Ranks:
    """A gateway process with the memory card, and ranks that take what it grants at once."""

    def __init__(self, gateway: Gateway, num_ranks: int, object_bytes: int) -> None:
        slice_bytes = object_bytes // num_ranks
        self.ranks = [
            Rank(
                gateway.address,
                rank,
                [CacheDecl(0, "layer.0", slice_bytes, rank, num_ranks)],
                world_size=num_ranks,
            )
            for rank in range(num_ranks)
        ]
        for rank in self.ranks:
            rank.send(rank.hello)
        for rank, welcome in zip(self.ranks, welcome_all(self.ranks), strict=True):
            rank.attach(welcome)
        self._seq = 1000

    def get(self, packed: bytes, num_objects: int) -> None:
        """One get of all ranks, to its end."""
        self._seq += 1
        for rank in self.ranks:
            rank.send(Get(self._seq, [0], packed))
        for rank in self.ranks:
            left = num_objects
            while left:
                granted = rank.expect(Granted, TIMEOUT_S)
                assert not any(granted.status), "an object was missed"
                left -= len(granted.slots) // 4
                rank.send(Release(self._seq, granted.first, ok=True))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def measure_gateway(results: Results, *, quick: bool) -> None:
    """CPU of one get of 1500 x 2 fragments, and GB/s a core with eight ranks."""
    options = {"capacity_bytes": "64MiB", "max_value_bytes": 512, "num_databases": 2}
    settings = {"shared_memory_size": "64MiB", "fragment_size": 512}
    with Gateway.serve("memory", options, **settings) as gateway:
        team = Ranks(gateway, 1, 1024)
        cpu = measure_gets(gateway, team, 1500, 20 if quick else 200)
        results.add("gateway.get1500x2.cpu_ms", cpu[0] * 1e3, "ms", better="lower", target=1.0)
        results.add("gateway.get1500x2.process_cpu_ms", cpu[1] * 1e3, "ms", better="lower")
        team.close()
    options = {"capacity_bytes": "512MiB", "max_value_bytes": MiB, "prefault": True}
    with Gateway.serve("memory", options, shared_memory_size="512MiB") as gateway:
        team = Ranks(gateway, 8, MiB)
        main_s, all_s = measure_gets(gateway, team, 128, 10 if quick else 60)
        moved = 128 * MiB / 1e9
        results.add(
            "gateway.8ranks.gb_per_core_s", moved / all_s, "GB/s", better="higher", target=10.0
        )
        results.add("gateway.8ranks.main_gb_per_core_s", moved / main_s, "GB/s", better="higher")
        team.close()


def measure_gets(
    gateway: Gateway, team: Ranks, num_objects: int, times: int
) -> tuple[float, float]:
    """Store objects and get them; return CPU seconds of the main thread and of all, a get."""
    chunks = random_chunks(num_objects)
    put(team.ranks, 1, chunks, [0], timeout_s=TIMEOUT_S)
    packed = pack_keys(chunks)
    while not all(team.ranks[0].lookup(chunks)):
        time.sleep(0.01)
    for _ in range(3):
        team.get(packed, num_objects)
    before = cpu_usage(gateway.child.pid)
    for _ in range(times):
        team.get(packed, num_objects)
    used = cpu_usage(gateway.child.pid).since(before)
    return used.main_s / times, used.all_s / times


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--path", type=Path, help="where slabs are made [the temporary folder]")
    parser.add_argument("--total", type=int, default=GiB, help="bytes of values")
    parser.add_argument("--fio", default="", help="the fio program [from PATH]")
    parser.add_argument("--quick", action="store_true", help="128 KiB and an eighth of the bytes")
    args = parser.parse_args()
    results = Results("card")
    program = find_fio(args.fio)
    total = args.total // 8 if args.quick else args.total
    sizes = ["128KiB"] if args.quick else list(SIZES)
    folder = Path(tempfile.mkdtemp(prefix="adp-card-", dir=args.path))
    try:
        for name in sizes:
            place = folder / name
            place.mkdir()
            measure_slab(results, place, name, total, program)
            shutil.rmtree(place)
            measure_memory(results, name, total)
            measure_mooncake(results, name, total)
        measure_gateway(results, quick=args.quick)
        count = 250_000 if args.quick else 8_000_000
        took_s, cpu_s = time_to_open(folder / "start", count)
        name = f"card.slab.open_{count}_records"
        results.add(f"{name}_s", took_s, "s", better="lower", target=10.0)
        results.add(f"{name}_cpu_s", cpu_s, "CPU s", better="lower")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results.write(args.out)


if __name__ == "__main__":
    main()

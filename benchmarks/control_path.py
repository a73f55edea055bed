"""What a restore costs beside its bytes: CPU of gateway and client for messages and arrays.

python -m benchmarks.control_path [--out DIR] [--quick]

A real gateway with the memory card and a real rank client, layers as in benchmarks.restore, but
objects of 4 KiB and a mover that plans a transfer and moves nothing. Batches have as many
objects as real ones, so what is left is what a restore costs per grant and per object. Runs
without a GPU. `wall` has to stay below what the bytes take, or the link waits for Python.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adp_kv.layout.geometry import CacheGeometry
from adp_kv.sdk.jobs import Job
from adp_kv.sdk.rank_client import RESTORE, SAVE_REST, RankClient, declare
from adp_kv.transfer.base import Mark, Mover, SliceCopy, Ticket
from adp_kv.transfer.plan import RESTORE as THRESHOLDS
from adp_kv.transfer.plan import Limits, make_plan
from adp_kv.transfer.settings import MoverSettings
from adp_kv.units import GiB, KiB, MiB
from adp_kv.wire.messages import PROTOCOL_VERSION, CacheDecl, Hello
from benchmarks._engines import Usage, cpu_usage
from benchmarks._results import Results, argument_parser
from gateway.config import Settings
from tests.support.gateways import Gateway
from tests.support.process import wait_until

CODE = ("adp_kv/sdk", "adp_kv/wire", "adp_kv/layout", "adp_kv/transfer", "gateway")
OBJECT_BYTES = 4 * KiB
LINK = 55e9
TIMEOUT_S = 60.0
BATCHES = (16 * MiB, 64 * MiB, 256 * MiB)


@dataclass(frozen=True, slots=True)
class Case:
    """A restore: chunks x layers, with the real size of an object and its pages."""

    name: str
    num_chunks: int
    num_layers: int
    object_bytes: int
    pages: int

    @property
    def at_link_s(self) -> float:
        """What the real bytes take at the speed of an H200's link."""
        return self.num_chunks * self.num_layers * self.object_bytes / LINK


CASES = (Case("60k", 235, 32, MiB, 16), Case("196k", 766, 61, 288 * KiB, 4))
QUICK_CASES = (Case("60k", 20, 4, MiB, 16),)


class Ended(Ticket):
    """A transfer of nothing."""

    def done(self) -> bool:
        return True

    def fence(self) -> None:
        return


class PlanningMover(Mover):
    """Plans each transfer as a device's mover does, and moves nothing."""

    def register_ring(self, address: int, num_bytes: int) -> None:
        borders = np.arange(address + GiB, address + num_bytes, GiB, dtype=np.int64)
        s = MoverSettings()
        staging = s.staging_bytes // s.staging_buffers
        self._limits = Limits(borders, staging, s.direct_bytes, s.max_pages, has_batch=True)

    def mark(self) -> Mark:
        return Mark

    def restore(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        for _piece in make_plan(copy, self._limits, THRESHOLDS).pieces():
            pass
        return Ended()

    def save(self, copy: SliceCopy, after: Mark | None) -> Ticket:
        return Ended()

    def close(self) -> None:
        return


class Rig:
    """A gateway in a process of its own and one rank's client in this one.

    Args:
        case: what is restored.
        batch_bytes: the gateway's, for objects of their real size.
        object_bytes: what they have here.
        num_slots: ring slots in each direction; by default those of a ring of 6 GiB.
        how: more settings of the gateway.
    """

    def __init__(
        self,
        case: Case,
        batch_bytes: int,
        object_bytes: int = OBJECT_BYTES,
        num_slots: int = 0,
        **how: Any,
    ) -> None:
        self.case = case
        objects = case.num_chunks * case.num_layers
        slots = num_slots or 3 * GiB // case.object_bytes
        self.gateway = Gateway.serve(
            "memory",
            # An eighth free: nothing is evicted.
            {"capacity_bytes": objects * 5 // 4 * object_bytes, "max_value_bytes": object_bytes},
            shared_memory_size=2 * slots * object_bytes,
            batch_bytes=max(1, batch_bytes // case.object_bytes) * object_bytes,
            **how,
        )
        page = object_bytes // case.pages
        num_blocks = case.num_chunks * case.pages
        self.caches = [
            CacheGeometry(i, f"layer.{i}", 1 << 40, page, page, num_blocks, case.pages)
            for i in range(case.num_layers)
        ]
        rng = np.random.default_rng(3)
        self.chunks = rng.integers(0, 2**64, (case.num_chunks, 2), dtype=np.uint64)
        self.blocks = rng.permutation(num_blocks).reshape(case.num_chunks, case.pages)
        hello = self.hello(0, declare(self.caches))
        self.client = RankClient(
            hello, self.caches, PlanningMover(), 0, self.gateway.address, 10.0, 10.0
        )
        self.client.start()
        if not self.client.wait_settled():
            self.gateway.close()
            raise AssertionError(self.client.off_reason)

    def hello(self, rank: int, caches: list[CacheDecl]) -> Hello:
        """Return the Hello of a rank, or of the scheduler side."""
        return Hello(
            version=PROTOCOL_VERSION,
            release="benchmark",
            engine="benchmark",
            rank=rank,
            world_size=1,
            namespace=bytes(16),
            caches=caches,
            pid=os.getpid(),
        )

    def store(self) -> None:
        """Store every object once."""
        job = Job(1, self.chunks, self.blocks, self.caches, TIMEOUT_S)
        self.client.submit_save(job, SAVE_REST, self.caches, Mark)
        committed = self.case.num_chunks
        wait_until(
            lambda: self.gateway.counters().get("chunks_committed", 0) >= committed,
            TIMEOUT_S,
            "everything is stored",
        )

    def restore(self, number: int) -> list[float]:
        """Restore every object; return seconds until each layer's copy was started."""
        job = Job(number, self.chunks, self.blocks, self.caches, TIMEOUT_S)
        began = time.perf_counter()
        self.client.submit_restore(job, RESTORE, None)
        took = []
        for cache in self.caches:
            job.wait_cache(cache.index)
            took.append(time.perf_counter() - began)
        wait_until(lambda: job.finished, TIMEOUT_S, "everything is released")
        assert not job.failed_chunks.any(), job.reason
        return took

    def client_cpu_s(self) -> float:
        """Return CPU seconds of the client's thread so far."""
        task = Path(f"/proc/self/task/{self.client._thread.native_id}/schedstat")
        return int(task.read_text().split()[0]) / 1e9

    def gateway_cpu(self) -> Usage:
        """Return CPU seconds of the gateway so far."""
        return cpu_usage(self.gateway.child.pid)

    def close(self) -> None:
        """End both."""
        self.client.close()
        self.gateway.close()


def measure(case: Case, batch_bytes: int, repeats: int, results: Results, prefix: str) -> None:
    """Restore some times and add rows: wall, and CPU of client and gateway, a restore."""
    rig = Rig(case, batch_bytes)
    try:
        rig.store()
        rig.restore(2)
        counted, cpu, client = rig.gateway.counters(), rig.gateway_cpu(), rig.client_cpu_s()
        took = [rig.restore(3 + i)[-1] for i in range(repeats)]
        cpu, client = rig.gateway_cpu().since(cpu), rig.client_cpu_s() - client
        grants = rig.gateway.counters()["get_grants"] - counted["get_grants"]
    finally:
        rig.close()
    objects = case.num_chunks * case.num_layers * repeats
    results.add(f"{prefix}.wall", statistics.median(took) * 1e3, "ms", better="lower")
    results.add(f"{prefix}.grants", grants / repeats, "grants", better="lower")
    for name, seconds in (
        ("gateway.main", cpu.main_s),
        ("gateway.card", cpu.all_s - cpu.main_s),
        ("client", client),
    ):
        results.add(f"{prefix}.{name}", seconds / repeats * 1e3, "ms of CPU", better="lower")
        per = seconds / objects * 1e6
        results.add(f"{prefix}.{name}.object", per, "µs an object", better="lower")


def run(results: Results, cases: Sequence[Case], batches: Sequence[int], repeats: int) -> None:
    """Measure every case at every size of batch; the gateway's default comes without one."""
    default = Settings().batch_bytes
    for case in cases:
        at_link = case.at_link_s * 1e3
        results.add(f"control_path.{case.name}.at_link", at_link, "ms", better="lower")
        measure(case, default, repeats, results, f"control_path.{case.name}")
        for batch in batches:
            name = f"control_path.{case.name}.batch{batch // MiB}MiB"
            measure(case, batch, repeats, results, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small case, two repeats")
    given = parser.parse_args(argv)
    results = Results("control_path")
    if given.quick:
        run(results, QUICK_CASES, (), 2)
    else:
        run(results, CASES, BATCHES, 9)
    results.write(given.out)


if __name__ == "__main__":
    main()

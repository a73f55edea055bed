"""The NVMe key-value card: the device is the index.

    submit ──► worker: headers, commands ──► executor: io_uring passthrough or ioctl
                     ▲                                  │ completions
    on_done ◄────────┴──── worker: status, xxh3 ◄───────┘

One namespace is one database, and a key is the device's own 16-byte key, so nothing is
kept on the host: a namespace can be used by a gateway on another machine at once. Each
value is stored behind a 16-byte header with its xxh3_64 (seeded with its key) and length
(`gateway.cards.nvme.frames`), moved by the same command and without a copy. A read is
checked against it; CORRUPT entries are deleted. A marker is a header alone, so that no
device is asked to store nothing.

A WRITE stores "only if absent" first, which tells new keys from known ones at no cost
where values are immutable, and replaces what was there in a second command (a DELETE and
a STORE in the block dialect; see `gateway.cards.nvme.replacing`). A DELETE asks EXIST
first, since devices call deleting an absent key a success.

Threads. `checker_threads` workers, the executor's. No thread waits for another: each
step of a batch's part is queued when the one before it ended.
Durability. A WRITE that answered OK is on the device, whatever happens to this process or
host; a power loss of the device may take what its volatile write cache held.
Failure scope. Entries; a device that is gone answers IO_ERROR. A command has
`command_timeout_s`, after which the kernel aborts it.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError
from adp_kv.metrics import Histogram
from adp_kv.units import PAGE_BYTES, ceil_div
from gateway.cards.base import Batch, CardLimits, OnDone, Op
from gateway.cards.batches import PendingBatch, Rows, WorkerPool
from gateway.cards.io_engine import IoEngine
from gateway.cards.nvme.commands import DIALECTS, CommandArray, CommandBuilder
from gateway.cards.nvme.executors import CommandRequest, start_executor
from gateway.cards.nvme.flows import Chosen, Flows, NvmePart, Step
from gateway.cards.nvme.frames import Frame, FramePool
from gateway.cards.nvme.host import Host, KernelHost
from gateway.cards.nvme.probe import (
    Namespace,
    count_keys,
    harmless_commands,
    open_namespace,
    read_usage,
)
from gateway.cards.nvme.settings import NvmeKvSettings
from gateway.cards.nvme.status import Code, codes, describe
from gateway.cards.parts import Counters, PartsCard

_logger: Final = logging.getLogger(__name__)

PART_ROWS: Final = 64
"""Entries that go through the steps together."""

_MILLISECONDS: Final = 1000
_MIN_FRAMES: Final = 16  # parts under way, for many batches of a few entries
_STOP_TIMEOUT_S: Final = 5.0
_USAGE_INTERVAL_S: Final = 5.0
_EXPECTED: Final = (0, Code.KEY_ABSENT, Code.KEY_EXISTS, Code.CAPACITY_EXCEEDED, -errno.ECANCELED)


class NvmeKvCard(PartsCard):
    """A card of NVMe key-value namespaces (see the module)."""

    def __init__(self, settings: NvmeKvSettings, host: Host | None = None) -> None:
        """Make a closed card; touches no device.

        Args:
            settings: of the card.
            host: where the devices are; this machine's kernel if None.
        """
        super().__init__("nvme_kv", settings.close_timeout_s)
        self._settings = settings
        self._host = host or KernelHost()
        self._builder = CommandBuilder(
            DIALECTS[settings.dialect], int(settings.command_timeout_s * _MILLISECONDS)
        )
        self._limits: CardLimits | None = None
        self._namespaces: list[Namespace] = []
        self._abandoning = False

    @property
    @override
    def limits(self) -> CardLimits:
        """What the devices take; the first call opens and closes them to ask.

        Raises:
            CardError: One can't serve.
        """
        if self._limits is None:
            namespaces = self._open_devices()
            self._close_devices(namespaces)
            self._limits = self._limits_of(namespaces)
        return self._limits

    @property
    def engine_name(self) -> str:
        """Which executor runs the commands: "io_uring" or "ioctl"; "" while closed."""
        return self._engine.name if self._is_open else ""

    @override
    def open(self, on_done: OnDone) -> None:
        if self._is_open:
            raise CardError(f"devices {', '.join(self._settings.devices)}: open already")
        namespaces = self._open_devices()
        try:
            self._settle_limits(self._limits_of(namespaces))
            self._start(namespaces)
        except BaseException:
            self._close_devices(namespaces)
            raise
        self._on_done = on_done
        self._is_open = True
        for namespace in namespaces:
            _logger.info(
                "%s: %s dialect by %s, values up to %d bytes, %d of %d bytes used",
                namespace.path,
                self._builder.dialect.name,
                self._engine.name,
                namespace.max_value_bytes,
                namespace.used_bytes,
                namespace.size_bytes,
            )

    def _settle_limits(self, found: CardLimits) -> None:
        promised = self._limits
        if promised is not None and found.max_value_bytes < promised.max_value_bytes:
            raise CardError(
                f"devices: values of {promised.max_value_bytes} bytes were promised, now "
                f"{found.max_value_bytes}: the device changed; start again"
            )
        self._limits = promised or found

    def _start(self, namespaces: list[Namespace]) -> None:
        s = self._settings
        self._fds: NDArray[np.int32] = np.array([n.fd for n in namespaces], dtype=np.int32)
        self._nsids: NDArray[np.uint32] = np.array([n.nsid for n in namespaces], dtype=np.uint32)
        frame = Frame(len(namespaces))
        probe = harmless_commands(self._nsids, self._builder, frame)
        self._engine: IoEngine[CommandRequest] = start_executor(
            self._host, s.io_engine, (s.queue_depth, s.io_threads), (self._fds, probe)
        )
        depth = s.queue_depth if self._engine.name == "io_uring" else s.io_threads
        self._frames = FramePool(max(_MIN_FRAMES, ceil_div(2 * depth, PART_ROWS)), PART_ROWS)
        self._workers = WorkerPool("adp-card-nvme", s.checker_threads)
        self._counters = Counters("values", "bytes_read", "bytes_written", "corrupt", "io_errors")
        self._counters.add("values", self._count(namespaces))
        self._flows = Flows(
            self._builder,
            self.limits.max_value_bytes,
            self._counters,
            self._issue,
            self._release,
            self._later,
        )
        self._used_bytes = sum(n.used_bytes for n in namespaces)
        self._usage_due = time.monotonic() + _USAGE_INTERVAL_S
        self._abandoning = False
        self._namespaces = namespaces

    def _count(self, namespaces: list[Namespace]) -> int:
        if not self._builder.dialect.has_identify or self._settings.count_timeout_s == 0:
            return 0
        total = 0
        for namespace in namespaces:
            deadline = time.monotonic() + self._settings.count_timeout_s
            values, complete = count_keys(self._host, namespace, self._builder, deadline)
            if not complete:
                _logger.info("%s: at least %d values there", namespace.path, values)
            total += values
        return total

    def _open_devices(self) -> list[Namespace]:
        namespaces: list[Namespace] = []
        try:
            for path in self._settings.devices:
                namespaces.append(open_namespace(self._host, path, self._builder))  # noqa: PERF401
        except BaseException:
            self._close_devices(namespaces)
            raise
        return namespaces

    def _close_devices(self, namespaces: list[Namespace]) -> None:
        for namespace in namespaces:
            self._host.close(namespace.fd)

    def _limits_of(self, namespaces: list[Namespace]) -> CardLimits:
        longest = min(namespace.max_value_bytes for namespace in namespaces)
        wanted = self._settings.max_value_bytes
        return CardLimits(min(longest, wanted or longest), PAGE_BYTES, len(namespaces))

    @override
    def register(self, address: int, num_bytes: int) -> None:
        """Nothing: the kernel refuses long fixed buffers for commands of drivers."""

    @override
    def unregister(self) -> None:
        """Nothing was announced."""

    @override
    def _cut(self, batch: Batch) -> list[tuple[int, Rows]]:
        # One device's commands or several's: a part is as good, since one queue serves all.
        rows = np.arange(len(batch.databases), dtype=np.int64)
        return [(0, rows[i : i + PART_ROWS]) for i in range(0, len(rows), PART_ROWS)]

    @override
    def _hand_over(self, pending: PendingBatch, database: int, rows: Rows) -> None:
        del database
        self._frames.take(functools.partial(self._begin, pending, rows))

    @override
    def stats(self) -> dict[str, int]:
        if not self._is_open:
            return dict.fromkeys(("values", "bytes_read", "bytes_written"), 0) | dict.fromkeys(
                ("corrupt", "io_errors", "size_bytes", "used_bytes"), 0
            )
        now = time.monotonic()
        if now >= self._usage_due:
            self._usage_due = now + _USAGE_INTERVAL_S
            self._workers.put(self._refresh_usage)
        return {
            **self._counters.snapshot(),
            "size_bytes": sum(namespace.size_bytes for namespace in self._namespaces),
            "used_bytes": self._used_bytes,
        }

    @override
    def latencies(self) -> dict[int, Histogram]:
        spaces = self._namespaces if self._is_open else []
        return {i: self._engine.latencies.of(space.fd) for i, space in enumerate(spaces)}

    @override
    def _stop(self) -> None:
        self._abandoning = True
        # Parts that wait for a frame end here; steps that follow see `_abandoning` and end theirs.
        self._frames.abandon()
        quiet = self._engine.stop(_STOP_TIMEOUT_S)
        quiet &= self._workers.stop(_STOP_TIMEOUT_S)
        namespaces, self._namespaces = self._namespaces, []
        if not quiet:
            _logger.error(
                "devices %s: commands did not end in time; end this process, its memory is in use",
                ", ".join(self._settings.devices),
            )
            return
        self._close_devices(namespaces)

    def _refresh_usage(self) -> None:
        self._used_bytes = sum(read_usage(self._host, n) for n in self._namespaces)

    def _begin(self, pending: PendingBatch, rows: Rows, frame: Frame | None) -> None:
        """Hand a part to a worker; runs on the main thread or where a frame came free."""
        if frame is None:
            self._settle(pending)
            return
        self._workers.put(functools.partial(self._run, pending, rows, frame))

    def _run(self, pending: PendingBatch, rows: Rows, frame: Frame) -> None:
        batch = pending.batch
        databases = batch.databases[rows]
        moves = batch.op in (Op.READ, Op.WRITE)
        no_memory = np.zeros(len(rows), dtype=np.uint64)
        addresses = batch.addresses[rows] if moves and batch.addresses is not None else no_memory
        lengths = batch.lengths[rows] if moves and batch.lengths is not None else no_memory
        part = NvmePart(
            pending=pending,
            rows=rows,
            fds=self._fds[databases],
            nsids=self._nsids[databases],
            keys=batch.keys[rows],
            addresses=addresses,
            lengths=lengths.astype(np.uint32),
            frame=frame,
        )
        try:
            self._flows.start(part)
        except Exception:
            _logger.exception("a part of a batch broke")
            self._flows.finish(part)

    def _issue(self, part: NvmePart, chosen: Chosen, commands: CommandArray, then: Step) -> None:
        """Run commands, then the step on a worker."""
        if self._abandoning:
            self._flows.finish(part)
            return
        self._engine.submit(
            CommandRequest(
                fds=part.fds[chosen],
                on_complete=lambda results: self._workers.put(
                    functools.partial(self._resume, part, chosen, then, results)
                ),
                commands=commands,
                values=np.zeros(len(commands), dtype=np.uint64),
            )
        )

    def _resume(
        self, part: NvmePart, chosen: Chosen, then: Step, results: NDArray[np.int32]
    ) -> None:
        failed = results[~np.isin(codes(results), _EXPECTED)]
        if failed.size:
            self._counters.add("io_errors", failed.size)
            _logger.warning(
                "%s: %d of %d commands failed, first with %s",
                ", ".join(self._settings.devices),
                failed.size,
                results.size,
                describe(int(failed[0])),
            )
        try:
            then(part, chosen, results)
        except Exception:
            _logger.exception("a step broke")
            self._flows.finish(part)

    def _release(self, part: NvmePart) -> None:
        self._frames.give_back(part.frame)
        self._ended(part)

    def _later(self, work: Callable[[], None]) -> None:
        if self._abandoning:
            work()
        else:
            self._workers.put(work)

"""Executors of commands: io_uring passthrough, or blocking ioctls on threads.

    submit(CommandRequest) ──► executor ──► on_complete(results[n]), values[n] filled in

A row's result is 0, the NVMe status field (> 0), or -errno of the kernel. Both run on the
engines that the file cards use; only what is in an entry differs.

Threads and failure scope: as `gateway.cards.io_engine` says.
"""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from adp_kv.errors import CardError
from gateway.cards.io_engine import IoEngine, PoolEngine, Progress, Request
from gateway.cards.nvme.commands import COMMAND, CommandArray
from gateway.cards.nvme.host import IO_COMMAND_VEC, URING_COMMAND_VEC, Host
from gateway.cards.nvme.settings import ExecutorKind
from gateway.cards.uring import CompletionArray, EntryArray, URing
from gateway.cards.uring_engine import RingEngine

_logger: Final = logging.getLogger(__name__)

_IOCTL_WORDS: Final = 10  # the command and a 64-bit result
_RESULT_WORD: Final = COMMAND.itemsize // 8
_PROBE_TIMEOUT_S: Final = 40.0
_STOP_TIMEOUT_S: Final = 5.0
_NOT_THERE: Final = (-errno.EOPNOTSUPP, -errno.EINVAL, -errno.ENOTTY, -errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class CommandRequest(Request):
    """Commands to devices.

    Attributes:
        commands: COMMAND [n]; what they point at stays valid until on_complete.
        values: uint64 [n], set to each completion's value before on_complete.
    """

    commands: CommandArray
    values: NDArray[np.uint64]


class IoctlExecutor(PoolEngine[CommandRequest]):
    """One blocking ioctl a command."""

    name = "ioctl"

    def __init__(self, host: Host, num_threads: int) -> None:
        """Start `num_threads` threads."""
        self._host = host
        super().__init__(num_threads)

    @override
    def _transfer(self, progress: Progress[CommandRequest], rows: slice) -> None:
        request = progress.request
        arguments = np.zeros((rows.stop - rows.start, _IOCTL_WORDS), dtype=np.uint64)
        arguments[:, :_RESULT_WORD] = (
            request.commands[rows].view(np.uint64).reshape(-1, _RESULT_WORD)
        )
        for argument, fd, row in zip(
            arguments, request.fds[rows].tolist(), range(rows.start, rows.stop), strict=True
        ):
            progress.results[row] = self._host.ioctl(fd, IO_COMMAND_VEC, argument.ctypes.data)
        request.values[rows] = arguments[:, _RESULT_WORD]


class UringExecutor(RingEngine[CommandRequest]):
    """Commands through a wide ring."""

    def __init__(self, host: Host, queue_depth: int) -> None:
        """Start the thread and its ring.

        Raises:
            OSError: There is no such ring here.
        """
        self._host = host
        super().__init__(queue_depth)

    @override
    def _open_ring(self, entries: int) -> URing:
        return self._host.open_ring(entries)

    @override
    def _entries(
        self, ring: URing, request: CommandRequest, names: NDArray[np.uint64]
    ) -> EntryArray:
        payloads = request.commands.view(np.uint8).reshape(-1, COMMAND.itemsize)
        return ring.commands(URING_COMMAND_VEC, request.fds, payloads, names)

    @override
    def _record(
        self, progress: Progress[CommandRequest], rows: NDArray[np.uint64], done: CompletionArray
    ) -> None:
        progress.results[rows] = done["res"]
        progress.request.values[rows] = done["extra"][:, 0]


def run_once(
    engine: IoEngine[CommandRequest], fds: NDArray[np.int32], commands: CommandArray
) -> NDArray[np.int32]:
    """Run commands and wait for them: int32 [n], -ETIMEDOUT where no answer came."""
    done = threading.Event()
    answers: list[NDArray[np.int32]] = []

    def keep(results: NDArray[np.int32]) -> None:
        answers.append(results)
        done.set()

    engine.submit(
        CommandRequest(
            fds=fds,
            on_complete=keep,
            commands=commands,
            values=np.zeros(len(commands), dtype=np.uint64),
        )
    )
    if not done.wait(_PROBE_TIMEOUT_S):
        return np.full(len(commands), -errno.ETIMEDOUT, dtype=np.int32)
    return answers[0]


def start_executor(
    host: Host,
    kind: ExecutorKind,
    depths: tuple[int, int],
    probe: tuple[NDArray[np.int32], CommandArray],
) -> IoEngine[CommandRequest]:
    """Start an executor that carries commands to every device.

    Args:
        host: of the devices.
        kind: "auto" takes io_uring where kernel and devices do, and ioctl elsewhere.
        depths: commands in flight, io_uring and ioctl.
        probe: descriptors int32 [n] and harmless commands, one a device.

    Raises:
        CardError: "io_uring" was asked for and does not work here.
    """
    if kind != "ioctl":
        try:
            engine = UringExecutor(host, depths[0])
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            refused = [r for r in run_once(engine, *probe).tolist() if r in _NOT_THERE]
            if not refused:
                return engine
            engine.stop(_STOP_TIMEOUT_S)
            reason = f"the device answers {errno.errorcode.get(-refused[0], refused[0])}"
        if kind == "io_uring":
            raise CardError(
                f"io_engine='io_uring' does not work here: {reason}; passthrough needs Linux "
                "5.19, a character device /dev/ngXnY, and io_uring allowed "
                "(kernel.io_uring_disabled=0, the container's seccomp profile); or set "
                "io_engine to 'auto' or 'ioctl'"
            )
        _logger.warning("no io_uring passthrough (%s): using %d ioctl threads", reason, depths[1])
    return IoctlExecutor(host, depths[1])

"""Form groups at start: rounds in which every rank says something to every other.

    facts ─► groups ─► shared memory, communicator's id ─► communicator, staging ─► all ready?

A round is a call of `everyone`, which all ranks make. What a rank can't do it says in the
round instead of leaving: all ranks then stop after the same round, for the same reason, with
one line in the log. Ranks that form no group of two or more copy directly.

Threads: the worker's, before anything is restored. Failure scope: fan-out is off, nothing else.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from adp_kv.errors import TransferError
from adp_kv.fanout.exchange import Exchange
from adp_kv.fanout.fanout import Fanout
from adp_kv.fanout.flags import Flags, flags_bytes, open_memory, shared_memory
from adp_kv.fanout.groups import describe, partition
from adp_kv.fanout.nccl import NcclLibrary, open_nccl
from adp_kv.fanout.nvml import Nvml
from adp_kv.fanout.settings import FanoutSettings
from adp_kv.transfer.base import Mover
from adp_kv.transfer.cuda_mover import CudaMover
from adp_kv.transfer.hardware import Hardware
from adp_kv.units import format_bytes

log = logging.getLogger("adp_kv")

JOIN_TIMEOUT_S = 60.0
_POLL_S = 0.001
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_CTAS = 32

Everyone = Callable[[bytes], list[bytes]]
"""Says something to all ranks and returns what all have said, in the order of ranks."""


@dataclass(slots=True)
class _Rounds:
    """The rounds of one rank; ends for all ranks when one of them has an error."""

    everyone: Everyone

    def run(self, act: Callable[[], object]) -> list[object]:
        """Do something and return what everybody's attempt returned.

        Raises:
            TransferError: Some rank's attempt failed; on every rank the same.
        """
        try:
            said: dict[str, object] = {"said": act()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            said = {"error": str(error) or repr(error)}
        heard = [json.loads(text) for text in self.everyone(json.dumps(said).encode())]
        for rank, message in enumerate(heard):
            if "error" in message:
                raise TransferError(f"rank {rank}: {message['error']}")
        return [message["said"] for message in heard]


def start_fanout(
    mover: Mover,
    rank: int,
    everyone: Everyone,
    settings: FanoutSettings,
    obstacle: str | None = None,
) -> Fanout | None:
    """Return this rank's fan-out, None where it is off; a collective of all ranks.

    Args:
        mover: the rank's, whose device and ring are used.
        rank: in the order of `everyone`.
        everyone: a round of all ranks that hold the same replicated caches.
        settings: the same on every rank.
        obstacle: why this rank can't take part, as far as its caller knows.
    """
    rounds = _Rounds(everyone)
    try:
        rounds.run(lambda: _pass(obstacle))
        return _start(mover, rank, rounds, settings)
    except TransferError as error:
        level = logging.WARNING if rank == 0 else logging.DEBUG  # all would say the same
        log.log(level, "NVLink fan-out is off, every rank reads all: %s", error)
        return None


def _start(mover: Mover, rank: int, rounds: _Rounds, settings: FanoutSettings) -> Fanout | None:
    facts = rounds.run(lambda: _facts(mover))
    rows = rounds.run(lambda: _row(facts, rank))
    groups = partition([[bool(cell) for cell in _as_list(row)] for row in rows])
    if all(len(group) == 1 for group in groups):
        raise TransferError("no two ranks reach each other over NVLink")
    group = next(group for group in groups if rank in group)
    leads = len(group) > 1 and group[0] == rank
    num_bytes = flags_bytes(settings.max_ahead, len(group))
    with ExitStack() as stack:
        made = rounds.run(lambda: stack.enter_context(shared_memory(num_bytes)) if leads else "")
        return _join(mover, groups, rank, rounds, settings, str(made[group[0]]))


def _join(
    mover: Mover,
    groups: tuple[tuple[int, ...], ...],
    rank: int,
    rounds: _Rounds,
    settings: FanoutSettings,
    path: str,
) -> Fanout | None:
    """Join this rank's group; path: of the memory that its first rank has made."""
    group = next(group for group in groups if rank in group)
    leads = len(group) > 1 and group[0] == rank
    ids = rounds.run(lambda: NcclLibrary().unique_id().hex() if leads else "")
    before = torch.cuda.mem_get_info()[0]
    made: list[Fanout] = []

    def make() -> None:
        if len(group) > 1:
            unique_id = bytes.fromhex(str(ids[group[0]]))
            joined = _Joined(group, group.index(rank), unique_id, path)
            made.append(_make(mover, joined, settings))

    try:
        rounds.run(make)
    except TransferError:
        for fanout in made:
            fanout.close(0.0)
        raise
    cost = max(0, before - torch.cuda.mem_get_info()[0])
    log.info(
        "NVLink fan-out: ranks %s; rank %d took %s of GPU memory beside gpu_memory_utilization "
        "(staging %s in %d buffers, the rest NCCL's communicator)",
        describe(groups),
        rank,
        format_bytes(cost),
        format_bytes(settings.staging_bytes),
        settings.num_buffers,
    )
    return made[0] if made else None


def _pass(obstacle: str | None) -> None:
    if obstacle is not None:
        raise TransferError(obstacle)


def _as_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TransferError(f"a rank sent {value!r}")
    return value


def _facts(mover: Mover) -> list[str]:
    """Return [host, UUID of the device]."""
    if not isinstance(mover, CudaMover):
        raise TransferError("it needs NVIDIA GPUs with NVLink peer access")
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    uuid = getattr(torch.cuda.get_device_properties(mover.hardware.device.index), "uuid", None)
    if uuid is None:
        raise TransferError("this torch does not tell a device's UUID")
    return [f"{socket.gethostname()} {boot}", f"GPU-{str(uuid).removeprefix('GPU-')}"]


def _row(facts: list[object], rank: int) -> list[bool]:
    """Return which ranks this one reaches."""
    known = [_as_list(fact) for fact in facts]
    host, mine = known[rank]
    nvml = Nvml()
    try:
        reached = nvml.reached(str(mine), [str(uuid) for _, uuid in known])
    finally:
        nvml.close()
    return [yes and there[0] == host for yes, there in zip(reached, known, strict=True)]


@dataclass(frozen=True, slots=True)
class _Joined:
    """A group, this rank's place in it, and what its first rank has told the others."""

    group: tuple[int, ...]
    place: int
    unique_id: bytes
    path: str


def _make(mover: Mover, joined: _Joined, settings: FanoutSettings) -> Fanout:
    assert isinstance(mover, CudaMover)
    hardware, group = mover.hardware, joined.group
    words = open_memory(joined.path, flags_bytes(settings.max_ahead, len(group)))
    flags = Flags(words, joined.place, len(group))
    exchange = open_nccl(
        NcclLibrary(),
        joined.unique_id,
        joined.place,
        len(group),
        bind_device=hardware.device.bind,
        max_ctas=min(_MOST_CTAS, settings.max_ctas * (len(group) - 1)),
        timeout_s=JOIN_TIMEOUT_S,
    )
    try:
        _warm_up(hardware, exchange, JOIN_TIMEOUT_S)
        hardware.device.prepare()
        return Fanout(hardware, exchange, flags, settings, group)
    except BaseException:
        exchange.abort()
        raise


def _warm_up(hardware: Hardware, exchange: Exchange, timeout_s: float) -> None:
    """Connect the ranks: NCCL does it in the first exchange.

    Raises:
        TransferError: It did not end in time, or brought something else than was sent.
    """
    device, num_ranks, region = hardware.device, exchange.num_ranks, 4096
    words = device.allocate(region * num_ranks)
    words.view(num_ranks, region)[exchange.rank] = exchange.rank + 1
    stream = device.current_stream()
    exchange.all_gather(words.data_ptr(), region, stream.cuda_stream)
    end, deadline = device.record(stream), time.monotonic() + timeout_s
    while not end.query():
        if time.monotonic() > deadline:
            raise TransferError(f"the first exchange did not end within {timeout_s:g} s")
        time.sleep(_POLL_S)
    came = words.view(num_ranks, region).min(1).values.cpu().tolist()
    if came != list(range(1, num_ranks + 1)):
        raise TransferError(f"the first exchange brought {came}")

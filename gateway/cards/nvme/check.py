"""Try a key-value namespace: what it takes, and whether values come back as they went.

    python -m gateway.cards.nvme.check [--dialect block] [--io-engine ioctl] /dev/ng0n1

Stores values of several lengths under random keys, reads and compares them, and deletes
them again; values of others are not touched. The exit status is 0 if all went well, 1 if
not, 2 if the device can't be used.
"""

from __future__ import annotations

import argparse
import mmap
import secrets
import sys
import threading
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import AdpError, CardError
from adp_kv.units import PAGE_BYTES, align_up
from gateway.cards.base import Batch, Op, Status, StatusArray
from gateway.cards.nvme.card import NvmeKvCard
from gateway.cards.nvme.commands import DIALECTS
from gateway.cards.nvme.host import Host
from gateway.cards.nvme.settings import NvmeKvSettings

_ANSWER_TIMEOUT_S: Final = 60.0
_VALUES_A_SIZE: Final = 16


class _Session:
    """An open card whose batches wait for their answer."""

    def __init__(self, card: NvmeKvCard) -> None:
        self._card = card
        self._answer: StatusArray | None = None
        self._answered = threading.Event()
        card.open(self._on_done)

    def _on_done(self, _token: int, status: StatusArray) -> None:
        self._answer = status
        self._answered.set()

    def run(
        self,
        op: Op,
        keys: NDArray[np.uint64],
        addresses: NDArray[np.uint64],
        length: int,
    ) -> StatusArray:
        self._answered.clear()
        databases = np.zeros(len(keys), dtype=np.uint16)
        lengths = np.full(len(keys), length, dtype=np.uint32)
        self._card.submit(Batch(op, 1, databases, keys, addresses, lengths))
        if not self._answered.wait(_ANSWER_TIMEOUT_S) or self._answer is None:
            raise CardError(f"no answer to {op.name} within {_ANSWER_TIMEOUT_S:g} s")
        return self._answer


def _check_size(session: _Session, length: int) -> list[str]:
    """Return what went wrong with values of a length."""
    n, stride = _VALUES_A_SIZE, align_up(max(length, 1), PAGE_BYTES)
    memory = np.frombuffer(mmap.mmap(-1, 2 * n * stride), dtype=np.uint8).reshape(2 * n, stride)
    values = memory[:n, :length]
    values[:] = np.frombuffer(secrets.token_bytes(n * length), np.uint8).reshape(n, length)
    keys = np.frombuffer(secrets.token_bytes(16 * n), np.uint64).reshape(n, 2).copy()
    sources = np.arange(n, dtype=np.uint64) * np.uint64(stride) + np.uint64(memory.ctypes.data)
    targets = sources + np.uint64(n * stride)
    steps = (
        ("absent before", Op.EXIST, sources, Status.ABSENT),
        ("store", Op.WRITE, sources, Status.OK),
        ("exist", Op.EXIST, sources, Status.OK),
        ("retrieve", Op.READ, targets, Status.OK),
        ("store again", Op.WRITE, sources, Status.OK),
        ("delete", Op.DELETE, sources, Status.OK),
        ("absent after", Op.READ, targets, Status.ABSENT),
    )
    wrong = []
    for name, op, addresses, expected in steps:
        status = session.run(op, keys, addresses, length)
        bad = status[status != expected]
        if bad.size:
            wrong.append(f"{name}: {bad.size} of {n}, first {Status(int(bad[0])).name}")
        if name == "retrieve" and not np.array_equal(memory[n:, :length], values):
            wrong.append("retrieve: other bytes than were stored")
    return wrong


def main(arguments: list[str] | None = None, host: Host | None = None) -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(prog="gateway.cards.nvme.check", description=__doc__)
    parser.add_argument("device")
    parser.add_argument("--dialect", choices=tuple(DIALECTS), default="standard")
    parser.add_argument("--io-engine", choices=("auto", "io_uring", "ioctl"), default="auto")
    flags = parser.parse_args(arguments)
    try:
        settings = NvmeKvSettings(
            devices=(flags.device,), dialect=flags.dialect, io_engine=flags.io_engine
        )
        card = NvmeKvCard(settings, host)
        session = _Session(card)
    except AdpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = False
    longest = card.limits.max_value_bytes
    sys.stdout.write(f"{flags.device}: values up to {longest} bytes by {card.engine_name}\n")
    try:
        for length in sorted({0, 1, 4095, 4096, min(131072, longest), longest - 1, longest}):
            begun = time.monotonic()
            wrong = _check_size(session, length)
            failed |= bool(wrong)
            took_ms = (time.monotonic() - begun) * 1000
            verdict = "; ".join(wrong) or "ok"
            sys.stdout.write(f"{length:>9} bytes  {took_ms:8.1f} ms  {verdict}\n")
    except CardError as error:
        sys.stderr.write(f"{error}\n")
        failed = True
    finally:
        card.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

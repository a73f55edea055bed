"""A gateway whose card can be made to fail while it serves.

Run as `python -m tests.support.faulty_gateway`; arguments as for `python -m gateway`. The
environment names a file; what stands in it when a batch is submitted is in force for it:

    write 2.5     writes are answered 2.5 s late (exist, read, delete likewise)
    write hold    writes are answered when no line says "hold" any more
    read error    no read succeeds
    card gone     nothing succeeds
    ring removed  whoever is about to map the ring finds no file
    lose 0123...  the key (32 hex digits) is not found by reads
    (empty)       the card works
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import gateway.__main__ as program
from adp_kv.ring.region import RingFile
from adp_kv.wire.keys import KeyArray, unpack_keys
from gateway import server
from gateway.cards.base import Batch, Card, OnDone, Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.cards.registry import create_card

FAULT_FILE = "ADP_TEST_FAULT_FILE"
HOLD = "hold"
_OPS = {op.name.lower(): frozenset({op}) for op in Op} | {"card": frozenset(Op)}
_NEVER = 1 << 30
_POLL_S = 0.02


def _is_key(key: NDArray[np.uint64], keys: KeyArray) -> NDArray[np.bool_]:
    return np.asarray((keys == key).all(axis=1))


def parse(text: str) -> list[Fault]:
    """Return the faults that a file's text asks for."""
    faults = []
    for line in text.splitlines():
        op, what = line.split()
        if op == "ring":
            continue
        if op == "lose":
            lost = unpack_keys(bytes.fromhex(what))[0]
            when = partial(_is_key, lost)
            faults.append(Fault(Status.ABSENT, ops=_OPS["read"], when=when))
        elif what in {"error", "gone"}:
            faults.append(Fault(Status.IO_ERROR, ops=_OPS[op]))
        elif what == HOLD:
            faults.append(Fault(ops=_OPS[op], hold=_NEVER))
        else:
            faults.append(Fault(ops=_OPS[op], delay_s=float(what)))
    return faults


def fault_text() -> str:
    """Return what the file says now; empty if there is none."""
    path = Path(os.environ[FAULT_FILE])
    return path.read_text() if path.exists() else ""


class FileFaultyCard(FaultyCard):
    """A card that looks its faults up in a file."""

    @override
    def open(self, on_done: OnDone) -> None:
        super().open(on_done)
        threading.Thread(target=self._let_go, name="adp-card-holds", daemon=True).start()

    def _let_go(self) -> None:
        while True:
            if HOLD not in fault_text():
                self.answer_all()
            time.sleep(_POLL_S)

    @override
    def submit(self, batch: Batch) -> None:
        self.faults = parse(fault_text())
        super().submit(batch)


class LosableRing(RingFile):
    """A ring whose file can be removed between its being announced and being mapped."""

    @override
    def publish(self) -> None:
        super().publish()
        if "ring removed" in fault_text():
            self.path.unlink()


def main() -> int:
    """Run the gateway with its card and ring wrapped."""

    def create(kind: str, settings: Mapping[str, object]) -> Card:
        return FileFaultyCard(create_card(kind, settings))

    program.create_card = create  # type: ignore[attr-defined]  # imported there by name
    server.RingFile = LosableRing  # type: ignore[attr-defined]  # likewise
    return program.main()


if __name__ == "__main__":
    sys.exit(main())

"""A gateway whose card can be made to fail while it serves.

Run as `python -m tests.support.faulty_gateway`; arguments as for `python -m gateway`. The
environment names a file; what stands in it when a batch is submitted is in force for it:

    write 2.5     writes are answered 2.5 s late (exist, read, delete likewise)
    read error    no read succeeds
    lose 0123...  the key (32 hex digits) is not found by reads
    (empty)       the card works
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import gateway.__main__ as program
from adp_kv.wire.keys import KeyArray, unpack_keys
from gateway.cards.base import Batch, Card, Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.cards.registry import create_card

FAULT_FILE = "ADP_TEST_FAULT_FILE"
_OPS = {op.name.lower(): frozenset({op}) for op in Op}


def _is_key(key: NDArray[np.uint64], keys: KeyArray) -> NDArray[np.bool_]:
    return np.asarray((keys == key).all(axis=1))


def parse(text: str) -> list[Fault]:
    """Return the faults that a file's text asks for."""
    faults = []
    for line in text.splitlines():
        op, what = line.split()
        if op == "lose":
            lost = unpack_keys(bytes.fromhex(what))[0]
            when = partial(_is_key, lost)
            faults.append(Fault(Status.ABSENT, ops=_OPS["read"], when=when))
        elif what == "error":
            faults.append(Fault(Status.IO_ERROR, ops=_OPS[op]))
        else:
            faults.append(Fault(ops=_OPS[op], delay_s=float(what)))
    return faults


class FileFaultyCard(FaultyCard):
    """A card that looks its faults up in a file."""

    @override
    def submit(self, batch: Batch) -> None:
        path = Path(os.environ[FAULT_FILE])
        self.faults = parse(path.read_text()) if path.exists() else []
        super().submit(batch)


def main() -> int:
    """Run the gateway with its card wrapped."""

    def create(kind: str, settings: Mapping[str, object]) -> Card:
        return FileFaultyCard(create_card(kind, settings))

    program.create_card = create  # type: ignore[attr-defined]  # imported there by name
    return program.main()


if __name__ == "__main__":
    sys.exit(main())

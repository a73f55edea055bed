"""What a part of a batch asks of the engine, and what its codes mean.

    WRITE   headers, put ──► exist: is it there? ──► OK, NO_SPACE, IO_ERROR
    READ    get ──► header, checksum ──► OK, CORRUPT: removed
              └──► refused: size_of ──► ABSENT, CORRUPT, IO_ERROR

A value is put together from two pieces, its header (`gateway.cards.value_header`) and the
memory of the entry, so that neither is copied. Memory that was not announced to the engine
goes through the stage of the scratch memory.

The engine answers 0 to a put whose name is taken, even by a value that nobody ended. So a
stored value is looked for; where it is not there NO_SPACE says that it was not kept.

Threads: one of the card's; each has scratch memory of its own.
Failure scope: entries. It must not know threads.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.units import PAGE_BYTES, align_up
from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Op, Status
from gateway.cards.batches import Rows, checksum_at, checksum_seeds
from gateway.cards.mooncake.engine import (
    BAD_SIZE,
    GONE,
    NO_ROOM,
    OK,
    TRANSFER_FAILED,
    Codes,
    Engine,
    unreachable,
)
from gateway.cards.parts import Part
from gateway.cards.value_header import HEADER, HEADERS, MAGIC, VERSION

_STAGE_ALIGNMENT: Final = 64
_NAME_DIGITS: Final = 32

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""First address and the one behind the last, of each range."""


@dataclass(slots=True)
class MooncakePart(Part):
    """Entries of a batch for one store.

    Attributes:
        answered: whether the master answered every question.
        change: how many values there are more than before.
        first_error: code of the first entry that is IO_ERROR, 0 if there is none.
    """

    answered: bool = True
    change: int = 0
    first_error: int = 0


class Scratch:
    """Memory for one part at a time: headers, and the stage.

    Args:
        rows: entries of a part.
        stage_bytes: of their values, each rounded up to 64.

    Attributes:
        headers: HEADERS [rows].
        address, num_bytes: all of the memory.
        stage: address of the stage.
    """

    def __init__(self, rows: int, stage_bytes: int) -> None:
        headers_bytes = align_up(rows * HEADER.size, PAGE_BYTES)
        self.num_bytes = headers_bytes + align_up(stage_bytes, PAGE_BYTES)
        memory = np.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=np.uint8)
        self.headers = memory[: rows * HEADER.size].view(HEADERS)
        self.address = memory.ctypes.data
        self.stage = self.address + headers_bytes


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries as the engine wants them.

    Attributes:
        part: what they belong to.
        chosen: int64 [n], rows of the part.
        names: in the store.
        seeds: of their checksums.
        lengths: int64 [n], bytes of their values.
        addresses: int64 [n], of their values.
        places: int64 [n], where the engine finds or puts the values: addresses, or in the stage.
        headers: HEADERS [n].
        pointers, sizes: of the pieces of each.
    """

    part: MooncakePart
    chosen: Rows
    names: list[str]
    seeds: list[int]
    lengths: NDArray[np.int64]
    addresses: NDArray[np.int64]
    places: NDArray[np.int64]
    headers: NDArray[np.void]
    pointers: list[list[int]]
    sizes: list[list[int]]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a lane runs parts with.

    Attributes:
        engine: client of the store.
        scratch: of this lane alone.
        announced: memory that the engine knows.
        prefix: of names in the store.
        longest: bytes of a value that the card takes.
    """

    engine: Engine
    scratch: Scratch
    announced: Ranges
    prefix: str
    longest: int


def run(part: MooncakePart, tools: Tools) -> None:
    """Run a part; it gets its statuses."""
    batch = part.pending.batch
    if batch.addresses is None or batch.lengths is None or batch.op in (Op.EXIST, Op.DELETE):
        _ask(part, tools.engine, names_of(tools.prefix, batch.keys[part.rows]))
        return
    lengths = batch.lengths[part.rows].astype(np.int64)
    part.status[lengths > tools.longest] = Status.TOO_LARGE
    addresses = batch.addresses[part.rows].astype(np.int64)
    fitting = np.flatnonzero(lengths <= tools.longest)
    for chosen in _rounds(batch.keys[part.rows], fitting):
        entries = _entries(part, chosen, addresses[chosen], lengths[chosen], tools)
        if batch.op is Op.WRITE:
            _write(entries, tools.engine)
        else:
            _read(entries, tools.engine)


def _rounds(keys: KeyArray, chosen: Rows) -> Iterator[Rows]:
    """Yield the chosen rows so that no key occurs twice at once.

    Of a name that is twice in one get the engine fills one entry, and answers for both.
    """
    while chosen.size:
        _, first = np.unique(keys[chosen], axis=0, return_index=True)
        yield chosen[np.sort(first)]
        chosen = np.delete(chosen, first)


def names_of(prefix: str, keys: KeyArray) -> list[str]:
    """Return the store's names of keys: the prefix and 32 hexadecimal digits."""
    digits = keys.astype("<u8").tobytes().hex()
    return [
        prefix + digits[start : start + _NAME_DIGITS]
        for start in range(0, len(digits), _NAME_DIGITS)
    ]


def _entries(
    part: MooncakePart,
    chosen: Rows,
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tools: Tools,
) -> Entries:
    keys: KeyArray = part.pending.batch.keys[part.rows[chosen]]
    scratch = tools.scratch
    places = _places(addresses, lengths, scratch, tools.announced)
    header_places = scratch.address + HEADER.size * np.arange(len(keys), dtype=np.int64)
    pointers = np.stack([header_places, places], axis=1).tolist()
    sizes = np.stack([np.full_like(lengths, HEADER.size), lengths], axis=1).tolist()
    for i in np.flatnonzero(lengths == 0).tolist():  # a marker is a header alone
        del pointers[i][1], sizes[i][1]
    return Entries(
        part=part,
        chosen=chosen,
        names=names_of(tools.prefix, keys),
        # Not seeded with the database: values stay good however the masters are listed.
        seeds=checksum_seeds(keys, np.zeros(len(keys), dtype=np.uint16)).tolist(),
        lengths=lengths,
        addresses=addresses,
        places=places,
        headers=scratch.headers[: len(keys)],
        pointers=pointers,
        sizes=sizes,
    )


def _places(
    addresses: NDArray[np.int64], lengths: NDArray[np.int64], scratch: Scratch, announced: Ranges
) -> NDArray[np.int64]:
    known = np.zeros(len(addresses), dtype=np.bool_)
    for start, end in announced:
        known |= (addresses >= start) & (addresses + lengths <= end)
    rounded = np.where(known, 0, -(-lengths // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT)
    return np.where(known, addresses, scratch.stage + np.cumsum(rounded) - rounded)


def _ask(part: MooncakePart, engine: Engine, names: list[str]) -> None:
    if part.pending.batch.op is Op.EXIST:
        codes = engine.exist(names)
        part.status[codes == 0] = Status.ABSENT
        part.status[codes > 0] = Status.OK
    else:
        codes = engine.remove(names)
        part.status[codes == OK] = Status.OK
        part.change -= int((codes == OK).sum())
    part.status[_gone(codes)] = Status.ABSENT
    _note(part, codes)


def _write(entries: Entries, engine: Engine) -> None:
    part = entries.part
    every = np.ones(len(entries.names), dtype=np.bool_)
    _copy(entries.addresses, entries.places, entries.lengths, every)
    entries.headers["checksum"] = _checksums(entries, every)
    entries.headers["length"] = entries.lengths
    entries.headers["version"], entries.headers["magic"] = VERSION, MAGIC
    codes = engine.put(entries.names, entries.pointers, entries.sizes)
    status = np.full(len(codes), Status.IO_ERROR, dtype=np.uint8)
    status[codes == NO_ROOM] = Status.NO_SPACE
    taken = np.flatnonzero(codes == OK)
    if taken.size:
        found = engine.exist([entries.names[i] for i in taken.tolist()])
        status[taken[found == 0]] = Status.NO_SPACE
        status[taken[found > 0]] = Status.OK
        _note(part, found)
    part.status[entries.chosen] = status
    part.change += int((status == Status.OK).sum())
    _note(part, codes[codes != NO_ROOM])


def _read(entries: Entries, engine: Engine) -> None:
    part = entries.part
    entries.headers[:] = 0  # or one of an earlier part might pass for this one's
    codes = engine.get(entries.names, entries.pointers, entries.sizes)
    came = codes == entries.lengths + HEADER.size
    headers = entries.headers
    ours = came & (headers["length"] == entries.lengths)
    ours &= (headers["version"] == VERSION) & (headers["magic"] == MAGIC)
    whole = ours & (headers["checksum"] == _checksums(entries, wanted=ours))
    _copy(entries.places, entries.addresses, entries.lengths, whole)
    status = np.full(len(codes), Status.IO_ERROR, dtype=np.uint8)
    status[codes >= 0] = Status.CORRUPT
    status[whole] = Status.OK
    status[_gone(codes)] = Status.ABSENT
    refused = np.flatnonzero((codes == BAD_SIZE) | (codes == TRANSFER_FAILED))
    for i in refused.tolist():  # a value of another length, or a machine that is gone
        size = engine.size_of(entries.names[i])
        if size in GONE:
            status[i] = Status.ABSENT
        elif size < 0:
            codes[i] = size
            break
        elif size != entries.lengths[i] + HEADER.size:
            status[i] = Status.CORRUPT
    corrupt = np.flatnonzero(status == Status.CORRUPT)
    if corrupt.size:
        removed = engine.remove([entries.names[i] for i in corrupt.tolist()])
        part.change -= int((removed == OK).sum())
        _note(part, removed)
    part.status[entries.chosen] = status
    _note(part, codes[status == Status.IO_ERROR])


def _gone(codes: Codes) -> NDArray[np.bool_]:
    return np.isin(codes, list(GONE))


def _note(part: MooncakePart, codes: Codes) -> None:
    """Remember what went wrong."""
    wrong = codes[(codes < 0) & ~_gone(codes)]
    if wrong.size:
        part.first_error = part.first_error or int(wrong[0])
        part.answered &= not unreachable(wrong)


def _checksums(entries: Entries, wanted: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return the checksums of the values where they are, 0 for those that are not wanted."""
    made = np.zeros(len(entries.names), dtype=np.uint64)
    places, lengths = entries.places.tolist(), entries.lengths.tolist()
    for i in np.flatnonzero(wanted).tolist():
        made[i] = checksum_at(places[i], lengths[i], entries.seeds[i])
    return made


def _copy(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    wanted: NDArray[np.bool_],
) -> None:
    """Copy what goes through the stage."""
    for i in np.flatnonzero(wanted & (sources != targets) & (lengths > 0)).tolist():
        ctypes.memmove(int(targets[i]), int(sources[i]), int(lengths[i]))

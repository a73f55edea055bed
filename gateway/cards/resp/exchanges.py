"""What a part of a batch says to the server, and what its replies mean.

The header (`gateway.cards.value_header`) travels in one SET or GET with the value, but goes
through a buffer of its own: the value is sent from and received into the ring.

Threads: the lane's that runs the part.
Failure scope. An error reply concerns its entry: OOM is NO_SPACE, others are IO_ERROR.
It must not know sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Op, Status
from gateway.cards.batches import checksum_at, checksum_seeds, memory_at
from gateway.cards.parts import Part
from gateway.cards.resp.connection import (
    SHORT_READ,
    Buffer,
    ConnectionLostError,
    Consumer,
    Reader,
    command,
)
from gateway.cards.value_header import HEADER, MAGIC, VERSION

_EOL_BYTES: Final = 2
_MAX_BULK: Final = 1 << 30
_NIL: Final = -1


@dataclass(slots=True)
class RespPart(Part):
    """Entries of a batch for one endpoint.

    Attributes:
        values: keys the server has, -1 where it was not asked.
        first_error: of the replies, "" if there was none.
    """

    values: int = -1
    first_error: str = ""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries as the protocol wants them.

    Attributes:
        part: what they belong to.
        chosen: rows of the part, in the order of the commands.
        names: the server's keys.
        seeds: of their checksums.
        addresses: of their values.
        lengths: of their values, bytes.
    """

    part: RespPart
    chosen: list[int]
    names: list[bytes]
    seeds: list[int]
    addresses: list[int]
    lengths: list[int]


def entries_of(part: RespPart, chosen: NDArray[np.int64], prefix: bytes) -> Entries:
    """Return the entries of some rows of a part."""
    batch, rows = part.pending.batch, part.rows[chosen]
    keys: KeyArray = batch.keys[rows]
    moves = batch.op in (Op.READ, Op.WRITE) and batch.addresses is not None
    # Not seeded with the database: values stay good however the endpoints are listed.
    seeds = checksum_seeds(keys, np.zeros(len(keys), dtype=np.uint16))
    nothing = [0] * len(chosen)
    return Entries(
        part=part,
        chosen=chosen.tolist(),
        names=[prefix + key.tobytes() for key in keys],
        seeds=seeds.tolist(),
        addresses=batch.addresses[rows].tolist()
        if moves and batch.addresses is not None
        else nothing,
        lengths=batch.lengths[rows].tolist() if moves and batch.lengths is not None else nothing,
    )


def ask_commands(word: bytes, entries: Entries) -> list[Buffer]:
    """Return EXISTS, DEL or GET of every entry."""
    return [b"".join(command(word, name) for name in entries.names)]


def set_commands(entries: Entries, ttl_ms: int) -> list[Buffer]:
    """Return SET of every entry; values are sent from where they are."""
    num_words, options = 3, b""
    if ttl_ms:
        num_words, options = 5, b"$2\r\nPX\r\n" + b"$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms)
    buffers: list[Buffer] = []
    tail = b""
    for name, seed, address, length in zip(
        entries.names, entries.seeds, entries.addresses, entries.lengths, strict=True
    ):
        header = HEADER.pack(checksum_at(address, length, seed), length, VERSION, MAGIC)
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            num_words,
            len(name),
            name,
            len(header) + length,
            header,
        )
        buffers += [tail + start, memory_at(address, length)]
        tail = b"\r\n" + options
    return [*buffers, tail]


def read_statuses(
    reader: Reader, entries: Entries, meanings: Callable[[bytes], Status | None]
) -> Consumer:
    """Read one line an entry; `meanings` names its status, None where it makes no sense."""
    for row in entries.chosen:
        line = yield from reader.line()
        entries.part.status[row] = _status_of(entries.part, line, meanings)


def stored(line: bytes) -> Status | None:
    """Return what a reply to SET means."""
    return Status.OK if line == b"+OK" else None


def found(line: bytes) -> Status | None:
    """Return what a reply to EXISTS or DEL of one key means."""
    return {b":1": Status.OK, b":0": Status.ABSENT}.get(line)


def _status_of(part: RespPart, line: bytes, meanings: Callable[[bytes], Status | None]) -> Status:
    if line[:1] == b"-":
        part.first_error = part.first_error or line[1:].decode(errors="replace")
        return Status.NO_SPACE if line.startswith(b"-OOM") else Status.IO_ERROR
    status = meanings(line)
    if status is None:
        raise ConnectionLostError(f"the server's reply makes no sense: {line[:40]!r}")
    return status


def read_values(reader: Reader, entries: Entries) -> Consumer:
    """Read a reply to GET of every entry, values into their places, and check them."""
    part = entries.part
    for row, seed, address, length in zip(
        entries.chosen, entries.seeds, entries.addresses, entries.lengths, strict=True
    ):
        line = yield from reader.line(SHORT_READ)
        if line[:1] != b"$":
            part.status[row] = _status_of(part, line, lambda _: None)
            continue
        size = _bulk_size(line)
        if size == _NIL:
            part.status[row] = Status.ABSENT
        elif size != HEADER.size + length:
            yield from reader.skip(size + _EOL_BYTES)
            part.status[row] = Status.CORRUPT
        else:
            part.status[row] = yield from _value(reader, seed, address, length)


def _value(reader: Reader, seed: int, address: int, length: int) -> Generator[None, None, Status]:
    checksum, stored_length, version, magic = HEADER.unpack((yield from reader.take(HEADER.size)))
    yield from reader.into(memory_at(address, length))
    yield from reader.skip(_EOL_BYTES)
    ours = (stored_length, version, magic) == (length, VERSION, MAGIC)
    same = ours and checksum_at(address, length, seed) == checksum
    return Status.OK if same else Status.CORRUPT


def _bulk_size(line: bytes) -> int:
    try:
        size = int(line[1:])
    except ValueError:
        size = _MAX_BULK + 1
    if not _NIL <= size <= _MAX_BULK:
        raise ConnectionLostError(f"the server's reply makes no sense: {line[:40]!r}")
    return size


def read_count(reader: Reader, part: RespPart) -> Consumer:
    """Read the reply to DBSIZE."""
    line = yield from reader.line()
    if line[:1] == b":" and line[1:].isdigit():
        part.values = int(line[1:])


def drop_lines(reader: Reader, num_lines: int) -> Consumer:
    """Read replies of a line each that change nothing."""
    for _ in range(num_lines):
        yield from reader.line()

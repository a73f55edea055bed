"""The protocol client against peers that dribble, lie or fall silent."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_kv.errors import CardError
from gateway.cards.base import Batch, Op, Status
from gateway.cards.batches import PendingBatch, memory_at
from gateway.cards.resp.connection import Connection, ConnectionLostError, command
from gateway.cards.resp.exchanges import (
    RespPart,
    ask_commands,
    entries_of,
    found,
    read_statuses,
    read_values,
    set_commands,
)
from gateway.cards.resp.settings import parse_endpoint
from tests.support.cards import Arena, random_keys

OK, ABSENT, CORRUPT, IO_ERROR = Status.OK, Status.ABSENT, Status.CORRUPT, Status.IO_ERROR


@contextlib.contextmanager
def peer(serve):
    """A connection whose other end is `serve(socket)` in a thread."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    try:
        yield connection
    finally:
        connection.close()
        theirs.close()
        thread.join(10)


def saying(reply, chunks=None):
    def serve(sock):
        sock.recv(1)
        with contextlib.suppress(OSError):
            start = 0
            for size in chunks or [len(reply)]:
                sock.sendall(reply[start : start + size])
                start += size
            sock.sendall(reply[start:])

    return serve


def part_of(op, lengths, arena, seed=0):
    n = len(lengths)
    batch = Batch(
        op=op,
        token=1,
        databases=np.zeros(n, np.uint16),
        keys=random_keys(n, seed),
        addresses=arena.addresses([arena.place(length) for length in lengths]),
        lengths=np.array(lengths, np.uint32),
    )
    return RespPart(PendingBatch(batch, lambda *_: None), np.arange(n))


def stored_values(lengths, arena):
    """Return what SET sends after the command's own words, by entry, and the part."""
    part = part_of(Op.WRITE, lengths, arena)
    arena.bytes[:] = np.random.default_rng(5).integers(0, 256, arena.num_bytes, dtype=np.uint8)
    entries = entries_of(part, np.arange(len(lengths)), b"p:")
    buffers = [bytes(b) for b in set_commands(entries, 0)]
    heads = buffers[0:-1:2]
    return [h[-16:] + v for h, v in zip(heads, buffers[1::2], strict=True)]


def read(reply, lengths, chunks=None, deadline_s=10):
    arena = Arena(1 << 20)
    part = part_of(Op.READ, lengths, arena)
    entries = entries_of(part, np.arange(len(lengths)), b"p:")
    with peer(saying(reply, chunks)) as connection:
        connection.exchange(
            ask_commands(b"GET", entries),
            read_values(connection.reader, entries),
            time.monotonic() + deadline_s,
        )
    return part, [
        bytes(memory_at(int(a), int(n)))
        for a, n in zip(part.pending.batch.addresses, lengths, strict=True)
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 90), max_size=60))
def test_replies_in_any_pieces_read_the_same(chunks):
    lengths = [0, 1, 30, 200]
    values = stored_values(lengths, Arena(1 << 16))
    reply = b"".join(b"$%d\r\n%b\r\n" % (len(v), v) for v in values)
    part, found_values = read(reply, lengths, chunks)
    assert part.status.tolist() == [OK] * 4
    assert found_values == [v[16:] for v in values]


def test_mixed_replies_stay_in_step():
    lengths = [30, 40, 50, 60, 70]
    values = stored_values(lengths, Arena(1 << 16))
    full = [b"$%d\r\n%b\r\n" % (len(v), v) for v in values]
    reply = full[0] + b"$-1\r\n" + full[1] + b"-ERR odd\r\n" + full[4]
    part, found_values = read(reply, lengths, [1] * 40)
    assert part.status.tolist() == [OK, ABSENT, CORRUPT, IO_ERROR, OK]
    assert part.first_error == "ERR odd"
    assert found_values[4] == values[4][16:]


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n", id="http"),
        pytest.param(b"x" * 20_000, id="endless-line"),
        pytest.param(b"$99999999999\r\n", id="huge"),
        pytest.param(b"$-2\r\n", id="negative"),
        pytest.param(b"$abc\r\n", id="no-number"),
        pytest.param(b"*1\r\n", id="array"),
        pytest.param(b"$-1\r\n+more\r\n", id="unasked"),
    ],
)
def test_peer_that_speaks_no_resp_is_lost(reply):
    with pytest.raises(ConnectionLostError):
        read(reply, [10])


def test_cut_value_loses_the_connection():
    value = stored_values([50_000], Arena(1 << 20))[0]
    reply = (b"$%d\r\n%b" % (len(value), value))[:20_000]

    def serve(sock):
        saying(reply)(sock)
        sock.shutdown(socket.SHUT_WR)

    arena = Arena(1 << 20)
    part = part_of(Op.READ, [50_000], arena)
    entries = entries_of(part, np.arange(1), b"p:")
    with peer(serve) as connection, pytest.raises(ConnectionLostError, match="closed"):
        connection.exchange(
            ask_commands(b"GET", entries),
            read_values(connection.reader, entries),
            time.monotonic() + 10,
        )
    assert part.status.tolist() == [IO_ERROR]


def test_silence_ends_at_the_deadline():
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError, match="deadline"):
        read(b"$10\r\n", [10], deadline_s=0.2)
    assert 0.15 < time.monotonic() - begun < 5


def test_peer_that_trickles_meets_the_deadline():
    """The deadline is for the whole exchange: a byte now and then does not move it."""

    def serve(sock):
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(b"+")
                time.sleep(0.02)

    with peer(serve) as connection, pytest.raises(ConnectionLostError, match="deadline"):
        connection._log_in(parse_endpoint("tcp://h:1"), ("", ""), time.monotonic() + 0.3)


def test_peer_that_never_reads_meets_the_deadline():
    arena = Arena(8 << 20)
    part = part_of(Op.WRITE, [2 << 20] * 3, arena)
    entries = entries_of(part, np.arange(3), b"p:")
    with peer(lambda _: None) as connection, pytest.raises(ConnectionLostError, match="deadline"):
        connection.exchange(
            set_commands(entries, 0),
            read_statuses(connection.reader, entries, found),
            time.monotonic() + 0.3,
        )


def test_server_without_an_answer_is_refused_in_time():
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = parse_endpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    with listener, pytest.raises(CardError, match="deadline"):
        Connection.open(endpoint, ("", ""), 0.3)


def test_command_is_binary_safe():
    assert command(b"GET", b"a\r\nb\0") == b"*2\r\n$3\r\nGET\r\n$5\r\na\r\nb\0\r\n"

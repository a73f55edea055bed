"""One connection that speaks RESP2: pipelined commands out, replies in, both at once.

    exchange(buffers, consumer): send whatever the socket takes, read whatever is there

A consumer is a generator that takes replies apart with a Reader's methods and yields
whenever it needs bytes that have not come. What it wants in memory of the ring is
received there by the kernel; only what came in the same packet as a reply's first line is
copied, at most SHORT_READ bytes.

Threads. A connection belongs to one thread; abort() alone is called from others.
Failure scope. ConnectionLostError ends the connection: closed, timed out, or not RESP. After
that nothing is received any more, so memory it was receiving into is free.
It must not know keys, batches or checksums.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final, TypeAlias

from adp_kv.errors import CardError
from adp_kv.units import KiB, MiB
from gateway.cards.resp.settings import Endpoint

Buffer: TypeAlias = bytes | memoryview
Consumer: TypeAlias = Generator[None, None, None]

SHORT_READ: Final = 64
"""Bytes asked for where a value may follow that belongs elsewhere."""

_LONG_READ: Final = 16 * KiB
_MAX_LINE: Final = 8 * KiB
_SKIP_BYTES: Final = MiB
_MAX_PIECES: Final = 512  # of one sendmsg; the kernel takes 1024
_EOL: Final = b"\r\n"


class ConnectionLostError(CardError):
    """Raised when a connection is closed, silent past its deadline or speaks no RESP."""


class ReplyError(CardError):
    """Raised when the server answers a command of the handshake with an error."""


def command(*words: bytes) -> bytes:
    """Return a command as RESP."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Reader:
    """Takes a stream of replies apart; every method is a generator (see the module)."""

    def __init__(self, sock: socket.socket) -> None:
        """Read from a non-blocking socket."""
        self._socket = sock
        self._buffer = bytearray()

    def line(self, expected: int = _LONG_READ) -> Generator[None, None, bytes]:
        """Return the next line without its end, reading at most `expected` bytes at a time."""
        while (end := self._buffer.find(_EOL)) < 0:
            if len(self._buffer) > _MAX_LINE:
                raise ConnectionLostError("the server's reply is no RESP: its line does not end")
            yield from self._fill(expected)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + len(_EOL)]
        return line

    def take(self, num_bytes: int) -> Generator[None, None, bytes]:
        """Return exactly the next bytes."""
        while len(self._buffer) < num_bytes:
            yield from self._fill(num_bytes - len(self._buffer))
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken

    def into(self, target: memoryview) -> Consumer:
        """Fill `target` with the next bytes."""
        filled = min(len(self._buffer), len(target))
        target[:filled] = memoryview(self._buffer)[:filled]
        del self._buffer[:filled]
        while filled < len(target):
            received = self._receive(target[filled:])
            if received is None:
                yield
            else:
                filled += received

    def skip(self, num_bytes: int) -> Consumer:
        """Drop the next bytes."""
        scratch = memoryview(bytearray(min(num_bytes, _SKIP_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            yield from self.into(part)
            num_bytes -= len(part)

    def expect_end(self) -> None:
        """Refuse bytes beyond the replies that were asked for."""
        if self._buffer:
            raise ConnectionLostError("the server sent a reply that nobody asked for")

    def _fill(self, num_bytes: int) -> Consumer:
        chunk = memoryview(bytearray(num_bytes))
        while (received := self._receive(chunk)) is None:
            yield
        self._buffer += chunk[:received]

    def _receive(self, target: memoryview) -> int | None:
        """Return how many bytes came at once, None where there are none yet."""
        try:
            received = self._socket.recv_into(target)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(str(error.strerror)) from error
        if received == 0:
            raise ConnectionLostError("the server closed the connection")
        return received


class Connection:
    """A logged-in connection (see the module's contract).

    Attributes:
        reader: for consumers.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        self._socket = sock
        self.reader = Reader(sock)

    @classmethod
    def open(cls, endpoint: Endpoint, login: tuple[str, str], timeout_s: float) -> Connection:
        """Connect, log in and select the database.

        Args:
            endpoint: of the server.
            login: user and password, either may be "".
            timeout_s: for all of it; looking up a name may take longer.

        Raises:
            ConnectionLostError: It can't be reached.
            ReplyError: It refuses us.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if endpoint.host is not None:
                sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(timeout_s)
                with contextlib.ExitStack() as on_failure:
                    on_failure.callback(sock.close)
                    sock.connect(endpoint.path)
                    on_failure.pop_all()
        except OSError as error:
            raise ConnectionLostError(error.strerror or str(error)) from error
        connection = cls(sock)
        try:
            connection._log_in(endpoint, login, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _log_in(self, endpoint: Endpoint, login: tuple[str, str], deadline: float) -> None:
        user, password = login
        commands = [command(b"PING")]
        if endpoint.db:
            commands.insert(0, command(b"SELECT", b"%d" % endpoint.db))
        if password:
            words = [b"AUTH", *([user.encode()] if user else []), password.encode()]
            commands.insert(0, command(*words))

        def replies() -> Consumer:
            for _ in commands:
                line = yield from self.reader.line()
                if line[:1] != b"+":
                    raise ReplyError(line[1:].decode(errors="replace"))

        self.exchange(commands, replies(), deadline)

    def is_stale(self) -> bool:
        """Return whether the idle connection was closed (or has bytes nobody asked for)."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def exchange(self, outgoing: Sequence[Buffer], consumer: Consumer, deadline: float) -> None:
        """Send buffers while `consumer` reads replies; return when it has ended.

        Args:
            outgoing: commands, in order.
            consumer: reads their replies.
            deadline: on time.monotonic().

        Raises:
            ConnectionLostError: See the module; what the consumer had read by then stays valid.
        """
        left = deque(memoryview(buffer) for buffer in outgoing if len(buffer))
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | select.POLLOUT)
        listening_only = False
        while True:
            if left:
                self._send(left)
            if next(consumer, self) is self:  # it ended: it yields None alone
                self.reader.expect_end()
                return
            if not left and not listening_only:
                poller.modify(self._socket, select.POLLIN)
                listening_only = True
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                raise ConnectionLostError("no answer before the deadline")
            poller.poll(wait_s * 1000)

    def _send(self, left: deque[memoryview]) -> None:
        try:
            sent = self._socket.sendmsg([left[i] for i in range(min(len(left), _MAX_PIECES))])
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLostError(str(error.strerror)) from error
        while sent:
            first = left.popleft()
            if len(first) > sent:
                left.appendleft(first[sent:])
            sent -= min(sent, len(first))

    def abort(self) -> None:
        """Make the thread that waits on this connection see it closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

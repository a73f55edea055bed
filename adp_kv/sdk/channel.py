"""One connection to the gateway: the socket, its handshake, its heartbeat.

    open ─► handshake (Hello until Welcome) ─► send / receive, Ping ◄─► Pong ─► close

Threads: used by one thread from open to close (a ZeroMQ socket belongs to one).
Failure scope: GatewayError ends the connection; there is no way back but a new one.
Knows no tensor library and no vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq

from adp_kv.errors import GatewayError, WireError
from adp_kv.wire.curve import read_keys
from adp_kv.wire.frames import MAX_MESSAGE_BYTES, decode_at_rank, encode
from adp_kv.wire.messages import (
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refused,
    ToGateway,
    ToRank,
    Welcome,
)

HELLO_INTERVAL_S = 1.0
CONNECT_INTERVAL_S = 0.02
STOP_INTERVAL_S = 0.1
RETRY_PREFIX = "retry: "


class Channel:
    """A DEALER socket to one gateway.

    Args:
        address: tcp://HOST:PORT or ipc:///PATH.
        timeout_s: silence after which the gateway counts as gone.
        clock: monotonic seconds.
        key_file: the secret shared with the gateway (wire/curve.py); empty for none.

    Raises:
        ConfigError: The key file can't be used.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        key_file: str = "",
    ) -> None:
        keys = read_keys(key_file)
        self.address = address
        self._timeout_s = timeout_s
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a gateway that is away
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if keys is not None:
            keys.protect_client(self._socket)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._heartbeat_s = 1.0
        self._last_heard = clock()
        self._last_ping = clock()
        self._last_beat = clock()
        self._asked_at: float | None = None  # the first ping since the gateway was last heard

    def watch(self, fd: int) -> None:
        """Let wait() return when fd is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when a message or a watched fd is there, or after timeout_s."""
        self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))

    def send(self, message: ToGateway) -> None:
        """Queue a message.

        Raises:
            GatewayError: Nobody is connected.
        """
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            reason = "the connection is lost" if error.errno == zmq.EAGAIN else str(error)
            raise GatewayError(f"the gateway at {self.address} is gone: {reason}") from error

    def receive(self) -> ToRank | None:
        """Return the next message, None if there is none; pings are answered here.

        Raises:
            GatewayError: The gateway said Goodbye, or speaks nonsense.
        """
        while True:
            # Tried, not asked for: to ask (zmq.EVENTS) is to hear of the disconnection, whereupon a
            # socket with IMMEDIATE drops what the gateway said before, its Goodbye.
            try:
                frames: Sequence[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self._last_heard = self._clock()
            self._asked_at = None
            try:
                message = decode_at_rank(frames)
            except WireError as error:
                raise GatewayError(
                    f"the gateway at {self.address} sent nonsense: {error}"
                ) from error
            if isinstance(message, Goodbye):
                raise GatewayError(f"the gateway ended the session: {message.reason}")
            if isinstance(message, Ping):
                self.send(Pong(message.nonce))
            elif not isinstance(message, Pong):
                return message

    def handshake(
        self, hello: Hello, deadline: float, stopped: Callable[[], bool] = lambda: False
    ) -> Welcome:
        """Say Hello until the gateway welcomes the whole engine.

        Args:
            hello: who this is.
            deadline: on the channel's clock.
            stopped: asked often; True gives up.

        Raises:
            GatewayError: Refused, or no Welcome by the deadline; names the remedy.
        """
        reason = (
            f"no gateway answers at {self.address}: start adp-gateway with the same address, or "
            "correct the setting gateway; one with a key_file answers only peers with the same key"
        )
        next_hello = self._clock()
        while self._clock() < deadline and not stopped():
            if self._clock() >= next_hello:
                sent = self._try_send(hello)
                next_hello = self._clock() + (HELLO_INTERVAL_S if sent else CONNECT_INTERVAL_S)
            until = min(next_hello, deadline, self._clock() + STOP_INTERVAL_S)
            self.wait(max(0.0, until - self._clock()))
            heard = self._last_heard
            message = self.receive()
            if isinstance(message, Welcome):
                self._heartbeat_s = message.heartbeat_s
                return message
            if isinstance(message, Refused):
                if not message.reason.startswith(RETRY_PREFIX):
                    raise GatewayError(f"the gateway refuses rank {hello.rank}: {message.reason}")
                reason = message.reason.removeprefix(RETRY_PREFIX)
            elif message is None and self._last_heard != heard:  # a ping
                reason = "the gateway answers, but not every rank of the engine has joined"
        raise GatewayError(reason)

    def _try_send(self, message: ToGateway) -> bool:
        try:
            self.send(message)
        except GatewayError:
            return False  # not connected yet, or not up: the next Hello may reach it
        return True

    def heartbeat(self) -> float:
        """Ping when it is time; return seconds until this must be called again.

        Only time in which this thread could have heard an answer counts as silence: a thread
        that was itself held up, for however long, looks again before it gives up.

        Raises:
            GatewayError: A ping was not answered for longer than timeout_s.
        """
        now = self._clock()
        if now - self._last_beat > self._timeout_s / 2 and self._asked_at is not None:
            self._asked_at = now  # it was this process that stood still
        self._last_beat = now
        if self._asked_at is not None and now - self._asked_at > self._timeout_s:
            raise GatewayError(
                f"the gateway at {self.address} was silent for {self._timeout_s:g} s "
                "(gateway_timeout_s)"
            )
        interval = min(self._heartbeat_s, self._timeout_s / 4)
        if now - self._last_ping >= interval:
            self._last_ping = now
            self._asked_at = now if self._asked_at is None else self._asked_at
            self.send(Ping(0))
        return max(0.0, self._last_ping + interval - now)

    def close(self, goodbye: str | None = None) -> None:
        """Close, after a Goodbye if one is given; safe to call twice."""
        if self._socket.closed:
            return
        if goodbye is not None:
            self._try_send(Goodbye(goodbye))
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

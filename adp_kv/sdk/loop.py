"""A thread that owns a channel: requests come in through a queue, answers by callbacks.

    caller ─call()─► queue ─eventfd─► loop thread ─► channel ─► gateway

Threads: call() may be called from any thread; on_* run on the loop's thread. Failure
scope: the first error ends the loop for good: on_off(reason) runs once, and the one
line that users look for is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from adp_kv.errors import AdpError, GatewayError
from adp_kv.sdk.channel import Channel
from adp_kv.wire.messages import Hello, ToRank, Welcome

log = logging.getLogger("adp_kv")

OFF_MESSAGE = "External KV cache turned off on this rank"
ON_MESSAGE = "External KV cache is back on this rank"
JOIN_TIMEOUT_S = 5.0


class ChannelLoop(ABC):
    """Base of the SDK's clients; off_message begins the line that says it went off.

    Attributes:
        key_file: of the channel; again: this client follows one that went off, and says
            nothing unless it comes on; both set before start().

    Args:
        hello: who this is; sent until the gateway welcomes the engine.
        address, timeout_s: of the channel.
        connect_timeout_s: how long to wait for the Welcome.
    """

    off_message = OFF_MESSAGE
    on_again_message = ON_MESSAGE

    def __init__(
        self, hello: Hello, address: str, timeout_s: float, connect_timeout_s: float
    ) -> None:
        self.off_reason: str | None = None
        self.welcome: Welcome | None = None
        self.key_file = ""
        self.again = False
        self._generation = 0
        self._hello = hello
        self._address = address
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._queue: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._settled = threading.Event()
        self._closed = False
        self._channel: Channel | None = None
        name = f"adp_kv-rank{hello.rank}" if hello.rank >= 0 else "adp_kv-lookup"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def off(self) -> bool:
        """Whether the external cache is off on this rank."""
        return self.off_reason is not None

    @property
    def ended(self) -> bool:
        """Whether it went off and its thread has freed what it owned."""
        return self.off and not self._thread.is_alive()

    @property
    def generation(self) -> int:
        """Of the session it was welcomed to, whatever came of it; 0 before."""
        return self._generation

    @property
    def channel(self) -> Channel:
        """The channel; only for the loop's thread."""
        if self._channel is None:
            raise GatewayError("the channel is not open")
        return self._channel

    def start(self) -> None:
        """Start the thread; it connects in the background."""
        self._thread.start()

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Wait until connected or off (by default the connect time-out); return if connected."""
        limit_s = self._connect_timeout_s + JOIN_TIMEOUT_S
        self._settled.wait(limit_s if timeout_s is None else timeout_s)
        return self.welcome is not None and not self.off

    def call(self, function: Callable[[], None]) -> None:
        """Run function on the loop's thread, in the order of calls; never once it is off."""
        if self.off:
            return
        self._queue.append(function)
        with contextlib.suppress(OSError):  # closed meanwhile: nobody is left to run it
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        goodbye: str | None = "engine shut down"
        try:
            self._connect()
            while not self._stopping:
                self._turn()
        except AdpError as error:
            goodbye = f"rank {self._hello.rank} turned the cache off: {error}"
            self._turn_off(str(error))
        except Exception as error:
            log.exception("unexpected error in the adp_kv client")
            goodbye = f"rank {self._hello.rank} failed: {error!r}"
            self._turn_off(repr(error))
        finally:
            self._turn_off("the engine shut down")
            self._settled.set()
            if self._channel is not None:
                self._channel.close(goodbye)
            self.on_exit()

    def _connect(self) -> None:
        self._channel = Channel(self._address, self._timeout_s, key_file=self.key_file)
        deadline = time.monotonic() + self._connect_timeout_s
        welcome = self._channel.handshake(self._hello, deadline, lambda: self._stopping)
        self._generation = welcome.generation
        self._channel.watch(self._wake_fd)  # not before: what was asked meanwhile must wait
        self.on_welcome(welcome)
        self.welcome = welcome
        if self.again:
            log.warning("%s", self.on_again_message)
        self._settled.set()

    def _turn(self) -> None:
        wait_s = min(self.channel.heartbeat(), self.on_turn())
        if not self._queue:
            self.channel.wait(wait_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._queue:
            self._queue.popleft()()
        while (message := self.channel.receive()) is not None:
            self.on_message(message)

    def _turn_off(self, reason: str) -> None:
        if self.off_reason is not None:
            return
        self.off_reason = reason
        if not self._stopping and not (self.again and self.welcome is None):
            log.error("%s: %s", self.off_message, reason)
        self.on_off(reason)

    def close(self) -> None:
        """Stop the thread and close the channel; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._stopping = True
        self.call(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        if not self._thread.is_alive():  # one that is still waits there
            os.close(self._wake_fd)

    @abstractmethod
    def on_welcome(self, welcome: Welcome) -> None:
        """The engine is complete; may raise AdpError to stay off."""

    @abstractmethod
    def on_message(self, message: ToRank) -> None:
        """A message other than the channel's own has come."""

    @abstractmethod
    def on_turn(self) -> float:
        """Do what is due; return seconds until this must run again."""

    @abstractmethod
    def on_off(self, reason: str) -> None:
        """The cache is off: finish everything unfinished as failed; must not raise."""

    @abstractmethod
    def on_exit(self) -> None:
        """The thread is ending: free what it owned; must not raise."""

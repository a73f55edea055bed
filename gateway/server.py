"""The poll loop: one ROUTER socket, one card, at most one engine at a time.

    socket ─► frames ─► Engine ─► tables ─► ObjectStore ─► card
                                     ▲                       │ eventfd
                                     └───────── poll() ◄─────┘

Threads: serve() owns the socket and everything behind it; the card has its own
threads and reaches this one through the store's eventfd. stop() may be called from a
signal handler. Failure scope: a malformed message or a wrong request costs its
sender a line in the log and, where it was asking, a Refused or Failed; it never ends
the loop. An engine that ends is answered Goodbye and makes room for the next. An error
that nobody expected ends the engine, not the gateway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from adp_kv import __version__
from adp_kv.errors import AdpError, ConfigError, RingError, WireError
from adp_kv.ring.region import RingFile, ring_path, sweep
from adp_kv.wire.curve import CurveKeys, read_keys
from adp_kv.wire.frames import MAX_MESSAGE_BYTES, decode_at_gateway, encode
from adp_kv.wire.keys import unpack_keys
from adp_kv.wire.messages import (
    Ahead,
    Attached,
    Failed,
    Forget,
    Get,
    Goodbye,
    Hello,
    Inspect,
    Lookup,
    LookupReply,
    Ping,
    Pong,
    Put,
    Refused,
    Release,
    StatsReply,
    StatsRequest,
    ToGateway,
    ToRank,
)
from gateway.cards.base import Card, StatusArray
from gateway.config import Settings
from gateway.counters import Counters
from gateway.engine import Engine
from gateway.gatekeeper import Gatekeeper
from gateway.metrics import EMPTY, ZEROS, Snapshot, histogram_name
from gateway.metrics_http import MetricsServer
from gateway.objects import ObjectStore
from gateway.session import check_hello

log = logging.getLogger("adp_kv.gateway")

TICK_S = 0.1
SEND_QUEUE_MESSAGES = 100_000
MESSAGES_A_TURN = 256
MAX_UNREACHABLE = 1000
RETRY = "retry: "
"""Prefix of a Refused that a rank should answer by asking again."""


class Server:
    """Serves one engine after another until stop().

    Args:
        settings: checked settings.
        card: not yet open.
        clock: monotonic seconds.

    Raises:
        ConfigError: The address is taken.
        RingError: /dev/shm has too little room.
        CardError: The card can't be opened.
    """

    def __init__(
        self, settings: Settings, card: Card, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._counters = Counters()
        self._engine: Engine | None = None
        self._abandoned: list[Engine] = []
        self._unreachable: set[bytes] = set()  # peers that the log has named
        self._ring: RingFile | None = None
        self._metrics: MetricsServer | None = None
        self._running = True
        self._next_tick = clock()
        keys = read_keys(settings.key_file)
        self._context = zmq.Context()
        self._gatekeeper = None if keys is None else Gatekeeper(self._context, keys)
        self._socket = self._bind(keys)
        try:
            sweep(ring_path(settings.effective_ring_name))
            _check_patience(settings, card)
            self._ring = self._reserve()
            if settings.metrics:
                self._metrics = MetricsServer(settings.metrics, clock)
            self._store = ObjectStore(
                card,
                settings.effective_fragment_size,
                deadline_s=settings.card_deadline_s,
                quarantine_s=settings.quarantine_s,
                clock=clock,
            )
        except BaseException:
            if self._ring is not None:
                self._ring.close()
            if self._metrics is not None:
                self._metrics.close()
            self._close_socket()
            raise
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _bind(self, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        router.setsockopt(zmq.LINGER, 200)
        if keys is not None:
            keys.protect_server(router)
        try:
            _refuse_taken_path(self._settings.listen)
            router.bind(self._settings.listen)
        except (OSError, zmq.ZMQError) as error:
            router.close(0)
            self._close_gate()
            self._context.term()
            listen = self._settings.listen
            raise ConfigError(f"listen = {listen}: {error}; {_how_to_listen(listen)}") from error
        return router

    def _reserve(self) -> RingFile:
        return RingFile(self._settings.effective_ring_name, self._settings.shared_memory_size)

    @property
    def counters(self) -> dict[str, int]:
        """All sums since the start, the card's prefixed with card_."""
        card = {f"card_{name}": value for name, value in self._store.card.stats().items()}
        store = {
            "card_batches_late": self._store.num_given_up,
            "card_databases_out": self._store.num_databases_out,
        }
        return self._counters.snapshot() | store | card

    def snapshot(self) -> Snapshot:
        """Return all metrics as they are now; for the main thread."""
        values: dict[str, float] = {**ZEROS, **self.counters}
        if self._gatekeeper is not None:
            values["peers_refused"] = self._gatekeeper.num_refused
        values["card_batches_open"] = self._store.num_inflight
        values["engine_active"] = 0
        if self._engine is not None:
            values |= self._engine.gauges()
        durations = dict(EMPTY)
        durations |= {histogram_name(n): h for n, h in self._counters.durations().items()}
        for op, histogram in self._store.durations.items():
            durations[f"card_seconds:{op.name.lower()}"] = histogram.copy()
        for database, histogram in self._store.card.latencies().items():
            durations[f"card_database_seconds:{database}"] = histogram
        return Snapshot({"release": __version__, "card": self._settings.card}, values, durations)

    @property
    def metrics_port(self) -> int:
        """The port of the metrics, 0 if they are off."""
        return 0 if self._metrics is None else self._metrics.port

    def stop(self) -> None:
        """Let serve() return; safe from a signal handler or another thread."""
        self._running = False
        with contextlib.suppress(OSError, ValueError):  # it has closed already
            os.eventfd_write(self._stop_fd, 1)

    def serve(self) -> None:
        """Serve until stop(), then say Goodbye and close everything."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._store.wakeup_fd, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        log.info(
            "serving %s; card %s, fragment_size %d",
            self._settings.listen,
            self._settings.card,
            self._store.fragment_size,
        )
        try:
            while self._running:
                poller.poll(max(0, int((self._next_tick - self._clock()) * 1000)))
                try:
                    self._turn()
                except Exception:
                    log.exception("unexpected error; the engine's session ends")
                    self._counters.add("unexpected_errors")
                    if self._engine is not None:
                        self._engine.end("unexpected error in the gateway; see its log")
        finally:
            self._close()

    def _turn(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.answer()
        self._store.poll()
        for _ in range(MESSAGES_A_TURN):
            # Asked for, since to raise and catch zmq.Again takes longer than a message.
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            self._on_frames(self._socket.recv_multipart(zmq.NOBLOCK))
        self._store.poll()
        if self._clock() >= self._next_tick:
            self._next_tick = self._clock() + TICK_S
            self._tick()

    def _on_frames(self, frames: list[bytes]) -> None:
        identity, *payload = frames
        try:
            self._on_message(identity, decode_at_gateway(payload))
        except WireError as error:
            self._counters.add("bad_messages")
            log.warning("message from peer %s refused: %s", identity.hex(), error)
        except AdpError as error:
            log.error("while serving peer %s: %s", identity.hex(), error)  # noqa: TRY400

    def _on_message(self, identity: bytes, message: ToGateway) -> None:
        if isinstance(message, Hello):
            self._on_hello(identity, message)
            return
        if isinstance(message, StatsRequest):
            self._deliver(identity, StatsReply(self.counters))
            return
        if isinstance(message, Inspect):
            self._inspect(identity, message)
            return
        engine = self._engine
        rank = None if engine is None else engine.rank_of(identity)
        if engine is None or rank is None or engine.ended is not None:
            if not isinstance(message, Goodbye | Pong):
                self._deliver(
                    identity, Goodbye("this gateway does not know you: restart the engine")
                )
            return
        engine.touch(rank)
        try:
            self._dispatch(engine, identity, rank, message)
        except WireError as error:
            if isinstance(message, Get | Put):
                self._deliver(identity, Failed(message.seq, str(error)))
            raise

    def _inspect(self, identity: bytes, message: Inspect) -> None:
        chunks = unpack_keys(message.chunks)
        if not len(chunks):
            raise WireError("a question names no chunk")

        def then(status: StatusArray) -> None:
            self._deliver(identity, LookupReply(message.request, (status == 0).tobytes()))

        self._store.committed(chunks, then)

    def _dispatch(self, engine: Engine, identity: bytes, rank: int, message: ToGateway) -> None:
        if isinstance(message, Get | Put | Release):
            engine.request(rank, message)
        elif isinstance(message, Lookup):
            engine.lookup(rank, message)
        elif isinstance(message, Ahead | Forget):
            engine.read_ahead(rank, message)
        elif isinstance(message, Ping):
            self._deliver(identity, Pong(message.nonce))
        elif isinstance(message, Attached):
            engine.attached(rank, message)
        elif isinstance(message, Goodbye):
            engine.end(f"rank {rank} left: {message.reason}")

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        try:
            check_hello(hello)
            engine = self._engine_for(identity, hello)
            engine.hello(identity, hello)
        except (WireError, RingError) as error:
            self._counters.add("hellos_refused")
            self._deliver(identity, Refused(str(error)))
            if self._engine is not None and self._engine.start_failed:
                self._engine.end(str(error))
            if not str(error).startswith(RETRY):
                log.warning("Hello of rank %d refused: %s", hello.rank, error)

    def _engine_for(self, identity: bytes, hello: Hello) -> Engine:
        engine = self._engine
        if engine is not None and engine.ended is None:
            # A successor, perhaps under the same name: are those before it still there?
            is_other = engine.session.engine != hello.engine
            if is_other or engine.is_taken(identity, hello.rank):
                engine.check_peers(Ping(0))
        if engine is not None and engine.ended is not None:
            self._retire(engine)
            engine = self._engine
            if engine is not None:
                raise WireError(f"{RETRY}the last engine's transfers are still ending")
        if engine is not None and engine.session.engine != hello.engine:
            raise WireError(
                f"{RETRY}this gateway serves engine {engine.session.engine}; one gateway serves "
                "one engine: start another with its own --listen port"
            )
        if engine is None:
            try:
                ring = self._ring or self._reserve()
            except RingError as error:  # until those who map the last ring have gone
                raise WireError(f"{RETRY}{error}") from error
            self._ring = None
            engine = self._engine = Engine(
                hello,
                self._settings,
                ring,
                self._store,
                self._counters,
                self._deliver,
                self._clock,
            )
        return engine

    def _retire(self, engine: Engine) -> None:
        if engine.drained:
            engine.close()
            self._engine = None
        elif engine.is_stuck:
            # Its ring stays mapped, so that whatever the card does late does no harm.
            log.error("the card still has ring slots of the engine that ended: they are left to it")
            self._abandoned.append(engine)
            self._engine = None

    def _tick(self) -> None:
        if self._metrics is not None:
            self._metrics.publish(self.snapshot())
        self._store.tick()
        if self._abandoned and self._store.num_late == 0:
            for abandoned in self._abandoned:
                abandoned.free_abandoned()
            self._abandoned.clear()
        engine = self._engine
        if engine is not None:
            engine.tick()
            if engine.ended is not None:
                self._retire(engine)
        if self._engine is None and self._ring is None:
            try:
                self._ring = self._reserve()
            except RingError as error:
                log.debug("no room for the next engine's ring yet: %s", error)

    def _deliver(self, identity: bytes, message: ToRank) -> bool:
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: the peer's connection is gone. EAGAIN: it does not read.
            self._note_unreachable(identity, error)
            return False
        self._unreachable.discard(identity)
        return True

    def _note_unreachable(self, identity: bytes, error: zmq.ZMQError) -> None:
        """Log once a peer: who left may have sent much before, such as a ping a second."""
        if identity in self._unreachable:
            return
        if len(self._unreachable) >= MAX_UNREACHABLE:
            self._unreachable.clear()
        self._unreachable.add(identity)
        log.info("peer %s is not reachable: %s", identity.hex(), error)

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._engine is not None:
            self._engine.end("the gateway is shutting down")
        self._store.close()
        if self._engine is not None:
            self._engine.close()
        if self._ring is not None:
            self._ring.close()
        self._close_socket()
        os.close(self._stop_fd)
        self._stop_fd = -1

    def _close_gate(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()

    def _close_socket(self) -> None:
        self._socket.close()
        self._close_gate()
        self._context.term()
        if self._settings.listen.startswith("ipc://"):
            Path(self._settings.listen.removeprefix("ipc://")).unlink(missing_ok=True)


def _check_patience(settings: Settings, card: Card) -> None:
    """Refuse a card that may evict values whose commit record is still to come."""
    kept_s = card.limits.uncommitted_s
    if kept_s <= settings.job_deadline_s:
        raise ConfigError(
            f"job_deadline_s = {settings.job_deadline_s:g}, but the card keeps values without a "
            f"commit record for {kept_s:g} s; raise --card-option uncommitted_s above it"
        )


def _how_to_listen(listen: str) -> str:
    folder = Path(listen.removeprefix("ipc://")).parent
    if listen.startswith("ipc://") and not folder.is_dir():
        return f"make the folder first: mkdir -m 700 {folder}"
    return "is another gateway running there? Give each engine's gateway its own address"


def _refuse_taken_path(listen: str) -> None:
    """Raise OSError if someone listens at an ipc address; ZeroMQ would take it over silently."""
    if not listen.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(listen.removeprefix("ipc://"))
        except OSError:
            return  # nobody there
    raise OSError("address in use")

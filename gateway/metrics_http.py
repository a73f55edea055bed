"""HTTP for Prometheus and for probes: /metrics, and /healthz while the gateway's loop turns.

    main thread ── publish(Snapshot) ──► [latest] ◄── HTTP thread ── GET

Threads: one of its own, which only reads the latest snapshot: a slow or hostile reader holds
up other readers, for at most READ_TIMEOUT_S, and never the gateway. Failure scope: an address
that can't be bound is a ConfigError before anything is served. There is no authentication:
keep it on loopback, or behind what guards the cluster's other metrics (docs/threat-model.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer

from adp_kv.errors import ConfigError
from gateway.metrics import CONTENT_TYPE, Snapshot, render

READ_TIMEOUT_S = 2.0
STALE_S = 5.0
_POLL_S = 0.2


class MetricsServer:
    """Serves the latest snapshot.

    Args:
        address: HOST:PORT.
        clock: monotonic seconds.

    Raises:
        ConfigError: The address can't be bound.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._clock = clock
        self._latest: tuple[float, Snapshot] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_TIMEOUT_S

            def do_GET(self) -> None:
                status, content_type, body = outer.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:  # not a line for every scrape
                return

        try:
            self._http = HTTPServer((host.strip("[]"), int(port)), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics = {address!r}: {error}; choose a free port") from error
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_POLL_S,), name="adp-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served, also where 0 was asked for."""
        return int(self._http.server_address[1])

    def publish(self, snapshot: Snapshot) -> None:
        """Show this from now on."""
        self._latest = (self._clock(), snapshot)

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body for a path."""
        latest = self._latest
        if latest is None or path not in {"/metrics", "/healthz"}:
            return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics or /healthz\n"
        age_s = self._clock() - latest[0]
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE, render(latest[1]).encode()
        if age_s > STALE_S:
            told = f"the gateway's loop has stood still for {age_s:.0f} s\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", told.encode()
        return HTTPStatus.OK, "text/plain", b"ok\n"

    def close(self) -> None:
        """Stop serving; safe to call twice."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(READ_TIMEOUT_S)

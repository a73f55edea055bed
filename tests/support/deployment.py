"""What a user runs: a gateway with a slab card, and the settings that point an engine at it.

with Deployment(tmp_path) as deployment:
    engine.start("llama", deployment.connector(chunk_size=256))
    ...
    deployment.kill9(engine)     # gateway and engine, as a power cut would
    deployment.restart()         # same address, same card
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adp_kv.wire.keys import object_keys, unpack_keys, whole_keys
from tests.support.engine import Engine
from tests.support.faulty_gateway import FAULT_FILE
from tests.support.gateways import Gateway
from tests.support.server import Server

OFF_LINE = "External KV cache turned off on this rank"
COMMIT_TIMEOUT_S = 60.0
CARD: dict[str, object] = {
    "capacity_bytes": "128MiB",
    "num_databases": 2,
    "scrub_bytes_per_s": 0,  # what a test damages is found by the get, not before it
}


class Deployment:
    """A gateway over a card that outlives it.

    Args:
        folder: of the card.
        card_options: beside path; CARD by default.
        faulty: let inject() make the card fail.
        settings: the gateway's.
    """

    def __init__(
        self,
        folder: Path,
        card_options: Mapping[str, object] | None = None,
        *,
        faulty: bool = False,
        **settings: object,
    ) -> None:
        self.folder = folder
        self._card = CARD | dict(card_options or {}) | {"path": folder / "card"}
        # A disk that others use may stand still for half a minute.
        patience = {"card_deadline_s": 90, "rank_deadline_s": 90}
        self._settings: dict[str, Any] = {"shared_memory_size": "64MiB"} | patience | settings
        self._fault_file = folder / "fault"
        self._faulty = faulty
        self.address: str | None = None
        self.gateway: Gateway
        self.restart()

    def restart(self, **settings: object) -> None:
        """Start a gateway in the place of the one that is gone, of which nothing is kept.

        Args:
            settings: of the gateway that are others from now on.
        """
        self._settings |= settings
        if self.address is not None:
            self.gateway.close()
        self.gateway = Gateway.serve(
            "slab",
            self._card,
            self.address,
            env={FAULT_FILE: str(self._fault_file)},
            program="tests.support.faulty_gateway" if self._faulty else "gateway",
            **self._settings,
        )
        self.address = self.gateway.address

    def connector(self, policy: str | None = None, **settings: object) -> dict[str, Any]:
        """Return transfer_config() for this gateway."""
        return transfer_config(self.address, policy, **settings)

    def counters(self) -> dict[str, int]:
        """Return the gateway's counters."""
        return self.gateway.counters()

    def wait_committed(self, num_chunks: int) -> None:
        """Wait until this gateway has committed at least num_chunks since its start.

        Raises:
            ChildError: It has not in time; says what it counted.
        """
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        while (counters := self.counters()).get("chunks_committed", 0) < num_chunks:
            if time.monotonic() > deadline:
                raise self.gateway.child.fail(f"{num_chunks} chunks not committed: {counters}")
            time.sleep(0.05)

    def inject(self, fault: str) -> None:
        """Set the card's faults (faulty_gateway.py says which); "" for none."""
        assert self._faulty, "Deployment(faulty=True)"
        self._fault_file.write_text(fault)

    def damage_card(self) -> int:
        """Overwrite part of every value on the card behind its back; return how many bytes."""
        changed = 0
        for slab in (self.folder / "card").glob("slab-*.data"):
            with slab.open("r+b") as file:
                for offset in range(4096, slab.stat().st_size, 4096):  # the header stays
                    file.seek(offset + 64)
                    changed += file.write(b"\xa5" * 8)
        return changed

    def lose_object(self, chunk: str, cache: int) -> None:
        """Let the card not find one object of a chunk any more, until inject().

        Args:
            chunk: its key in hex (worker_extension.adp_saved).
            cache: index of the cache.
        """
        (key,) = whole_keys(object_keys(unpack_keys(bytes.fromhex(chunk)), [cache]))
        before = self._fault_file.read_text() if self._fault_file.exists() else ""
        self.inject(f"{before}lose {key.tobytes().hex()}\n")

    def kill9(self, *others: Engine | Server) -> None:
        """Kill the gateway and what is given, the gateway first."""
        self.gateway.kill9()
        for other in others:
            other.kill9()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.gateway.close()


def transfer_config(
    address: str | None, policy: str | None = None, **settings: object
) -> dict[str, Any]:
    """Return a --kv-transfer-config for a gateway.

    Args:
        address: of the gateway.
        policy: kv_load_failure_policy.
        settings: of the connector; chunk_size is 256 by default.
    """
    # Where the ranks of a CPU engine spin on every core, the kernel was seen to keep a
    # gateway waiting for its turn for nine seconds: longer than a deployment should wait.
    defaults = {"gateway": address, "chunk_size": 256}
    patience = {"lookup_timeout_s": 30.0, "gateway_timeout_s": 60.0, "load_timeout_s": 60.0}
    config: dict[str, Any] = {
        "kv_connector": "AdpConnector",
        "kv_connector_module_path": "adp_kv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": defaults | patience | settings,
    }
    return config | ({"kv_load_failure_policy": policy} if policy else {})


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt of random tokens of the tiny models' vocabulary; equal for equal seeds."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, 2000) for _ in range(length)]


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts of 20 to 420 tokens; most begin like an earlier one, cut anywhere."""
    numbers = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        shared: list[int] = []
        if prompts and numbers.random() < 0.75:
            parent = numbers.choice(prompts)
            shared = parent[: numbers.randrange(1, len(parent) + 1)]
        length = max(len(shared) + 1, numbers.randrange(20, 420))
        fresh = [numbers.randrange(3, 2000) for _ in range(min(length, 420) - len(shared))]
        prompts.append(shared + fresh)
    return prompts


def expected_hit(length: int, chunk: int = 256) -> int:
    """Return how much of a stored prompt is hit: at least one token is left to compute."""
    return (length - 1) // chunk * chunk


def off_lines(log: str) -> int:
    """Return how often a log says that a rank turned the cache off."""
    return log.count(OFF_LINE)

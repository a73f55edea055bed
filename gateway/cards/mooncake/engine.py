"""A client of Mooncake Store: the wheel's C++ engine behind typed calls.

    names, pointers, sizes ──► codes, int64 [n]: what the engine says of each entry

Threads. The calls may run on several threads at once; they let go of the GIL. After close()
there are none: the engine does not survive one.
Deadlines. An answer of the master takes at most `io_timeout_s`, a transfer that does not
move fails after as long; what waits behind it on its connection waits on, so that a call
can take a few times that. When a call has returned, nothing touches its memory any more.
Failure scope. Codes below 0 concern their entry. The engine reads its environment: what
MC_LOG_LEVEL, MC_TCP_LANES_PER_PEER and MC_STORE_CLIENT_SETUP_RETRIES say there is kept.
"""

from __future__ import annotations

import importlib
import math
import socket
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.errors import CardError
from gateway.cards.mooncake.settings import Master, MooncakeSettings
from gateway.config import export

Codes: TypeAlias = NDArray[np.int64]
"""int64 [n], 0 or more where the engine did what it was asked."""

OK: Final = 0
NO_ROOM: Final = -200
BAD_SIZE: Final = -600
GONE: Final = frozenset({-703, -704, -707, -710, -712})
TRANSFER_FAILED: Final = -800
_RPC_CODES: Final = range(-999, -899)

_MEANINGS: Final = {
    NO_ROOM: "no room",
    BAD_SIZE: "a wrong parameter",
    TRANSFER_FAILED: "the transfer failed",
    -703: "not whole",
    -704: "not there",
    -707: "the lease ran out",
    -900: "the master can't be reached",
    -901: "the master does not answer",
}

_WHEEL: Final = "mooncake-transfer-engine-non-cuda"
_NEEDED: Final = ("batch_put_from_multi_buffers", "batch_get_into_multi_buffers", "batch_remove")
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")


def meaning(code: int) -> str:
    """Return a code of the engine in words."""
    return f"{_MEANINGS.get(code, 'the engine failed')} (code {code})"


def unreachable(codes: Codes) -> bool:
    """Return whether codes say that the master did not answer."""
    return bool(((codes >= _RPC_CODES.start) & (codes < _RPC_CODES.stop)).any())


def load() -> Any:  # noqa: ANN401 - the wheel has no types
    """Return the module mooncake.store.

    Raises:
        CardError: It is not there, too old, or lacks a library; the message says what to install.
    """
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise CardError(
            f"the package {_WHEEL} is missing: pip install 'adp-kv[mooncake]'"
        ) from error
    except ImportError as error:
        raise CardError(
            f"the package {_WHEEL} lacks a library of the system: {error}; "
            "Debian, Ubuntu: apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
    store_type = getattr(module, "MooncakeDistributedStore", None)
    missing = [name for name in _NEEDED if not hasattr(store_type, name)]
    if missing:
        raise CardError(f"the package mooncake has no {missing[0]}: pip install '{_WHEEL}>=0.3.13'")
    return module


class Engine:
    """One client of one store (see the module)."""

    def __init__(self, master: Master, settings: MooncakeSettings) -> None:
        """Connect to the store.

        Raises:
            CardError: The wheel, the master or an RDMA device is missing.
        """
        _export_deadlines(settings)
        module = load()
        _reach(master, settings.connect_timeout_s)
        if settings.protocol == "rdma" and not any(_RDMA_DEVICES.glob("*")):
            raise CardError(
                f"protocol: rdma, but {_RDMA_DEVICES} lists no device; load its driver, or take tcp"
            )
        self._config = module.ReplicateConfig()
        self._config.replica_num = settings.replicas
        self._store = module.MooncakeDistributedStore()
        code = self._store.setup(
            settings.local_host,
            settings.metadata_server,
            settings.segment_bytes,
            0,  # bytes of a buffer that we do not use
            settings.protocol,
            settings.rdma_devices,
            master.address,
        )
        if code:
            raise CardError(
                f"masters: {master.text}: the engine did not start (code {code}); check protocol, "
                "local_host, metadata_server and segment_bytes. With MC_LOG_LEVEL=INFO in the "
                "environment it says more"
            )

    def register(self, address: int, num_bytes: int) -> bool:
        """Announce memory; return whether the engine takes it."""
        return int(self._store.register_buffer(address, num_bytes)) == OK

    def unregister(self, address: int) -> None:
        """Forget memory that was announced."""
        self._store.unregister_buffer(address)

    def put(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> Codes:
        """Store each entry's pieces as one value, unless its name is taken: 0 then too."""
        return _codes(
            self._store.batch_put_from_multi_buffers(names, pointers, sizes, self._config)
        )

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> Codes:
        """Load each entry into its pieces; the bytes that came, if they are as many as asked."""
        return _codes(self._store.batch_get_into_multi_buffers(names, pointers, sizes))

    def exist(self, names: list[str]) -> Codes:
        """Return 1 or 0 for each."""
        return _codes(self._store.batch_is_exist(names))

    def remove(self, names: list[str]) -> Codes:
        """Remove each, even if somebody reads it."""
        return _codes(self._store.batch_remove(names, True))

    def size_of(self, name: str) -> int:
        """Return how many bytes are stored under a name, or a code."""
        return int(self._store.get_size(name))

    def close(self) -> None:
        """End the client; no call is under way, and none follows."""
        self._store.close()


def _codes(answers: list[int]) -> Codes:
    return np.array(answers, dtype=np.int64)


def _reach(master: Master, timeout_s: float) -> None:
    """Connect once: the engine itself tries for minutes, and does not say why in vain."""
    try:
        socket.create_connection((master.host, master.port), timeout_s).close()
    except OSError as error:
        raise CardError(
            f"masters: {master.text}: {error.strerror or error}; is mooncake_master running, and "
            "is that its --rpc_port?"
        ) from error


def _export_deadlines(settings: MooncakeSettings) -> None:
    """Tell the engine the deadlines, in the way it takes them: at every start of a client."""
    whole_s = math.ceil(settings.io_timeout_s)
    export(
        {
            "MC_RPC_TIMEOUT_MS": str(int(settings.io_timeout_s * 1000)),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(int(settings.connect_timeout_s * 1000)),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(whole_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(whole_s),
        },
        unless_set={
            "MC_LOG_LEVEL": "ERROR",
            "MC_STORE_CLIENT_SETUP_RETRIES": "3",
            # Entries wait behind a transfer that does not move, on the same connection.
            "MC_TCP_LANES_PER_PEER": "16",
        },
    )

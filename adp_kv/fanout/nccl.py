"""Exchanges through NCCL, on a communicator of our own.

NCCL is called by its C interface, in the library that torch has loaded: torch's own process
groups watch their collectives and end the process when one is late, and a late exchange is
no reason for that here. ncclCommAbort ends the kernels of a communicator from outside.

Of a pair the exchange is an all-gather. In larger groups it is a group of sends and receives:
NCCL would run their all-gather by NVLink multicast, which takes memory of its own and is not
there on every host, and which can be switched off (NCCL_NVLS_ENABLE) only for a whole process,
hence for vLLM's communicators too.

Threads: see exchange. Creating a communicator waits for the other ranks, so it is done on a
helper thread that is left behind when they don't come in time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable

from typing_extensions import override

from adp_kv.fanout.exchange import Exchange, ExchangeError

log = logging.getLogger("adp_kv")

ID_BYTES = 128
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800
_UNDEFINED = -(1 << 31)
_PAIR = 2


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.18; newer libraries read `size` bytes of it."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class NcclLibrary:
    """The C functions in use.

    Raises:
        ExchangeError: There is no libnccl.so.2, or it is older than 2.18.
    """

    def __init__(self) -> None:
        try:
            self._dll = ctypes.CDLL("libnccl.so.2")
            version = ctypes.c_int()
            self._dll.ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError) as error:
            raise ExchangeError(f"libnccl.so.2 can't be used: {error}") from error
        self.version = version.value
        if self.version < _CONFIG_VERSION:
            raise ExchangeError(f"NCCL {self.version} is older than 2.18")
        self._dll.ncclGetErrorString.restype = ctypes.c_char_p
        self._dll.ncclCommInitRankConfig.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            _UniqueId,
            ctypes.c_int,
            ctypes.POINTER(_Config),
        )
        pointer, size, stream = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        comm, kind, peer = ctypes.c_void_p, ctypes.c_int, ctypes.c_int
        self._dll.ncclAllGather.argtypes = (pointer, pointer, size, kind, comm, stream)
        self._dll.ncclSend.argtypes = (pointer, size, kind, peer, comm, stream)
        self._dll.ncclRecv.argtypes = (pointer, size, kind, peer, comm, stream)
        self._dll.ncclCommAbort.argtypes = (comm,)

    def call(self, name: str, *args: object) -> None:
        """Call a function.

        Raises:
            ExchangeError: It did not succeed.
        """
        status = getattr(self._dll, name)(*args)
        if status != 0:
            message = self._dll.ncclGetErrorString(status)
            raise ExchangeError(f"{name}: {message.decode()} ({status})")

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator find each other by."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


class NcclExchange(Exchange):
    """One rank of a communicator; open_nccl() makes it.

    Args:
        library: NCCL.
        comm: a communicator, which this object owns.
        rank, num_ranks: of it.
    """

    def __init__(
        self, library: NcclLibrary, comm: ctypes.c_void_p, rank: int, num_ranks: int
    ) -> None:
        super().__init__(rank, num_ranks)
        self._library = library
        self._comm = comm
        self._is_aborted = False

    @override
    def all_gather(self, address: int, region_bytes: int, stream: int) -> None:
        if self._is_aborted:
            raise ExchangeError("the communicator was aborted")
        mine = address + self.rank * region_bytes
        if self.num_ranks == _PAIR:
            self._library.call(
                "ncclAllGather", mine, address, region_bytes, _UINT8, self._comm, stream
            )
            return
        self._library.call("ncclGroupStart")
        try:
            for peer in range(self.num_ranks):
                if peer == self.rank:
                    continue
                theirs = address + peer * region_bytes
                self._library.call("ncclSend", mine, region_bytes, _UINT8, peer, self._comm, stream)
                self._library.call(
                    "ncclRecv", theirs, region_bytes, _UINT8, peer, self._comm, stream
                )
        finally:
            self._library.call("ncclGroupEnd")

    @override
    def abort(self) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True
        try:
            self._library.call("ncclCommAbort", self._comm)
        except ExchangeError as error:
            log.warning("fan-out: %s", error)


def open_nccl(
    library: NcclLibrary,
    unique_id: bytes,
    rank: int,
    num_ranks: int,
    *,
    bind_device: Callable[[], None],
    max_ctas: int,
    timeout_s: float,
) -> NcclExchange:
    """Create a communicator together with the other ranks.

    Args:
        library: NCCL.
        unique_id: the same on every rank.
        rank: in the new communicator.
        num_ranks: of it.
        bind_device: makes the rank's device the calling thread's.
        max_ctas: most thread blocks of an exchange; each holds a multiprocessor.
        timeout_s: how long to wait for the other ranks.

    Raises:
        ExchangeError: NCCL refused, or the others did not come in time.
    """
    comm = ctypes.c_void_p()
    config = _Config(
        size=ctypes.sizeof(_Config),
        magic=_MAGIC,
        version=_CONFIG_VERSION,
        blocking=1,  # else NCCL starts a thread for every exchange
        cga_cluster_size=_UNDEFINED,
        min_ctas=1,
        max_ctas=max_ctas,
        net_name=None,
        split_share=_UNDEFINED,
    )
    failures: list[Exception] = []

    def create() -> None:
        try:
            bind_device()
            made_of = _UniqueId.from_buffer_copy(unique_id)
            library.call(
                "ncclCommInitRankConfig",
                ctypes.byref(comm),
                num_ranks,
                made_of,
                rank,
                ctypes.byref(config),
            )
        except (ExchangeError, RuntimeError, ValueError) as error:
            failures.append(error)

    thread = threading.Thread(target=create, name="adp_kv-nccl-init", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ExchangeError(f"the other ranks did not join a communicator within {timeout_s:g} s")
    if failures:
        raise ExchangeError(str(failures[0])) from failures[0]
    return NcclExchange(library, comm, rank, num_ranks)

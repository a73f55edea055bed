"""Settings of the connector: what may stand in kv_connector_extra_config.

    vllm serve ... --kv-transfer-config '{"kv_connector": "AdpConnector", ...,
        "kv_connector_extra_config": {"gateway": "tcp://127.0.0.1:5557", "chunk_size": 256}}'

An unknown name or a wrong type is a ConfigError that names the setting, raised while
the engine starts and before anything was touched.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from adp_kv.errors import ConfigError
from adp_kv.units import GiB, MiB
from adp_kv.wire.curve import require_address, require_key
from adp_kv.wire.messages import DEFAULT_PORT

HELP = {
    "gateway": "ZeroMQ address of this engine's gateway: tcp://HOST:PORT or ipc:///PATH",
    "key_file": "secret that both sides have, for a gateway on another host's address; empty: none",
    "chunk_size": "tokens of an object and a hit, whole blocks (DCP: of all ranks); 0: about 256",
    "key_namespace": "deployments with different names never read each other's objects",
    "nvlink_fanout": "MLA with TP: each rank copies a share of a layer, NVLink brings the rest",
    "load_mode": "layerwise (step waits layer by layer), async (others run meanwhile), auto",
    "save": "store what was computed; false: only read",
    "connect_timeout_s": "how long the engine's start waits for the gateway and the other ranks",
    "gateway_required": "true: an engine whose gateway is not there at start does not start",
    "gateway_timeout_s": "a gateway silent for longer turns the external cache off",
    "reconnect": "true: take up a restarted gateway (no recurrent states); false: restart both",
    "lookup_timeout_s": "a lookup unanswered for longer counts as no hit",
    "load_timeout_s": "a restore that takes longer is a failed load",
    "save_timeout_s": "a save that takes longer is dropped",
    "max_pending_save_bytes": "saves beyond this much unsaved data of one rank are dropped",
    "autotune": "measure once a GPU and driver (< 1 s of a start) when to copy which way",
    "staging_bytes": "GPU memory for staging, taken beside gpu_memory_utilization",
    "fanout_staging_bytes": "with nvlink_fanout: GPU memory for its staging, likewise beside it",
}
LEAST = {"max_pending_save_bytes": 1, "staging_bytes": 1, "fanout_staging_bytes": 8 * MiB}


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting with its default; HELP says what each does."""

    gateway: str = f"tcp://127.0.0.1:{DEFAULT_PORT}"
    key_file: str = ""
    chunk_size: int = 0
    key_namespace: str = ""
    nvlink_fanout: bool = False
    load_mode: Literal["auto", "layerwise", "async"] = "auto"
    save: bool = True
    connect_timeout_s: float = 60.0
    gateway_required: bool = False
    gateway_timeout_s: float = 10.0
    reconnect: bool = False
    lookup_timeout_s: float = 0.5
    load_timeout_s: float = 15.0
    save_timeout_s: float = 60.0
    max_pending_save_bytes: int = 4 * GiB
    autotune: bool = True
    staging_bytes: int = 128 * MiB
    fanout_staging_bytes: int = 128 * MiB

    def __post_init__(self) -> None:
        require_address("gateway", self.gateway.replace("{dp_rank}", "0"))
        require_key("gateway", self.gateway, self.key_file)
        if self.chunk_size < 0:
            raise ConfigError(f"chunk_size = {self.chunk_size}: at least 0")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least {least}")
        for name in self.__struct_fields__:
            if name.endswith("_timeout_s") and not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: more than 0 seconds")


def connector_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings in kv_connector_extra_config.

    Raises:
        ConfigError: An unknown name, a wrong type or a value out of range.
    """
    unknown = sorted(set(extra_config) - set(HELP))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown setting {unknown[0]!r}; there are: "
            + ", ".join(HELP)
        )
    try:
        return msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error


def environment(name: str) -> str | None:
    """Return a variable of the environment, None if it is not set."""
    return os.environ.get(name)


def cache_folder() -> Path:
    """Return where results of measurements are kept: XDG_CACHE_HOME or ~/.cache, adp_kv in it."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "adp_kv"
    try:
        return Path.home() / ".cache" / "adp_kv"
    except RuntimeError:  # a container's user that has no home, nor an entry in passwd
        return Path(tempfile.gettempdir()) / f"adp_kv-{os.getuid()}"


def device_connections() -> str | None:
    """Return CUDA_DEVICE_MAX_CONNECTIONS as it stands in the environment, None if it is not set."""
    return environment("CUDA_DEVICE_MAX_CONNECTIONS")


def hash_seed() -> str | None:
    """Return PYTHONHASHSEED as it stands in the environment, None if it is not set."""
    return environment("PYTHONHASHSEED")

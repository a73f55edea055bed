"""Settings of the gateway: one table, one precedence, the only user of the environment.

    command line  >  environment ADP_GATEWAY_<NAME>  >  TOML file (--config)  >  default

Sizes are bytes, or text with a unit: 6GiB, 256 KiB, 10GB. An unknown name, a wrong
type or a value out of range is a ConfigError that names the setting and where it
was set; nothing has been touched by then.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from adp_kv import __version__
from adp_kv.errors import ConfigError
from adp_kv.units import GiB, MiB, format_bytes, parse_bytes
from adp_kv.wire.curve import require_address, require_key
from adp_kv.wire.messages import DEFAULT_PORT

FRAGMENT_SIZES = {"local": 261120, "remote": 131072}
_UNCUT = 1 << 31
_UNCUT_CARDS = frozenset({"slab", "memory", "mooncake"})
"""Whose values may be as long as their own settings say: a fragment fills a slot of the slab card,
which one of 261,120 bytes would not, and the rest of an object of 256 KiB would have one more."""
ENV_PREFIX = "ADP_GATEWAY_"

# What Kubernetes puts into every container beside a Service called adp-gateway.
_INJECTED = re.compile(rf"{ENV_PREFIX}(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)")
_HAS_UNIT = re.compile(r".*[a-zA-Z]\s*")

HELP = {
    "listen": "ZeroMQ address to serve: tcp://HOST:PORT or ipc:///PATH",
    "key_file": "secret that both sides have; needed to listen on other than loopback or ipc",
    "ring_name": "makes /dev/shm/adp_kv-<ring_name>.ring; default: from the address",
    "shared_memory_size": "bytes of ring slots, half for reads and half for writes",
    "io_size": "largest object the ring is cut for; 0: what the engine declares",
    "placement": "where the card is: local or remote (NVMe-oF); sets fragment_size",
    "fragment_size": "longest value of one key on the card; 0: 261120 local, 131072 remote, "
    "and what it takes with the slab (slot_bytes), memory and mooncake cards",
    "card": "kind of card: slab (files or block devices), nvme_kv (NVMe key-value namespaces), "
    "resp (Valkey or Redis), mooncake (Mooncake Store) or memory (RAM, not kept); docs/cards.md",
    "card_options": "an option of the card, repeatable; docs/cards.md lists them",
    "batch_bytes": "ranks get slots in batches of at most this size, to overlap card and copy",
    "read_ahead_bytes": "ring space for first layers of prompts that still wait; 0: none",
    "rank_deadline_s": "how long the first rank of a request waits for the last",
    "lease_s": "how long a rank may keep ring slots before the session is ended",
    "job_deadline_s": "how long the saves of one step may take before they are forgotten",
    "card_deadline_s": "how long the card may take for a batch, once those before it are done",
    "quarantine_s": "how long a database of the card that does not work is left out",
    "liveness_s": "a rank silent for longer counts as dead",
    "heartbeat_s": "how often ranks are asked to ping",
    "metrics": "HOST:PORT of Prometheus metrics and /healthz, such as 127.0.0.1:9464; empty: none",
    "log_level": "DEBUG, INFO, WARNING or ERROR",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of the gateway with its default; HELP says what each does."""

    listen: str = f"tcp://127.0.0.1:{DEFAULT_PORT}"
    key_file: str = ""
    ring_name: str = ""
    shared_memory_size: int = 6 * GiB
    io_size: int = 0
    placement: str = "local"
    fragment_size: int = 0
    card: str = "slab"
    card_options: dict[str, Any] = {}
    batch_bytes: int = 128 * MiB
    read_ahead_bytes: int = 512 * MiB
    rank_deadline_s: float = 20.0
    lease_s: float = 60.0
    job_deadline_s: float = 120.0
    card_deadline_s: float = 20.0
    quarantine_s: float = 30.0
    liveness_s: float = 60.0
    heartbeat_s: float = 1.0
    metrics: str = ""
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        require_address("listen", self.listen)
        require_key("listen", self.listen, self.key_file)
        if self.ring_name and not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.ring_name):
            raise ConfigError(f"ring_name = {self.ring_name!r}: letters, digits, '_', '.', '-'")
        if self.placement not in FRAGMENT_SIZES:
            raise ConfigError(f"placement = {self.placement!r}: expected local or remote")
        if self.log_level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise ConfigError(f"log_level = {self.log_level!r}: DEBUG, INFO, WARNING or ERROR")
        if self.metrics and not re.fullmatch(r"(\[[0-9a-f:]+\]|[^:/\s]+):\d{1,5}", self.metrics):
            raise ConfigError(f"metrics = {self.metrics!r}: expected HOST:PORT")
        for name, low in _LOWEST.items():
            if not getattr(self, name) >= low:  # nan is not
                raise ConfigError(f"{name} = {getattr(self, name)}: at least {low}")

    @property
    def effective_ring_name(self) -> str:
        """The ring's name; by default from the address, so that two gateways differ."""
        return self.ring_name or re.sub(r"[^A-Za-z0-9]+", "-", self.listen.split("://")[1]).strip(
            "-"
        )

    @property
    def effective_fragment_size(self) -> int:
        """fragment_size, or what the placement implies; some cards need no cutting."""
        usual = _UNCUT if self.card in _UNCUT_CARDS else FRAGMENT_SIZES[self.placement]
        return self.fragment_size or usual


_LOWEST: dict[str, float] = {
    "shared_memory_size": 8192,
    "io_size": 0,
    "fragment_size": 0,
    "batch_bytes": 1,
    "read_ahead_bytes": 0,
    "rank_deadline_s": 0.001,
    "lease_s": 0.001,
    "job_deadline_s": 0.001,
    "card_deadline_s": 0.001,
    "quarantine_s": 0.001,
    "liveness_s": 0.001,
    "heartbeat_s": 0.001,
}
_SIZES = {"shared_memory_size", "io_size", "fragment_size", "batch_bytes", "read_ahead_bytes"}


def parse_size(value: object, where: str) -> int:
    """Return bytes of an int or of text with a unit.

    Raises:
        ConfigError: Neither; where names the setting.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = parse_bytes(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{where} = {value!r}: expected bytes, such as 6GiB, 256KiB or 131072")
    return found


def load(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a command line, the environment and the file it names.

    Raises:
        ConfigError: A setting is unknown, of a wrong type or out of range.
        SystemExit: --help, or a flag that does not exist.
    """
    flags = vars(_parser().parse_args(arguments))
    config = flags.pop("config")
    options = flags.pop("card_option") or []
    sources: dict[str, Callable[[], dict[str, Any]]] = {
        "environment": lambda: _from_environment(os.environ if environ is None else environ),
        "command line": lambda: _from_flags(flags, options),
    }
    if config is not None:
        sources = {f"--config {config}": lambda: _from_file(Path(config))} | sources
    merged: dict[str, Any] = {}
    for where, read in sources.items():
        try:
            found = read()
            _build(found)  # alone, so that an error can say where
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        card_options = dict(merged.get("card_options", {})) | dict(found.get("card_options", {}))
        merged |= found
        if card_options:
            merged["card_options"] = card_options
    return _build(merged)


def export(values: Mapping[str, str], *, unless_set: Mapping[str, str]) -> None:
    """Set variables of this process's environment, for libraries that have no other settings.

    Args:
        values: always set.
        unless_set: set only where whoever started the gateway did not.
    """
    os.environ.update({name: text for name, text in unless_set.items() if name not in os.environ})
    os.environ.update(values)


def _build(given: Mapping[str, Any]) -> Settings:
    merged = dict(given)
    unknown = sorted(set(merged) - set(HELP))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown[0]!r}; there are: {', '.join(Settings.__struct_fields__)}"
        )
    for name in _SIZES & set(merged):
        merged[name] = parse_size(merged[name], name)
    try:
        return msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from error


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigError(str(error.strerror)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(error)) from error
    options = found.get("card_options")
    if isinstance(options, dict):
        found["card_options"] = {name: _sized(value) for name, value in options.items()}
    return found


def _sized(value: object) -> object:
    """Return bytes where text is a number with a unit, as the command line would take it."""
    found = parse_bytes(value) if isinstance(value, str) and _HAS_UNIT.fullmatch(value) else None
    return value if found is None else found


def _from_flags(flags: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    found = {name: value for name, value in flags.items() if value is not None}
    if options:
        found["card_options"] = dict(_option(text) for text in options)
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX) and not _INJECTED.fullmatch(variable):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name == "card_options":
                found[name] = dict(_option(text) for text in value.split(";"))
            else:
                found[name] = value
    return found


def _option(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"card option {text!r}: expected NAME=VALUE")
    return name.strip().replace("-", "_"), _value(value.strip())


def _value(text: str) -> object:
    """Return text as what it looks like: a list, a truth value, a number, a size, or text."""
    if "," in text:
        return [_value(part) for part in text.split(",")]
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    found = parse_bytes(text)
    if found is None:
        return text
    return found if _HAS_UNIT.fullmatch(text) else _number(text)


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adp-gateway",
        description="Storage gateway of adp_kv: serves the ranks of one vLLM engine from a card.",
        epilog="Every setting may also stand in the TOML file of --config, or in the environment "
        f"as {ENV_PREFIX}<NAME>. A flag wins over the environment, that over the file. "
        "`adp-gateway card --help` tells how to verify or format a card. "
        "Example: adp-gateway --card slab --card-option path=/mnt/nvme/adp "
        "--card-option capacity_bytes=200GiB",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    defaults = Settings()
    for name in Settings.__struct_fields__:
        if name == "card_options":
            parser.add_argument(
                "--card-option",
                action="append",
                metavar="NAME=VALUE",
                help=HELP[name],
            )
            continue
        default = getattr(defaults, name)
        told = format_bytes(default) if name in _SIZES and default else repr(default)
        shown = f"{HELP[name]} (default: {told})"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=shown)
    return parser

"""Cards by the name of their kind; a kind's module is imported when it is asked for.

Failure scope. ConfigError before anything was touched; the message names the setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from adp_kv.errors import ConfigError
from gateway.cards.base import Card

_MISSING: Final = re.compile(r"missing required field `(\w+)`")
_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def create_card(kind: str, settings: Mapping[str, object]) -> Card:
    """Return a card that is not open yet.

    Args:
        kind: one of `card_kinds()`.
        settings: the kind's settings by name; see its settings class.

    Raises:
        ConfigError: An unknown kind, an unknown or missing setting, a wrong type or range.
    """
    maker = _MAKERS.get(kind)
    if maker is None:
        raise ConfigError(f"card kind {kind!r}: unknown; one of {', '.join(card_kinds())}")
    try:
        return maker(settings)
    except ConfigError as error:
        raise ConfigError(f"{kind} card: {error}") from error


def card_kinds() -> tuple[str, ...]:
    """Return the kinds that create_card() knows."""
    return tuple(_MAKERS)


def _convert(settings: Mapping[str, object], settings_type: type[_Settings]) -> _Settings:
    try:
        return msgspec.convert(dict(settings), settings_type)
    except msgspec.ValidationError as error:
        missing = _MISSING.search(str(error))
        if missing:
            name = missing[1]
            raise ConfigError(
                f"{name} is missing: set it with --card-option {name}=VALUE, or in the file "
                "under [card_options]"
            ) from error
        raise ConfigError(str(error)) from error


# The imports below are lazy on purpose: a kind that is not used must not cost its libraries.


def _memory(settings: Mapping[str, object]) -> Card:
    from gateway.cards.memory import MemoryCard, MemorySettings  # noqa: PLC0415

    return MemoryCard(_convert(settings, MemorySettings))


def _slab(settings: Mapping[str, object]) -> Card:
    from gateway.cards.slab import SlabCard  # noqa: PLC0415
    from gateway.cards.slab_settings import SlabSettings  # noqa: PLC0415

    return SlabCard(_convert(_listed(settings, "devices"), SlabSettings))


def _nvme_kv(settings: Mapping[str, object]) -> Card:
    from gateway.cards.nvme.card import NvmeKvCard  # noqa: PLC0415
    from gateway.cards.nvme.settings import NvmeKvSettings  # noqa: PLC0415

    return NvmeKvCard(_convert(_listed(settings, "devices"), NvmeKvSettings))


def _resp(settings: Mapping[str, object]) -> Card:
    from gateway.cards.resp.card import RespCard  # noqa: PLC0415
    from gateway.cards.resp.settings import RespSettings  # noqa: PLC0415

    return RespCard(_convert(_listed(settings, "endpoints"), RespSettings))


def _mooncake(settings: Mapping[str, object]) -> Card:
    from gateway.cards.mooncake.card import MooncakeCard  # noqa: PLC0415
    from gateway.cards.mooncake.settings import MooncakeSettings  # noqa: PLC0415

    return MooncakeCard(_convert(_listed(settings, "masters"), MooncakeSettings))


def _listed(settings: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Let one name stand for a list of one, as a command line has it."""
    value = settings.get(name)
    return {**settings, name: [value]} if isinstance(value, str) else settings


_MAKERS: Final[Mapping[str, Callable[[Mapping[str, object]], Card]]] = MappingProxyType(
    {
        "memory": _memory,
        "slab": _slab,
        "nvme_kv": _nvme_kv,
        "resp": _resp,
        "mooncake": _mooncake,
    }
)

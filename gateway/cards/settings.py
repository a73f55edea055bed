"""What settings of several cards share.

Failure scope. ConfigError where settings are made; the message names the setting.
"""

from __future__ import annotations

from typing import Final

import msgspec

from adp_kv.errors import ConfigError
from adp_kv.units import MiB

_MAX_VALUE_BYTES: Final = 256 * MiB
_MAX_PREFIX: Final = 64
_MAX_TIME_S: Final = 3600


def check_range(name: str, value: float, lowest: float, highest: float | None) -> None:
    """Refuse a value that is not in lowest..highest; no upper limit if None.

    Raises:
        ConfigError: It names the setting and the range.
    """
    if value < lowest or (highest is not None and value > highest):
        upper = "more" if highest is None else str(highest)
        raise ConfigError(f"{name}: {value} is not in {lowest}..{upper}")


class LaneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What cards over servers have in common.

    Attributes:
        key_prefix: before each key, to share a server.
        max_value_bytes: the longest value.
        connect_timeout_s: to connect.
        io_timeout_s: for one answer.
        reconnect_s: how long a server that does not answer is left alone.
        close_timeout_s: seconds that close() lets batches finish.
    """

    key_prefix: str = "adp:"
    max_value_bytes: int = 2 * MiB
    connect_timeout_s: float = 3.0
    io_timeout_s: float = 3.0
    reconnect_s: float = 1.0
    close_timeout_s: float = 10.0

    def check_shared(self, least_timeout_s: float) -> None:
        """Refuse what makes no sense.

        Args:
            least_timeout_s: that a connection or answer may be given.

        Raises:
            ConfigError: It names the setting.
        """
        if len(self.key_prefix.encode()) > _MAX_PREFIX:
            raise ConfigError(f"key_prefix: longer than {_MAX_PREFIX} bytes")
        check_range("max_value_bytes", self.max_value_bytes, 1, _MAX_VALUE_BYTES)
        for name in ("connect_timeout_s", "io_timeout_s"):
            check_range(name, getattr(self, name), least_timeout_s, _MAX_TIME_S)
        for name in ("reconnect_s", "close_timeout_s"):
            check_range(name, getattr(self, name), 0, _MAX_TIME_S)

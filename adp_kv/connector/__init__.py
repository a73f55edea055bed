"""The vLLM KV connector, scheduler and worker side.

`kv_connector_module_path: "adp_kv.connector"` finds AdpConnector here; it is imported
when asked for, so that importing this package needs no vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AdpConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector when it is asked for."""
    if name == "AdpConnector":
        from adp_kv.connector.connector import AdpConnector  # noqa: PLC0415

        return AdpConnector
    raise AttributeError(name)

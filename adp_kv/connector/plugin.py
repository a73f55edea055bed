"""Entry point of vLLM's plugin group: makes the name AdpConnector known by itself."""

from __future__ import annotations


def register() -> None:
    """Register the connector in this process; safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    if "AdpConnector" not in KVConnectorFactory._registry:  # noqa: SLF001  no public query
        KVConnectorFactory.register_connector(
            "AdpConnector", "adp_kv.connector.connector", "AdpConnector"
        )

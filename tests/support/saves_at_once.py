"""The connector with nothing that waits for company: each chunk is saved with its own step.

As `kv_connector_module_path`, which vLLM imports in whatever process its scheduler runs.
"""

from adp_kv.connector import AdpConnector, saves

__all__ = ["AdpConnector"]

saves.ENOUGH_CHUNKS = 1

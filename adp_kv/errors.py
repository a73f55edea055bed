"""Every error this package raises on purpose.

A message names the setting or the peer at fault and what to do about it. Which
errors end what: ConfigError and RingError stop a start before anything was
touched; WireError concerns one message; GatewayError turns the external cache
off on this rank; RestoreLostError stops the engine; CardError concerns one batch;
TransferError one transfer.
"""


class AdpError(Exception):
    """Base of all errors of adp_kv and its gateway."""


class ConfigError(AdpError):
    """Raised when a setting is unknown, of a wrong type or out of range."""


class WireError(AdpError):
    """Raised when a message cannot be decoded or breaks the protocol."""


class RingError(AdpError):
    """Raised when the ring can't be created, mapped or is not the one expected."""


class GatewayError(AdpError):
    """Raised when the gateway refuses, stays silent past a deadline or went away."""


class RestoreLostError(AdpError):
    """Raised when a restore failed that vLLM can't undo: the engine must not go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"a restore failed ({reason}), and this vLLM can't recompute what it counts on where a "
            "model has several KV cache groups: the engine stops, so that nothing half-restored "
            "is served. Start it again; where the card is damaged, the same hit is not offered "
            "again. vLLM 0.30 and later with load_mode auto or async recompute instead"
        )


class CardError(AdpError):
    """Raised when a card can't be opened, or can't take a batch at all."""


class TransferError(AdpError):
    """Raised when bytes can't be moved between GPU memory and the ring."""

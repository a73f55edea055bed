"""Every error this package raises on purpose.

A message names the setting or the peer at fault and what to do about it. Which
errors end what: ConfigError and RingError stop a start before anything was
touched; WireError concerns one message; GatewayError turns the external cache
off on this rank; CardError concerns one batch; TransferError one transfer.
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


class CardError(AdpError):
    """Raised when a card can't be opened, or can't take a batch at all."""


class TransferError(AdpError):
    """Raised when bytes can't be moved between GPU memory and the ring."""

"""Types of the command line's arguments: each refuses what makes no sense and says what would.

Failure scope: ArgumentTypeError, which argparse tells with the flag's name, exit status 2.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

from adp_kv.errors import ConfigError
from adp_kv.units import parse_bytes
from adp_kv.wire.curve import require_address


def byte_count(text: str) -> int:
    """Return bytes, at least 1, of a number with or without a unit."""
    found = parse_bytes(text)
    if not found:
        raise ArgumentTypeError(f"{text!r}: expected bytes, such as 6GiB, 256KiB or 131072")
    return found


def count(least: int) -> Callable[[str], int]:
    """Return the type of a whole number that is no less than least."""

    def parse(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
        return found

    return parse


def seconds(text: str) -> float:
    """Return seconds, more than 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not (math.isfinite(found) and found > 0):
        raise ArgumentTypeError(f"{text!r}: expected seconds, more than 0")
    return found


def address(text: str) -> str:
    """Return a gateway's address."""
    try:
        require_address("address", text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    return text

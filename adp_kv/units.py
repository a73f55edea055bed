"""Byte units and the integer arithmetic that every layer needs."""

import re

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

PAGE_BYTES = 4096
"""Memory page; ring slots start and end on it, so that direct I/O may land in them."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}ib": 1 << (10 * (i + 1)) for i, p in enumerate("kmgt")}
_UNITS |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int | None:
    """Return the bytes of text such as "6GiB", "256 KiB" or "10GB"; None if it is no such text."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    return None if match is None or unit is None else int(float(match[1]) * unit)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return numerator / denominator rounded up; both non-negative, denominator > 0."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of alignment that is >= value."""
    return ceil_div(value, alignment) * alignment


def format_bytes(num_bytes: int) -> str:
    """Return a short human form in binary units, such as '6.0 GiB' or '512 B'."""
    for name, unit in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"

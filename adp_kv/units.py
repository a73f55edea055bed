"""Byte units and the integer arithmetic that every layer needs."""

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

PAGE_BYTES = 4096
"""Memory page; ring slots start and end on it, so that direct I/O may land in them."""


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

"""Which words the page copy kernel may use; imports no Triton."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def common_alignment(page_bytes: int, *addrs: NDArray[np.int64]) -> int:
    """Return 16, 8 or 1: the largest of them that divides the page and every address."""
    bits = page_bytes
    for table in addrs:
        bits |= int(np.bitwise_or.reduce(table, axis=None))
    return next(align for align in (16, 8, 1) if bits % align == 0)

"""Which words the page copy kernel may use; imports no Triton."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def common_alignment(page_bytes: int, *addrs: NDArray[np.int64]) -> int:
    """Return 16, 8 or 1: the largest of them that divides the page and every address."""
    bits = page_bytes
    for table in addrs:
        bits |= int(np.bitwise_or.reduce(table, axis=None))
    return 1 if bits % 8 else 8 if bits % 16 else 16

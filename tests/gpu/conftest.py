"""What the tests on CUDA share; without a device they fail."""

import pytest

from adp_kv.units import GiB
from tests.support.cuda_rig import GUARD


@pytest.fixture(scope="session")
def pool():
    """Six GiB of pages, so that offsets pass 2**31 and 2**32; every byte is GUARD."""
    import torch

    return torch.full((6 * GiB,), GUARD, dtype=torch.uint8, device="cuda")

"""Small cards that evict, memory and slab, and what fills them with chunks."""

from tests.support.cards import memory_card, slab_card
from tests.support.process import wait_until

SLOT_BYTES = 4096
NUM_SLOTS = 120
NUM_DATABASES = 3
SMALL = {
    "capacity_bytes": NUM_SLOTS * SLOT_BYTES,
    "num_databases": NUM_DATABASES,
    "hit_grace_s": 0.0,
}


def memory(_tmp_path, **changes):
    return memory_card(**({"max_value_bytes": SLOT_BYTES} | SMALL | changes))


def slab(tmp_path, name="card", **changes):
    return slab_card(tmp_path / name, **({"slot_bytes": SLOT_BYTES} | SMALL | changes))


def groups_of(driver):
    return driver.card._evictor._groups


def store_all(chunks, numbers):
    for number in numbers:
        assert store_soon(chunks, number)


def store_soon(chunks, number, version=0):
    """Store a chunk, again if the card was full until it has evicted."""
    wait_until(lambda: chunks.store(number, version), 10, f"chunk {number} is stored")
    return True

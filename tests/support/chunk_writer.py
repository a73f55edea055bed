"""Stores chunks on a small slab card, which evicts, until it is killed; says what it does.

    python -m tests.support.chunk_writer PATH ENGINE SEED FIRST_VERSION

Lines on stdout: "ready"; "P version number" before the values of a chunk are submitted,
"W version number" when all of them were answered OK, "C version number" when its marker was.
"""

import os
import sys

import numpy as np

from tests.support.cards import Arena, Driver, slab_card
from tests.support.chunks import Chunks

NUM_CHUNKS = 60
SLOT_BYTES = 4096
SETTINGS = {
    "capacity_bytes": 96 * SLOT_BYTES,
    "slot_bytes": SLOT_BYTES,
    "num_databases": 3,
    "hit_grace_s": 0.2,
    "lock_wait_s": 5.0,
}


def num_values(number):
    return 1 + number % 4


def open_chunks(path, **changes):
    driver = Driver(slab_card(path, **(SETTINGS | changes)), Arena(1 << 18))
    return Chunks(driver, num_values=num_values, length=700)


def say(text):
    os.write(1, text.encode() + b"\n")


def main():
    path, engine, seed, version = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rng = np.random.default_rng(seed)
    chunks = open_chunks(path, io_engine=engine, sync_interval_s=0.02)
    say("ready")
    while True:
        number = int(rng.integers(NUM_CHUNKS))
        if rng.random() < 0.3:
            chunks.lookup([number])
            continue
        version += 1
        say(f"P {version} {number}")
        chunks.driver.arena._next = 0
        if set(chunks.write(number, version)) != {0}:
            continue
        say(f"W {version} {number}")
        if chunks.commit(number) == 0:
            say(f"C {version} {number}")


if __name__ == "__main__":
    main()

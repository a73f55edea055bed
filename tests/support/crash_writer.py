"""Writes, overwrites and deletes on a slab card until it is killed; says what it does.

    python -m tests.support.crash_writer PATH ENGINE SEED FIRST_VERSION

Lines on stdout: "ready"; "I version op key ..." before a batch is submitted;
"A version status ..." once it was answered. Three batches run at once on disjoint keys.
"""

import os
import sys

import numpy as np

from gateway.cards.base import Op
from tests.support.cards import Arena, Driver, random_keys, slab_card, value_of

NUM_KEYS = 45  # more than there are slots: NO_SPACE is part of it
GROUPS = 3


def length_of(number):
    return 1 + number * 331


def say(text):
    os.write(1, text.encode() + b"\n")


def main():
    path, engine, seed, version = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rng = np.random.default_rng(seed)
    arenas = [Arena(1 << 19) for _ in range(GROUPS)]
    keys = random_keys(NUM_KEYS)
    driver = Driver(slab_card(path, io_engine=engine, sync_interval_s=0.02, lock_wait_s=5))
    waiting = [None] * GROUPS
    say("ready")
    while True:
        group = int(rng.integers(GROUPS))
        if waiting[group] is not None:
            token, submitted = waiting[group]
            say(f"A {token} " + " ".join(map(str, driver.wait(submitted).tolist())))
        numbers = rng.permutation(np.arange(group, NUM_KEYS, GROUPS))[: rng.integers(1, 9)]
        lengths = [length_of(int(n)) for n in numbers]
        version += 1
        op = Op.DELETE if rng.random() < 0.3 else Op.WRITE
        arena = driver.arena = arenas[group]
        arena._next = 0
        offsets = [arena.place(length) for length in lengths]
        for number, offset, length in zip(numbers, offsets, lengths, strict=True):
            arena.at(offset, length)[:] = value_of(keys[number], length, version)
        say(f"I {version} {op.name} " + " ".join(f"{n}" for n in numbers))
        if op is Op.WRITE:
            submitted = driver.start(op, keys[numbers], offsets, lengths)
        else:
            submitted = driver.start(op, keys[numbers])
        waiting[group] = (version, submitted)


if __name__ == "__main__":
    main()

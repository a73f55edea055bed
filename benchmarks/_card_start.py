"""How long a slab card takes to open whose journals hold many values of whole chunks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks._card_peers import cpu_seconds
from gateway.cards.group_facts import COMMIT
from gateway.cards.journal_records import (
    JournalIdentity,
    commit_records,
    header_record,
    put_records,
    seal,
)
from gateway.cards.slab import SlabCard
from gateway.cards.slab_settings import SlabSettings
from gateway.cards.slab_store import CardFacts

NUM_DATABASES = 4
VALUES_A_CHUNK = 244  # 61 layers in 4 fragments
SLOT_BYTES = 4096


def time_to_open(path: Path, num_values: int) -> tuple[float, float]:
    """Return the seconds and CPU seconds open() takes; slabs are sparse, no value is read.

    Args:
        path: a folder that does not exist yet.
        num_values: in all databases.
    """
    card = SlabCard(
        SlabSettings(
            path=str(path),
            capacity_bytes=num_values * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            num_databases=NUM_DATABASES,
            evict_above=1.0,
            scrub_bytes_per_s=0,
        )
    )
    allocate = os.posix_fallocate
    os.posix_fallocate = lambda fd, _offset, size: os.ftruncate(fd, size)
    try:
        card.open(lambda *_: None)
        card.close()
    finally:
        os.posix_fallocate = allocate
    _write_journals(path, num_values // NUM_DATABASES)
    began, cpu = time.perf_counter(), cpu_seconds()
    card.open(lambda *_: None)
    took = time.perf_counter() - began, cpu_seconds() - cpu
    found = card.stats()
    card.close()
    assert found["values"] - found["groups"] == num_values // NUM_DATABASES * NUM_DATABASES
    return took


def _write_journals(path: Path, num_slots: int) -> None:
    card_id = msgspec.json.decode((path / "card.json").read_bytes(), type=CardFacts).card_id
    rng = np.random.default_rng(0)
    here = VALUES_A_CHUNK // NUM_DATABASES
    names = rng.integers(1, 2**63, -(-num_slots // here), dtype=np.uint64)
    for number in range(NUM_DATABASES):
        identity = JournalIdentity(card_id, number, num_slots, SLOT_BYTES)
        values = put_records(
            rng.integers(0, 2**63, (num_slots, 2), dtype=np.uint64),
            np.arange(num_slots),
            np.full(num_slots, SLOT_BYTES, np.uint32),
            rng.integers(0, 2**63, num_slots, dtype=np.uint64),
            np.repeat(names, here)[:num_slots],
        )
        mine = names[number::NUM_DATABASES]
        commits = np.zeros(len(mine), dtype=COMMIT)
        commits["group"] = mine
        commits["key"] = rng.integers(0, 2**63, (len(mine), 2), dtype=np.uint64)
        commits["stamp"] = np.arange(len(mine)) * NUM_DATABASES + number + 1
        commits["database"] = number
        records = np.concatenate([values, commit_records(commits)])
        seal(records, identity, 2)
        with (path / f"slab-{number:04d}.journal").open("wb") as file:
            file.write(header_record(identity).tobytes() + records.tobytes())
            file.flush()
            os.fsync(file.fileno())  # or writing them back is measured too

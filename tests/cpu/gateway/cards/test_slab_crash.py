"""kill -9 at random points: what was acknowledged is there, exactly."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gateway.cards.base import Status
from gateway.cards.uring import probe
from tests.support.cards import Arena, Driver, random_keys, slab_card, value_of
from tests.support.crash_writer import NUM_KEYS, length_of

ROOT = Path(__file__).parents[4]
ROUNDS = 18
GONE = None


def run_until_killed(path, engine, seed, version):
    """Return the lines that a writer said before it was killed, each third time at its start."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", "tests.support.crash_writer"]
    heard = []
    with subprocess.Popen(
        [*command, str(path), engine, str(seed), str(version)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        text=True,
    ) as writer:
        if seed % 3:
            while sum(line.startswith("A") for line in heard) < 2:  # however slow the machine is
                heard.append(writer.stdout.readline())
                assert heard[-1], "the writer died"
            time.sleep(rng.uniform(0, 0.08))
        else:
            time.sleep(rng.uniform(0.1, 0.4))
        writer.send_signal(signal.SIGKILL)
        said = "".join(heard) + writer.stdout.read()
    return [line.split() for line in said.split("\n")[:-1] if line != "ready"]


def allowed_after(lines, before):
    """Return the states each key may be in: versions, or GONE."""
    allowed = {number: {state} for number, state in before.items()}
    batches = {}
    for kind, version, *rest in lines:
        if kind == "I":
            after = int(version) if rest[0] == "WRITE" else GONE
            batches[version] = after, [int(n) for n in rest[1:]]
            for number in batches[version][1]:
                allowed[number] = allowed[number] | {after}
        else:
            after, numbers = batches[version]
            for number, status in zip(numbers, map(int, rest), strict=True):
                if status in (Status.OK, Status.ABSENT):
                    allowed[number] = {after}
                else:
                    assert status == Status.NO_SPACE
                    allowed[number] -= {after}
    return allowed


def states_on(path, allowed):
    """Read every key; assert that it is in an allowed state and return which."""
    driver = Driver(slab_card(path, lock_wait_s=5), Arena(2 << 20))
    keys = random_keys(NUM_KEYS)
    lengths = [length_of(n) for n in range(NUM_KEYS)]
    status, values = driver.read(keys, lengths)
    driver.close()
    states = {}
    for number in range(NUM_KEYS):
        if status[number] == Status.ABSENT:
            states[number] = GONE
        else:
            assert status[number] == Status.OK
            matching = [
                version
                for version in allowed[number] - {GONE}
                if np.array_equal(values[number], value_of(keys[number], lengths[number], version))
            ]
            assert matching, f"key {number}: bytes of no allowed version"
            states[number] = matching[0]
        assert states[number] in allowed[number]
    return states


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("io_uring", marks=pytest.mark.skipif(probe() is not None, reason="no uring")),
        "threads",
    ],
)
def test_killed_card_keeps_what_it_acknowledged(tmp_path, engine):
    states = dict.fromkeys(range(NUM_KEYS), GONE)
    version = answered = 0
    for seed in range(ROUNDS):
        lines = run_until_killed(tmp_path / "card", engine, seed, version)
        answered += sum(line[0] == "A" for line in lines)
        version += len(lines) + 1
        states = states_on(tmp_path / "card", allowed_after(lines, states))
    assert answered > ROUNDS

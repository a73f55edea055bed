"""The gateway is killed, or stands still, in each phase of a lookup, a get and a put.

Every client turns off, every job ends, no page holds wrong bytes, nothing is left in /dev/shm;
a gateway that goes on afterwards serves the next engine.
"""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from adp_kv.sdk import rank_client
from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.faulty_gateway import FAULT_FILE
from tests.support.gateways import Gateway
from tests.support.process import wait_until
from tests.support.serving import random_chunks

CHUNKS, BLOCKS = random_chunks(4), blocks_of(0, 2, 4, 6)
NEW = random_chunks(4, 5)
POISON = 0xA5
PHASES = [
    "idle",
    "lookup",
    "get waits for a rank",
    "get on the card",
    "get copies",
    "put waits for a rank",
    "put copies",
    "put on the card",
]
SLOW = {"lookup": "exist 4", "get on the card": "read 4", "put on the card": "write 4"}


def reach(phase, team, slow, gateway):
    """Bring a team into a phase; return (jobs under way, lookups under way)."""
    slow.write_text(SLOW.get(phase, ""))
    if phase == "idle":
        return [], []
    kind = {"lookup": "lookups", "get": "gets", "put": "puts"}[phase.split()[0]]
    before = gateway.counters().get(kind, 0)
    copies = [len(mover.copies) for mover in team.movers]
    jobs, lookups = [], []
    if phase == "lookup":
        lookups = [team.lookup.ask(CHUNKS, 2.0)]
    else:
        jobs = submit(phase, team)
    wait_until(lambda: gateway.counters().get(kind, 0) > before, 5, "the gateway has it")
    if phase == "put on the card":
        finish(jobs)  # the ring is filled and handed back: the card writes
    if phase.endswith("copies"):
        wait_until(
            lambda: all(len(m.copies) > n for m, n in zip(team.movers, copies, strict=True)),
            10,
            "copies have started",
        )
    return jobs, lookups


def submit(phase, team):
    """Start the phase's get or put on both ranks, or on one; return the jobs."""
    is_put = phase.startswith("put")
    jobs = team.jobs(2, NEW if is_put else CHUNKS, BLOCKS)
    if phase.endswith("for a rank"):
        jobs = jobs[:1]
    if phase.endswith("copies"):
        for mover in team.movers:
            mover.gate.clear()
    for rank, job in zip(team.ranks, jobs, strict=False):
        if is_put:
            rank.submit_save(job, rank_client.SAVE_REST, job.caches, rank.mover.mark())
        else:
            rank.submit_restore(job, rank_client.RESTORE, None)
    return jobs


def assert_no_wrong_page(team, want):
    """Every page that was to be restored holds the saved bytes, or none of them."""
    for pool, pages in zip(team.pools, want, strict=True):
        for index, right in pages.items():
            for page, expected in zip(pool.pages(index, BLOCKS), right, strict=True):
                assert np.array_equal(page, expected) or (page == POISON).all()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_gateway_lost_in_any_phase(tmp_path, fault, phase):
    slow = tmp_path / "slow"
    options = {"capacity_bytes": "16MiB", "max_value_bytes": "64KiB"}
    with Gateway.serve(
        card_options=options,
        program="tests.support.faulty_gateway",
        env={FAULT_FILE: str(slow)},
        shared_memory_size=64 * 16384,
    ) as gateway:
        team = Team(gateway.address, pools(2), timeout_s=0.8)
        with team.start():
            team.save(1, CHUNKS, BLOCKS)
            want = [{c.index: p.pages(c.index, BLOCKS) for c in p.caches} for p in team.pools]
            if phase.startswith("get"):
                for pool in team.pools:
                    pool.clear()
            gateway.assert_no_rings(5)  # every rank is known to have mapped it
            jobs, lookups = reach(phase, team, slow, gateway)
            os.kill(gateway.child.pid, fault)
            wait_until(lambda: all(c.off for c in team.clients), 20, "all are off")
            for mover in team.movers:
                mover.gate.set()
            finish(jobs)
            wait_until(lambda: all(t.expired for t in lookups), 5, "lookups expire")
            if phase.startswith("get"):
                assert_no_wrong_page(team, want)
                assert all(job.failed_chunks.all() for job in jobs) or phase == "get copies"
        if fault == signal.SIGSTOP:
            slow.write_text("")
            os.kill(gateway.child.pid, signal.SIGCONT)
            serve_the_next(gateway, whole=phase == "put on the card")
            gateway.stop()
            gone = re.findall(r"peer (\w+) is not reachable", gateway.log())
            assert len(gone) == len(set(gone)), "one line a peer, not one for each of its pings"
    gateway.assert_no_rings(1)


def serve_the_next(gateway, *, whole):
    """A gateway that goes on: chunks whose every byte it had are stored, no others."""
    with Team(gateway.address, pools(2), engine="next").start() as team:
        assert team.stored(CHUNKS) == [True] * 4
        assert team.stored(NEW) == [whole] * 4
        want = [{c.index: p.pages(c.index, BLOCKS) for c in p.caches} for p in team.pools]
        for number, chunks in enumerate([CHUNKS, NEW] if whole else [CHUNKS]):
            for pool in team.pools:
                pool.clear()
            assert not any(j.failed_chunks.any() for j in team.restore(number, chunks, BLOCKS))
            for pool, pages in zip(team.pools, want, strict=True):
                assert all(
                    np.array_equal(pool.pages(i, BLOCKS), right) for i, right in pages.items()
                )


def test_ring_file_removed_while_ranks_join(monkeypatch):
    """Somebody cleans /dev/shm at the wrong moment: the start fails clearly, the next works."""
    real, removed = rank_client.attach, []

    def attach(path, generation):
        if not removed:
            removed.append(path)
            Path(path).unlink()
        return real(path, generation)

    options = {"capacity_bytes": "16MiB", "max_value_bytes": "64KiB"}
    with Gateway.serve(card_options=options, shared_memory_size=64 * 16384) as gateway:
        monkeypatch.setattr(rank_client, "attach", attach)
        # A scheduler side that comes when the ranks have gone waits for them until its deadline.
        with Team(gateway.address, pools(2), connect_timeout_s=10.0).start(settle=False) as team:
            wait_until(lambda: all(c.off for c in team.clients), 30, "all are off")
            reasons = [rank.off_reason for rank in team.ranks]
            assert any("can't open the ring" in reason for reason in reasons)
        with Team(gateway.address, pools(2), engine="next").start() as successor:
            successor.save(1, CHUNKS, BLOCKS)
        gateway.stop()

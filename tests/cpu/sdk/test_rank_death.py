"""A rank that is killed, or stands still, takes its engine's session with it and nothing else.

The other rank and the scheduler side go off with the reason, its jobs end, the gateway frees
what was held, and the next engine is served.
"""

import os
import signal

import numpy as np
import pytest

from tests.support.clients import Team, finish, pools
from tests.support.process import PYTHON, Child, wait_until
from tests.support.rank_child import BLOCKS, CHUNKS, NEW_BLOCKS, NEW_CHUNKS
from tests.support.serving import Serving

SETTINGS = {"shared_memory_size": 64 * 16384, "liveness_s": 1.5, "heartbeat_s": 0.2}


class Other:
    """Rank 1, in a child."""

    def __init__(self, address):
        self.child = Child(
            [PYTHON, "-m", "tests.support.rank_child", address], {}, "rank", pipes=True
        )

    def tell(self, command, answer):
        if command:
            self.child.popen.stdin.write(f"{command}\n".encode())
            self.child.popen.stdin.flush()
        assert self.child.popen.stdout.readline().decode().startswith(answer)


def reach(phase, team, other):
    """Bring both ranks into a phase; return rank 0's jobs."""
    if phase == "idle":
        return []
    chunks, blocks = (NEW_CHUNKS, NEW_BLOCKS) if phase == "save" else (CHUNKS, BLOCKS)
    jobs = team.jobs(2, chunks, blocks)[:1]
    mover = team.ranks[0].mover
    if phase == "save":
        team.ranks[0].submit_save(jobs[0], 3, jobs[0].caches, mover.mark())
    else:
        team.ranks[0].submit_restore(jobs[0], 0, mover.mark())
    other.tell(f"hold {phase} 2", "holding")
    return jobs


@pytest.mark.parametrize("phase", ["idle", "save", "restore"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_dead_rank_ends_its_session_alone(fault, phase):
    with Serving(**SETTINGS) as serving:
        team = Team(serving.address, pools(2))
        other = Other(serving.address)
        team.clients = [team.ranks[0], team.lookup]
        try:
            with team.start(settle=False):
                other.tell("", "joined")
                assert all(client.wait_settled() for client in team.clients)
                first = team.jobs(1, CHUNKS, BLOCKS)[0]
                team.ranks[0].submit_save(first, 3, first.caches, team.ranks[0].mover.mark())
                other.tell("save 1", "done")
                wait_until(lambda: all(team.stored(CHUNKS)), 10, "the first save is committed")
                jobs = reach(phase, team, other)
                os.kill(other.child.pid, fault)
                wait_until(lambda: all(c.off for c in team.clients), 20, "the others are off")
                assert "rank 1" in team.ranks[0].off_reason
                finish(jobs)
                if fault == signal.SIGSTOP:
                    os.kill(other.child.pid, signal.SIGCONT)
                    other.tell("", "off")  # it learns that it is no longer wanted
        finally:
            other.child.cleanup()
        serve_the_next(serving)


def serve_the_next(serving):
    """What was committed is found, what was half saved is not, and everything works."""
    successor = Team(serving.address, pools(2), engine="next", connect_timeout_s=20)
    with successor.start() as team:
        assert team.stored(CHUNKS) == [True] * 4
        assert team.stored(NEW_CHUNKS) == [False] * 4
        before = [pool.pages(0, BLOCKS) for pool in team.pools]
        for pool in team.pools:
            pool.clear()
        assert not any(job.failed_chunks.any() for job in team.restore(1, CHUNKS, BLOCKS))
        after = [pool.pages(0, BLOCKS) for pool in team.pools]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        serving.assert_idle()

"""Rank 1 of a team of two in a process of its own, so that it can be killed or stopped.

    python -m tests.support.rank_child ADDRESS

Commands on stdin: "save JOB", "restore JOB" (answered "done"), "hold save JOB", "hold restore
JOB" (answered "holding" once its copies are under way; they never end). When the rank goes off
it says "off" and the reason.
"""

import sys

from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.process import wait_until
from tests.support.serving import random_chunks

CHUNKS, BLOCKS = random_chunks(4), blocks_of(0, 2, 4, 6)
NEW_CHUNKS, NEW_BLOCKS = random_chunks(4, 5), blocks_of(8, 10, 12, 14)


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main():
    team = Team(sys.argv[1], pools(2), timeout_s=5.0)
    rank, mover = team.ranks[1], team.movers[1]
    off = rank.on_off
    rank.on_off = lambda reason: (off(reason), say(f"off {reason}"))
    rank.start()
    assert rank.wait_settled(), rank.off_reason
    say("joined")
    for line in sys.stdin:
        *hold, what, number = line.split()
        chunks, blocks = (NEW_CHUNKS, NEW_BLOCKS) if hold and what == "save" else (CHUNKS, BLOCKS)
        job = team.jobs(int(number), chunks, blocks)[1]
        copies = len(mover.copies)
        if hold:
            mover.gate.clear()
        if what == "save":
            rank.submit_save(job, 3, job.caches, mover.mark())
        else:
            rank.submit_restore(job, 0, mover.mark())
        if hold:
            wait_until(lambda n=copies: len(mover.copies) > n, 10, "copies are under way")
            say("holding")
        else:
            finish([job])
            say("done")


if __name__ == "__main__":
    main()

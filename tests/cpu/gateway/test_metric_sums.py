"""The sums of docs/metrics.md hold after whatever the gateway and its clients went through."""

import contextlib
import random

import pytest

from adp_kv.wire.keys import pack_keys
from adp_kv.wire.messages import Get
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.metrics import render
from tests.support.cards import memory_card
from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.metric_sums import Values, broken, sums
from tests.support.process import ChildError, wait_until
from tests.support.serving import Serving, random_chunks, sharded, store

CHUNKS = random_chunks(12)
FAULTS = [
    Fault(Status.CORRUPT, ops={Op.READ}, probability=0.1),
    Fault(Status.IO_ERROR, ops={Op.READ, Op.WRITE}, probability=0.05),
    Fault(Status.NO_SPACE, ops={Op.WRITE}, probability=0.1),
]


def now(serving):
    """Return the values as the main thread sees them at one moment."""
    return Values(render(serving.on_main(serving.server.snapshot)))


def step(team, number, rng):
    """Do one random thing; return its jobs."""
    chunks = CHUNKS[rng.sample(range(len(CHUNKS)), rng.randint(1, 5))]
    blocks = blocks_of(*(2 * i for i in range(len(chunks))))
    jobs = team.jobs(number, chunks, blocks, timeout_s=2.0)
    what = rng.choice(
        ["save", "save", "restore", "restore", "lookup", "disagree", "alone", "abort"]
    )
    if what == "lookup":
        team.stored(chunks)
        return []
    if what == "disagree":
        other = team.jobs(number, CHUNKS[:1], blocks_of(0))
        team.submit_restores([jobs[0], other[1]])
        return [jobs[0], other[1]]
    if what == "alone":
        team.ranks[0].submit_restore(jobs[0], 0, None)
        return jobs[:1]
    if what == "abort":
        (team.submit_saves if rng.random() < 0.5 else team.submit_restores)(jobs)
        jobs[rng.randrange(2)].abandon("the test wants it")
        return jobs
    (team.submit_saves if what == "save" else team.submit_restores)(jobs)
    return jobs


@pytest.mark.parametrize("seed", range(3))
def test_sums_hold_after_random_operation(seed):
    rng = random.Random(seed)
    card = FaultyCard(memory_card(), [], seed)
    settings = {"shared_memory_size": 16 * 16384, "batch_bytes": 16384, "rank_deadline_s": 0.15}
    with Serving(card, **settings) as serving, Team(serving.address, pools(2)).start() as team:
        under_way = []
        for number in range(1, 60):
            card.faults = FAULTS if number % 3 == 0 else []
            under_way += step(team, number, rng)
            if rng.random() < 0.3:
                finish(under_way)
                under_way = []
        finish(under_way)
        serving.assert_idle(10)
        values = now(serving)
        assert not broken(values, ("always", "idle"))
        assert values["objects_read"]
        assert values["objects_missed"]
        assert values["objects_written"]
        assert values["rank_disagreements"]
        assert values["gets_failed"]
        moved = {
            n: sum(r.counts.get(n, 0) for r in team.ranks)
            for n in ("bytes_saved", "bytes_restored")
        }
        assert values["bytes_written"] <= moved["bytes_saved"]
        assert moved["bytes_restored"] <= values["bytes_read"]
        _end_in_the_middle(serving, team)


def _end_in_the_middle(serving, team):
    """End the session while ranks hold slots, of gets and puts: that must add up too."""
    for mover in team.movers:
        mover.gate.clear()
    restores = team.jobs(901, CHUNKS[:5], blocks_of(10, 12, 14, 16, 18))
    team.submit_restores(restores)
    puts = serving.server._engine._puts
    for number in range(902, 912):  # where a rank has no core for rank_deadline_s, the put fails
        # Chunks of their own: those are not stored.
        saves = team.jobs(number, random_chunks(5, number), blocks_of(0, 2, 4, 6, 8))
        team.submit_saves(saves)
        with contextlib.suppress(ChildError):
            wait_until(lambda: puts.num_requests > 0, 2, "a put is under way")
            break
    assert puts.num_requests > 0
    team.ranks[1].close()
    wait_until(lambda: now(serving)["engine_active"] == 0, 10, "the session has ended")
    wait_until(lambda: now(serving)["card_batches_open"] == 0, 10, "the card is done")
    idle = [line for line in sums("idle") if "ring" not in line and "jobs" not in line]
    values = now(serving)
    assert not broken(values)
    wrong = [one for one in broken(values, ("idle",)) if one.split(":")[0] in idle]
    assert not wrong
    for mover in team.movers:
        mover.gate.set()
    finish([*saves, *restores])


def test_sums_hold_where_a_session_ends_before_every_rank_has_asked():
    """What was read for a get that waits for a rank is given to nobody: the get ends too."""
    with Serving() as serving:
        ranks = serving.join(sharded(2, 2))
        store(ranks, CHUNKS[:3])
        ranks[0].send(Get(1, [0], pack_keys(CHUNKS[:3])))
        wait_until(lambda: now(serving)["objects_read"] == 3, 5, "it is read")
        ranks[1].close("the test wants it")
        wait_until(lambda: now(serving)["engine_active"] == 0, 5, "the session has ended")
        assert now(serving)["gets"] == 1
        assert not broken(now(serving), ("always", "idle"))


def test_a_sum_that_does_not_hold_is_seen():
    text = "adp_gateway_chunks_found_total 3\nadp_gateway_chunks_looked_up_total 2\n"
    assert broken(Values(text)) == ["chunks_found <= chunks_looked_up: 3 and 2"]

"""What goes wrong concerns one job, or turns the cache off; nothing hangs."""

import logging
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from adp_kv.errors import RingError, TransferError
from adp_kv.sdk import loop, rank_client
from adp_kv.sdk.lookup import LookupClient
from adp_kv.sdk.loop import OFF_MESSAGE
from gateway.cards.base import Op
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import memory_card
from tests.support.clients import Team, blocks_of, finish, pools
from tests.support.gateways import Gateway
from tests.support.process import free_port, wait_until
from tests.support.serving import Serving, random_chunks

SLOTS = {"shared_memory_size": 64 * 16384}
CHUNKS, BLOCKS = random_chunks(4), blocks_of(0, 2, 4, 6)


class Lines(logging.Handler):
    """Keeps what is logged, wherever an engine sends its log."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture
def lines():
    handler, logger = Lines(), logging.getLogger("adp_kv")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def off_lines(lines):
    """Return how many ranks, and how many scheduler sides, said that they went off."""
    starts = (OFF_MESSAGE, LookupClient.off_message)
    return tuple(sum(text.startswith(start) for text in lines.texts) for start in starts)


def outcome(job):
    """Return whether nothing, some or all of a job's chunks have failed."""
    return {0: "none", job.num_chunks: "all"}.get(int(job.failed_chunks.sum()), "some")


def test_deadline_abandons_a_restore_nobody_else_wants():
    with (
        Serving(rank_deadline_s=0.6, **SLOTS) as serving,
        Team(serving.address, pools(2)).start() as team,
    ):
        team.save(1, CHUNKS, BLOCKS)
        job = team.jobs(2, CHUNKS, BLOCKS, timeout_s=0.2)[0]
        copies = len(team.movers[0].copies)
        team.ranks[0].submit_restore(job, rank_client.RESTORE, None)
        began = time.monotonic()
        assert job.wait_cache(0) == []
        assert 0.15 < time.monotonic() - began < 1
        assert job.finished
        assert job.failed_blocks == set(range(8))
        late = team.jobs(2, CHUNKS, BLOCKS)[1]
        team.ranks[1].submit_restore(late, rank_client.RESTORE, None)
        serving.assert_idle()
        assert len(team.movers[0].copies) == copies
        assert not team.ranks[0].off


def test_abandoned_restore_starts_no_other_copy_and_frees_slots():
    with (
        Serving(shared_memory_size=8 * 4096, batch_bytes=1) as serving,
        Team(serving.address, pools(1)).start() as team,
    ):
        team.save(1, CHUNKS, BLOCKS)
        (mover,) = team.movers
        mover.gate.clear()
        copies = len(mover.copies)
        jobs = team.jobs(2, CHUNKS, BLOCKS)
        team.submit_restores(jobs)
        wait_until(lambda: len(mover.copies) > copies, 5, "the first copies")
        jobs[0].abandon("the test wants it")
        started = len(mover.copies)
        assert not jobs[0].finished  # copies are under way into its pages
        time.sleep(0.1)
        mover.gate.set()
        finish(jobs)
        serving.assert_idle()
        assert len(mover.copies) == started
        assert outcome(jobs[0]) == "all"
        assert not any(j.failed_chunks.any() for j in team.restore(3, CHUNKS, BLOCKS))


def test_abandoned_save_is_not_stored():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        team.movers[1].gate.clear()
        jobs = team.jobs(1, CHUNKS, BLOCKS)
        team.submit_saves(jobs)
        wait_until(lambda: bool(team.movers[1].copies), 5, "the copy has started")
        jobs[1].abandon("the test wants it")
        team.movers[1].gate.set()
        serving.assert_idle()
        assert team.stored(CHUNKS) == [False] * 4
        team.save(2, CHUNKS, BLOCKS)


@pytest.mark.parametrize("direction", ["save", "restore"])
@pytest.mark.parametrize("how", ["fail_starts", "fail_copies"])
def test_broken_copy_fails_its_job_alone(direction, how):
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        if direction == "restore":
            team.save(1, CHUNKS, BLOCKS)
        jobs = team.jobs(2, CHUNKS, BLOCKS)
        setattr(team.movers[1], how, 1)
        (team.submit_saves if direction == "save" else team.submit_restores)(jobs)
        finish(jobs)
        assert outcome(jobs[1]) == "all"
        assert outcome(jobs[0]) == "none"
        serving.assert_idle()
        assert team.stored(CHUNKS) == [direction == "restore"] * 4
        assert not any(client.off for client in team.clients)
        team.save(3, CHUNKS, BLOCKS)
        assert not any(j.failed_chunks.any() for j in team.restore(4, CHUNKS, BLOCKS))


def test_slots_stay_until_every_copy_of_a_batch_has_ended():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        (mover,) = team.movers
        mover.gate.clear()
        mover.fail_copies = 1  # of two: the batch has slices of two sizes
        jobs = team.jobs(1, CHUNKS, BLOCKS)
        team.submit_saves(jobs)
        wait_until(lambda: len(mover.copies) == 2, 5, "both copies have started")
        time.sleep(0.1)
        assert not serving.idle()  # the second copy still writes into its slots
        mover.gate.set()
        finish(jobs)
        serving.assert_idle()
        assert outcome(jobs[0]) == "all"
        assert team.stored(CHUNKS) == [False] * 4


def test_job_with_a_broken_copy_can_be_abandoned():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        team.movers[0].fail_copies = 10
        jobs = team.jobs(1, CHUNKS, BLOCKS)
        team.submit_saves(jobs)
        wait_until(lambda: bool(team.movers[0].copies), 5, "the copies have started")
        jobs[0].abandon("the test wants it")
        finish(jobs)
        assert outcome(jobs[0]) == "all"
        serving.assert_idle()


def test_block_outside_the_pool_fails_the_job():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        jobs = team.jobs(1, CHUNKS, BLOCKS + 60)
        team.submit_saves(jobs)
        finish(jobs)
        assert "outside the pool" in jobs[0].reason
        serving.assert_idle()
        team.save(2, CHUNKS, BLOCKS)


def test_disagreeing_ranks_fail_both_jobs():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        jobs = [team.jobs(1, c, BLOCKS)[r] for r, c in enumerate((CHUNKS, random_chunks(4, 9)))]
        team.submit_restores(jobs)
        finish(jobs)
        assert [outcome(job) for job in jobs] == ["all", "all"]
        assert "disagree" in jobs[0].reason
        serving.assert_idle()


def test_late_lookup_is_no_hit():
    card = FaultyCard(memory_card(), [Fault(ops={Op.EXIST}, delay_s=0.5)])
    with Serving(card, **SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        ticket = team.lookup.ask(CHUNKS, 0.1)
        assert ticket.stored is None
        assert not ticket.expired
        wait_until(lambda: ticket.expired, 2, "the question has expired")
        card.faults = []
        assert team.stored(CHUNKS) == [False] * 4


def test_lookups_of_a_gateway_that_is_gone_expire():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        serving.stop()
        wait_until(lambda: team.lookup.off, 5, "off")
        for _ in range(100):
            ticket = team.lookup.ask(CHUNKS, 0.01)
        wait_until(lambda: ticket.expired, 1, "the question has expired")
        assert len(team.lookup._queue) < 10  # nobody will ever run them


def test_graceful_end_turns_off_with_the_reason(lines):
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        serving.stop()
        wait_until(lambda: all(c.off for c in team.clients), 5, "off")
        # ZeroMQ may drop an unread Goodbye together with the connection.
        reasons = ("shutting down", "the connection is lost")
        assert all(any(r in c.off_reason for r in reasons) for c in team.clients)
        assert off_lines(lines) == (2, 1)


def test_no_gateway_turns_off_in_time(lines):
    team = Team(f"tcp://127.0.0.1:{free_port()}", pools(1), connect_timeout_s=0.3)
    with team.start(settle=False):
        for client in team.clients:
            assert not client.wait_settled()
            assert "no gateway answers" in client.off_reason
        job = team.jobs(1, CHUNKS, BLOCKS)[0]
        team.submit_saves([job])
        assert job.finished
        assert outcome(job) == "all"
        assert off_lines(lines) == (1, 1)


def test_missing_rank_is_the_reason_given():
    with Serving(**SLOTS) as serving:
        team = Team(serving.address, pools(2), connect_timeout_s=1.3)
        try:
            team.ranks[0].start()
            assert not team.ranks[0].wait_settled()
            assert "not every rank" in team.ranks[0].off_reason
        finally:
            team.ranks[0].close()


def test_ring_of_another_shm_turns_off(monkeypatch, lines):
    def elsewhere(path, _generation):
        raise RingError(f"can't open the ring {path}: another /dev/shm")

    monkeypatch.setattr(rank_client, "attach", elsewhere)
    with Serving(**SLOTS) as serving:
        team = Team(serving.address, pools(1), connect_timeout_s=1.0)
        with team.start(settle=False):
            assert not team.ranks[0].wait_settled()
            assert "another /dev/shm" in team.ranks[0].off_reason
            wait_until(lambda: team.lookup.off, 5, "off, whichever side came first")
            assert off_lines(lines) == (1, 1)


def test_ring_cut_for_smaller_objects_turns_off():
    """Its slots would lie over each other."""
    with Serving(**SLOTS) as serving:
        team = Team(serving.address, pools(1))
        rank = team.ranks[0]
        declared = rank.caches[0]
        rank.caches[0] = replace(declared, page_bytes=1 << 20)  # the gateway knows of less
        with team.start(settle=False):
            assert not rank.wait_settled()
            assert "set the gateway's io_size to 0" in rank.off_reason
            assert team.movers[0].ring is None


def test_ring_that_can_not_be_registered_turns_off():
    with Serving(**SLOTS) as serving:
        team = Team(serving.address, pools(1))
        team.movers[0].fail_register = True
        with team.start(settle=False):
            assert not team.ranks[0].wait_settled()
            assert "register" in team.ranks[0].off_reason


def test_thread_that_outlives_close_keeps_its_descriptor(monkeypatch, lines):
    monkeypatch.setattr(loop, "JOIN_TIMEOUT_S", 0.05)
    gate, hangs = threading.Event(), threading.Event()
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        rank = team.ranks[0]
        turn = rank.on_turn

        def hang():
            hangs.set()
            gate.wait(20)
            return turn()

        rank.on_turn = hang
        rank.call(lambda: None)
        assert hangs.wait(10)
        rank.close()
        other = os.eventfd(0, os.EFD_NONBLOCK)  # would take the number of one that was closed
        try:
            rank.call(lambda: None)
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
            gate.set()
            rank._thread.join(10)
            assert not rank._thread.is_alive()
            assert not any("unexpected" in text for text in lines.texts), lines.texts
        finally:
            gate.set()
            os.close(other)


class StuckFanout:
    """A fan-out whose exchanges never end."""

    def check(self):
        return

    def close(self, grace_s):
        return False


@pytest.mark.parametrize("stuck", ["mover", "fan-out"])
def test_what_a_device_that_hangs_may_touch_stays(stuck, monkeypatch):
    def hang():
        raise TransferError("transfers did not end within 10 s")

    kept = []
    monkeypatch.setattr(rank_client, "_KEPT", kept)
    with Serving(**SLOTS) as serving:
        team = Team(serving.address, pools(1))
        if stuck == "mover":
            team.movers[0].close = hang
        else:
            team.ranks[0].fanout = StuckFanout()
        with team.start():
            mapping = team.ranks[0]._mapping
        assert mapping.data.size, "the ring was unmapped under the device"
        assert kept == [team.ranks[0]], "who drops the client frees what the device writes to"
        mapping.close()


PHASES = ["idle", "save-copies", "restore-copies", "waits-for-rank", "waits-for-slots", "joining"]


@pytest.mark.parametrize("phase", PHASES)
def test_killed_gateway_ends_every_job(phase, lines):
    options = {"capacity_bytes": "16MiB", "max_value_bytes": "64KiB"}
    size = 8 * 16384 if phase == "waits-for-slots" else 64 * 16384
    with Gateway.serve(card_options=options, shared_memory_size=size) as gateway:
        team = Team(
            gateway.address, pools(2), connect_timeout_s=3.0 if phase == "joining" else 30.0
        )
        jobs = []
        with team:
            if phase == "joining":
                started = [team.ranks[0], team.lookup]
                for client in started:
                    client.start()
                jobs = team.jobs(1, CHUNKS, BLOCKS)[:1]
                team.ranks[0].submit_restore(jobs[0], rank_client.RESTORE, None)
                time.sleep(0.3)
                team.clients = started
            else:
                team.start()
                gateway.assert_no_rings(5)  # every rank is known to have mapped it
                jobs = reach(team, phase)
            gateway.kill9()
            wait_until(lambda: all(c.off for c in team.clients), 6, "all are off")
            for mover in team.movers:
                mover.gate.set()
            finish(jobs)
            assert all(outcome(job) in {"all", "none"} for job in jobs)
            assert off_lines(lines) == (len(team.clients) - 1, 1)
        finish(jobs)
        gateway.assert_no_rings(1)


def reach(team, phase):
    """Bring a team into a phase; return the jobs that are under way."""
    if phase == "idle":
        return []
    if phase == "save-copies":
        jobs = team.jobs(1, CHUNKS, BLOCKS)
        for mover in team.movers:
            mover.gate.clear()
        team.submit_saves(jobs)
        wait_until(lambda: all(m.copies for m in team.movers), 5, "copies have started")
        return jobs
    team.save(1, CHUNKS, BLOCKS)
    jobs = team.jobs(2, CHUNKS, BLOCKS)
    if phase == "waits-for-rank":
        team.ranks[0].submit_restore(jobs[0], rank_client.RESTORE, None)
        time.sleep(0.2)
        return jobs[:1]
    copies = [len(m.copies) for m in team.movers]
    for mover in team.movers:
        mover.gate.clear()
    team.submit_restores(jobs)
    wait_until(
        lambda: all(len(m.copies) > c for m, c in zip(team.movers, copies, strict=True)),
        5,
        "copies have started",
    )
    return jobs


def test_one_rank_s_death_turns_the_others_off():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(2)).start() as team:
        team.ranks[1].close()
        wait_until(lambda: team.ranks[0].off and team.lookup.off, 5, "off")
        assert "rank 1" in team.ranks[0].off_reason
        assert team.ranks[1].off_reason == "the engine shut down"


def test_submit_after_off_fails_at_once():
    with Serving(**SLOTS) as serving, Team(serving.address, pools(1)).start() as team:
        serving.stop()
        wait_until(lambda: team.ranks[0].off, 5, "off")
        jobs = team.jobs(1, CHUNKS, BLOCKS)
        team.submit_restores(jobs)
        assert jobs[0].wait_cache(0) == []
        assert jobs[0].finished
        assert jobs[0].failed_blocks == set(np.unique(BLOCKS).tolist())

"""A job's bookkeeping between the forward pass and the client's thread."""

import threading
import time

import numpy as np
import pytest

from adp_kv.errors import TransferError
from adp_kv.sdk.jobs import Job
from tests.support.clients import Pool, blocks_of
from tests.support.serving import random_chunks


class Ticket:
    """A copy whose end a test decides."""

    def __init__(self, state=False):
        self.state = state

    def done(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    proven = done


@pytest.fixture
def job():
    return make_job()


def make_job(timeout_s=5.0):
    pool = Pool([(0, 512), (1, 512)])
    return Job(1, random_chunks(3), blocks_of(0, 4, 8), pool.caches, timeout_s)


def test_wait_returns_tickets_once_all_is_settled(job):
    ticket = Ticket()
    waited = []
    thread = threading.Thread(target=lambda: waited.append(job.wait_cache(0)))
    thread.start()
    job.note_started([(0, 2)], ticket)
    time.sleep(0.05)
    assert not waited
    job.note_started([(0, 1)], None)
    thread.join(2)
    assert waited == [[ticket]]
    assert not job.finished


def test_asking_whether_it_is_finished_does_not_wait_for_a_copy_that_is_being_started(job):
    told = []
    with job.lock:  # as the client holds it
        thread = threading.Thread(target=lambda: told.append(job.finished), daemon=True)
        thread.start()
        thread.join(5)
        assert told == [False]


def test_job_is_finished_with_its_last_object(job):
    for cache in (0, 1):
        job.note_started([(cache, 3)], None)
        job.note_finished(2)
    assert not job.finished
    job.note_finished(2)
    assert job.finished
    assert not job.failed_chunks.any()
    job.abandon("late")
    assert not job.failed_chunks.any()  # everything was started: nothing is lost
    assert job.reason is None


def test_failed_rows_name_their_blocks(job):
    job.fail(np.array([1]), "first reason")
    job.fail(np.array([1]), "second reason")
    assert job.failed_chunks.tolist() == [False, True, False]
    assert job.failed_blocks == {4, 5}
    assert job.reason == "first reason"
    job.blocks[1, 0] = -1
    assert job.failed_blocks == {5}
    job.failed_chunks[:] = True  # a copy: changes nothing
    assert job.failed_chunks.sum() == 1


def test_abandoned_job_waits_for_started_copies(job):
    tickets = [Ticket(), Ticket()]
    job.note_started([(0, 1)], tickets[0])
    job.note_started([(1, 1)], tickets[1])
    job.abandon("enough")
    job.abandon("again")
    assert job.reason == "enough"
    assert job.failed_chunks.all()
    assert not job.finished
    tickets[0].state = True
    assert not job.finished
    tickets[1].state = TransferError("broken")
    assert job.finished


def test_abandon_wakes_who_waits(job):
    threading.Timer(0.05, job.abandon, ["enough"]).start()
    began = time.monotonic()
    assert job.wait_cache(0) == []
    assert time.monotonic() - began < 2


def test_deadline_abandons():
    job = make_job(timeout_s=0.05)
    assert not job.expired
    assert job.wait_cache(1) == []
    assert job.expired
    assert job.abandoned
    assert "3 objects did not arrive" in job.reason
    assert job.failed_blocks == {0, 1, 4, 5, 8, 9}


def test_copy_that_fails_after_the_job_was_given_up_fails_it(job):
    tickets = [Ticket(), Ticket(state=True)]
    for cache, ticket in enumerate(tickets):
        job.note_started([(cache, 3)], ticket)
    job.abandon("off")
    assert not job.failed_chunks.any()  # everything was started
    assert not job.finished
    tickets[0].state = TransferError("an exchange was aborted")
    assert job.finished
    assert job.failed_chunks.all()


@pytest.mark.parametrize(
    ("state", "reason"),
    [(False, "did not end in time"), (TransferError("rank 1 was late"), "rank 1 was late")],
    ids=["never", "failed"],
)
def test_bytes_that_are_not_proven_fail_the_job_in_time(state, reason):
    job = make_job(timeout_s=0.05)
    tickets = [Ticket(state=True), Ticket(state)]
    thread = threading.Thread(target=job.wait_proven, args=(tickets,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert reason in job.reason
    assert job.failed_chunks.all()


def test_proof_is_waited_for(job):
    ticket = Ticket()
    threading.Timer(0.05, setattr, (ticket, "state", True)).start()
    job.wait_proven([ticket])
    assert ticket.state
    assert not job.failed_chunks.any()

"""Transfers against the compute stream: marks, fences, threads and graph capture."""

import threading
import time

import numpy as np
import pytest
import torch

from adp_kv.transfer.plan import Way
from adp_kv.units import KiB, MiB
from tests.support.cuda_rig import Rig, wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of cupy and Triton, whatever versions are there
]
WAYS = [None, *Way]
PAGE = 24 * KiB
SLEEP = 60_000_000
"""Cycles: 30 to 60 ms, far more than the transfers take."""


@pytest.fixture(params=WAYS, ids=str)
def rig(pool, request):
    made = Rig(pool, request.param)
    yield made
    torch.cuda.synchronize()
    made.close()
    pool.fill_(0xA5)
    torch.cuda.synchronize()


def blocks(rig, count, first=0):
    """Return count pages next to each other in the pool: a tensor, and their offsets."""
    view = rig.pool[first * PAGE : (first + count) * PAGE].view(count, PAGE)
    return view, (first + np.arange(count)) * PAGE


def random_slices(count, seed=0):
    return np.random.default_rng(seed).permutation(1024)[:count] * (2 * PAGE)


def test_save_sees_what_a_slow_kernel_wrote(rig):
    view, offsets = blocks(rig, 512)
    slices = random_slices(512)
    compute = torch.cuda.Stream()
    for value in (1, 2, 3):
        with torch.cuda.stream(compute):
            torch.cuda._sleep(SLEEP)
            view.fill_(value)
            mark = rig.mover.mark()
        ticket = rig.mover.save(rig.copy(slices, offsets, PAGE), mark)
        assert not ticket.done()
        wait([ticket])
        assert (rig.slices(slices, PAGE) == value).all()


def test_restore_lands_after_a_slow_kernel(rig):
    view, offsets = blocks(rig, 512)
    slices = random_slices(512)
    compute = torch.cuda.Stream()
    for value in (1, 2, 3):
        rig.fill_slices(slices, np.full((512, PAGE), value, np.uint8))
        with torch.cuda.stream(compute):
            torch.cuda._sleep(SLEEP)
            view.fill_(200)  # what a block's last owner still writes
            mark = rig.mover.mark()
            ticket = rig.mover.restore(rig.copy(slices, offsets, PAGE), mark)
            assert not ticket.done()
            ticket.fence()
            seen = view.clone()
        compute.synchronize()
        assert ticket.done()
        assert bool((seen == value).all())


def test_save_ends_before_the_block_is_reused(rig):
    view, offsets = blocks(rig, 512)
    slices = random_slices(512)
    compute = torch.cuda.Stream()
    for value in (1, 2, 3):
        with torch.cuda.stream(compute):
            view.fill_(value)
            ticket = rig.mover.save(rig.copy(slices, offsets, PAGE), rig.mover.mark())
            ticket.fence()
            view.fill_(99)
        wait([ticket])
        assert (rig.slices(slices, PAGE) == value).all()


def test_start_never_waits_for_the_device(rig):
    _, offsets = blocks(rig, 512)
    copy = rig.copy(random_slices(512), offsets, PAGE)
    torch.cuda._sleep(20 * SLEEP)
    mark = rig.mover.mark()
    began = time.perf_counter()
    tickets = [rig.mover.restore(copy, mark) for _ in range(4)]
    tickets += [rig.mover.save(copy, mark) for _ in range(4)]
    took = time.perf_counter() - began
    assert not any(ticket.done() for ticket in tickets)
    wait(tickets)
    assert took < 0.3


def run_transfers(rig, rounds, errors, values):
    """Restore and save disjoint blocks over and over; the body of a client's thread."""
    try:
        torch.cuda.set_stream(torch.cuda.Stream())  # marks of this thread; not the legacy stream
        for number in range(rounds):
            tickets, groups = [], []
            for group in range(8):
                slices = (group * 64 + np.arange(64)) * (2 * PAGE)
                _, offsets = blocks(rig, 64, first=(number % 2) * 1024 + group * 64)
                value = (number * 8 + group) % 251
                rig.fill_slices(slices, np.full((64, PAGE), value, np.uint8))
                copy = rig.copy(slices, offsets, PAGE)
                tickets.append(rig.mover.restore(copy, rig.mover.mark()))
                groups.append((slices, copy, value))
            wait(tickets)
            tickets = []
            for slices, copy, _ in groups:
                rig.fill_slices(slices, np.zeros((64, PAGE), np.uint8))
                tickets.append(rig.mover.save(copy, rig.mover.mark()))
            wait(tickets)
            for slices, _, value in groups:
                assert (rig.slices(slices, PAGE) == value).all()
            values.append(number)
    except Exception as error:  # noqa: BLE001  # raised by the thread that started this one
        errors.append(error)


def test_second_thread_transfers_beside_compute(rig):
    errors, values = [], []
    thread = threading.Thread(target=run_transfers, args=(rig, 25, errors, values))
    thread.start()
    a = torch.randn(2048, 2048, device="cuda")
    while thread.is_alive():
        a = torch.tanh(a @ a)
        torch.cuda.current_stream().synchronize()
    thread.join()
    assert not errors
    assert len(values) == 25


def test_second_thread_transfers_during_graph_capture(rig):
    errors, values = [], []
    a = torch.randn(512, 512, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.tanh(a @ a)  # cuBLAS sets itself up outside the capture
    torch.cuda.synchronize()
    thread = threading.Thread(target=run_transfers, args=(rig, 25, errors, values))
    thread.start()
    captures = 0
    while thread.is_alive():
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would synchronise and empty the cache; only capture is tested.
        with torch.cuda.stream(stream):
            graph.capture_begin()
            b = a
            for _ in range(200):
                b = torch.tanh(b @ a)
            graph.capture_end()
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        captures += 1
    thread.join()
    assert not errors
    assert len(values) == 25
    assert captures > 1


def test_transfers_on_a_staging_of_16_mib_in_flight(pool):
    rig = Rig(pool, Way.STAGED, staging_bytes=16 * MiB)
    try:
        _, offsets = blocks(rig, 2048)
        data = np.random.default_rng(5).integers(0, 256, (2048, PAGE), np.uint8)
        slices = np.arange(2048) * (2 * PAGE)
        rig.fill_slices(slices, data)
        tickets = [
            rig.mover.restore(rig.copy(slices[i::16], offsets[i::16], PAGE), None)
            for i in range(16)
        ]
        wait(tickets)
        assert np.array_equal(rig.read_pages(offsets, PAGE), data)
    finally:
        rig.close()
        pool.fill_(0xA5)

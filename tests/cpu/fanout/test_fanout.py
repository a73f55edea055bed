"""Restores of a group of ranks on devices that run their streams in any order."""

import numpy as np
import pytest

from tests.support.clock import FakeClock
from tests.support.exchanges import LocalExchange
from tests.support.fake_cuda import FakeDevice, FakeEvent, ReusedEvent

torch = pytest.importorskip("torch")
from adp_kv.errors import TransferError  # noqa: E402
from adp_kv.fanout.exchange import ExchangeError  # noqa: E402
from adp_kv.fanout.plan import Shape  # noqa: E402
from tests.support.fanouts import GUARD, NUM_SLOTS, SMALL, Members, shape_of  # noqa: E402


@pytest.fixture(autouse=True)
def fake_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)


def finish(tickets, members, steps=4000):
    for _ in range(steps):
        if all(ticket.done() for ticket in tickets):
            return
        members.step(1)
    raise AssertionError("the transfers did not end")


SIZES = [(24, 3), (16, 1), (7, 5), (400, 2), (1000, 1)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_every_rank_gets_every_page(num_ranks, seed):
    rng = np.random.default_rng([num_ranks, seed])
    page_bytes, per_slice = SIZES[seed % len(SIZES)]
    members = Members(num_ranks, seed=seed)
    order = {0: np.arange(NUM_SLOTS), 1: rng.permutation(NUM_SLOTS)}[seed % 2]
    room = members.pools[0].size // (page_bytes + 16)
    numbers = rng.permutation(room)
    done, first_slot, first_page, used = [], 0, 0, []
    for count in rng.integers(1, 50, 5).tolist():
        slots = order[first_slot : first_slot + count]
        pages = numbers[first_page : first_page + count * per_slice]
        first_slot, first_page = first_slot + count, first_page + pages.size
        used.append(pages)
        shape = shape_of(slots, per_slice, page_bytes)
        tickets = members.restore(shape, members.copies(slots, pages, shape))
        done.append((slots, pages, shape, tickets))
        members.step(int(rng.integers(0, 12)))
        if len(done) == 2:  # what came first is looked at while more is in flight
            finish(tickets, members)
    for slots, pages, shape, tickets in done:
        finish(tickets, members)
        assert all(ticket.proven() for ticket in tickets)
        for rank in range(num_ranks):
            want = members.expected(slots, shape)
            assert np.array_equal(members.pages(rank, pages, shape), want)
    for rank in range(num_ranks):
        assert members.is_untouched(rank, np.concatenate(used), shape)


def simple(members, *, failed=None, num=40):
    slots, pages = np.arange(num), np.arange(num * 3)
    shape = shape_of(slots, 3, 100)
    copies = members.copies(slots, pages, shape)
    if failed is not None:
        copies[failed] = None
    return slots, pages, shape, copies


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_failed_rank_takes_part_and_all_fail(failed):
    members = Members(3)
    _, pages, shape, copies = simple(members, failed=failed)
    tickets = members.restore(shape, copies)
    members.step()
    for rank, ticket in enumerate(tickets):
        with pytest.raises(TransferError, match="share failed" if rank == failed else "could not"):
            ticket.done()
        with pytest.raises(TransferError):
            ticket.proven()
    assert members.is_untouched(failed, [], shape), "a rank that gave up writes no page"
    slots, pages, shape, copies = simple(members)
    tickets = members.restore(shape, copies)
    finish(tickets, members)
    assert np.array_equal(members.pages(failed, pages, shape), members.expected(slots, shape))


def test_copy_that_can_not_be_queued_fails_all_ranks():
    members = Members(2)
    _, _, shape, copies = simple(members)
    for copy in copies:
        copy.slice_addrs[:] = copy.slice_addrs[::-1]  # no run: one batched copy
    members.devices[1].fail_batches = True
    tickets = members.restore(shape, copies)
    members.step()
    for ticket, match in zip(tickets, ("rank 1 could not", "invalid argument"), strict=True):
        with pytest.raises(TransferError, match=match):
            ticket.done()


@pytest.mark.parametrize("brings", [True, False])
def test_what_a_rank_does_is_said_before_its_exchange_is_queued(brings, monkeypatch):
    """Others read it as soon as their devices have ended the exchange."""
    members = Members(2)
    said, gather = [], LocalExchange.all_gather

    def look(self, *how):
        rows = members.fanouts[self.rank]._flags._rows
        said.append(rows[len(said), self.rank].tolist())
        gather(self, *how)

    monkeypatch.setattr(LocalExchange, "all_gather", look)
    _, _, shape, copies = simple(members)
    members.fanouts[0].restore((5, 7), shape, copies[0] if brings else None, None)
    assert said == [[number, 5, 7, brings] for number in range(len(said))]
    assert len(said) > 1


def fail(*_how, **_more):
    raise RuntimeError("cudaErrorIllegalAddress")


def test_scatter_that_can_not_be_queued_fails_its_rank(monkeypatch):
    members = Members(2)
    slots, pages, shape, copies = simple(members)
    monkeypatch.setattr(members.devices[1], "launch_prepared", fail)
    tickets = members.restore(shape, copies)
    finish(tickets[:1], members)
    assert np.array_equal(members.pages(0, pages, shape), members.expected(slots, shape))
    with pytest.raises(TransferError, match="IllegalAddress"):
        tickets[1].proven()
    with pytest.raises(TransferError, match="IllegalAddress"):
        finish(tickets[1:], members)


def test_device_that_fails_brings_nothing(monkeypatch):
    members = Members(2)
    _, _, shape, copies = simple(members)
    tickets = members.restore(shape, copies)
    members.step()
    monkeypatch.setattr(ReusedEvent, "query", fail)
    for ticket in tickets:
        with pytest.raises(TransferError, match="the device failed"):
            ticket.done()


def test_what_is_exchanged_follows_from_sizes():
    fanout = Members(2).fanouts[0]  # buffers of 32 KiB
    assert fanout.takes(Shape(300, 1, 16_000))
    assert not fanout.takes(Shape(300, 1, 17_000)), "a page of each rank does not fit a buffer"
    assert not fanout.takes(Shape(260, 1, 16_000)), "less than 4 MiB"


def test_slices_outside_the_ring_fail_all_ranks():
    members = Members(2)
    _, _, shape, copies = simple(members)
    copies[0].slice_addrs[:] += members.ring.size
    tickets = members.restore(shape, copies)
    members.step()
    for ticket, match in zip(tickets, ("outside the registered ring", "rank 0"), strict=True):
        with pytest.raises(TransferError, match=match):
            ticket.done()


def test_nothing_is_proven_before_every_rank_came():
    members = Members(2)
    slots, pages, shape, copies = simple(members)
    ticket = members.fanouts[0].restore((1, 7), shape, copies[0], None)
    members.step()
    assert not ticket.proven()
    assert not ticket.done()
    other = members.fanouts[1].restore((1, 7), shape, copies[1], None)
    finish([ticket, other], members)
    assert np.array_equal(members.pages(0, pages, shape), members.expected(slots, shape))


def test_exchange_out_of_order_fails_instead_of_bringing_wrong_bytes():
    members = Members(2)
    _, _, shape, copies = simple(members)
    one = members.fanouts[0].restore((1, 7), shape, copies[0], None)
    two = members.fanouts[1].restore((2, 7), shape, copies[1], None)
    members.step()
    for ticket in (one, two):
        with pytest.raises(TransferError, match="its bytes are not used"):
            ticket.done()


def test_restore_waits_for_its_mark():
    members = Members(2)
    _, _, shape, copies = simple(members)
    finish(members.restore(shape, copies), members)  # another mark, waited for before
    members.pools[1][:] = GUARD
    gate = FakeEvent(members.devices[1])
    members.devices[1].main.wait_event(gate)
    tickets = members.restore(shape, copies)
    members.step()
    assert members.is_untouched(1, [], shape)
    assert not tickets[0].done(), "an exchange ended without a rank's share"
    gate.happened = True
    finish(tickets, members)
    assert not members.is_untouched(1, [], shape)


def test_fence_makes_current_stream_wait():
    members = Members(2)
    slots, pages, shape, copies = simple(members)
    tickets = members.restore(shape, copies)
    seen = []
    for rank, ticket in enumerate(tickets):
        ticket.fence()
        members.devices[rank].main.add(
            lambda r=rank: seen.append(members.pages(r, pages, shape).copy())
        )
    members.step()
    assert len(seen) == 2
    assert all(np.array_equal(pages, members.expected(slots, shape)) for pages in seen)


def test_absent_rank_ends_in_an_error_within_the_deadline():
    clock = FakeClock()
    members = Members(2, clock=clock)
    _, _, shape, copies = simple(members)
    ticket = members.fanouts[0].restore((1, 7), shape, copies[0], None)
    members.step()
    clock.advance(14.9)
    members.fanouts[0].check()
    assert not ticket.proven()
    clock.advance(0.2)
    with pytest.raises(ExchangeError, match="did not end within 15 s"):
        members.fanouts[0].check()
    assert members.exchanges[0].aborted
    with pytest.raises(TransferError, match="did not end"):
        ticket.proven()
    members.step()  # the device goes on: nothing waits for the absent rank any more
    with pytest.raises(TransferError, match="did not end"):
        ticket.done()
    assert members.fanouts[0].num_in_flight == 0
    with pytest.raises(ExchangeError):
        members.fanouts[0].restore((2, 7), shape, copies[0], None)


def test_late_rank_is_waited_for():
    clock = FakeClock()
    members = Members(2, clock=clock)
    slots, pages, shape, copies = simple(members)
    first = members.fanouts[0].restore((1, 7), shape, copies[0], None)
    members.step()
    clock.advance(2.0)
    second = members.fanouts[1].restore((1, 7), shape, copies[1], None)
    finish([first, second], members)
    assert np.array_equal(members.pages(0, pages, shape), members.expected(slots, shape))


def test_rank_that_can_not_take_part_goes_off_at_once():
    members = Members(2)
    _, _, shape, copies = simple(members)
    members.exchanges[0].fail_next = 1
    with pytest.raises(ExchangeError, match="can't queue"):
        members.fanouts[0].restore((1, 7), shape, copies[0], None)
    assert members.exchanges[0].aborted


def test_share_of_an_exchange_that_could_not_be_queued_holds_the_ring():
    members = Members(2)
    _, _, shape, copies = simple(members)
    gate = FakeEvent(members.devices[0])
    members.devices[0].main.wait_event(gate)
    mark = members.devices[0].record(members.devices[0].main)
    members.exchanges[0].fail_next = 1
    with pytest.raises(ExchangeError):
        members.fanouts[0].restore((1, 7), shape, copies[0], mark)
    assert not members.fanouts[0].close(0.01), "its copies out of the ring have not ended"
    gate.happened = True
    assert members.fanouts[0].close(5.0)
    assert members.devices[0].is_idle()
    assert members.is_untouched(0, [], shape)


def test_close_ends_what_waits_for_an_absent_rank():
    members = Members(2)
    _, _, shape, copies = simple(members)
    ticket = members.fanouts[0].restore((1, 7), shape, copies[0], None)
    members.fanouts[0].close(0.01)
    members.fanouts[0].close(0.01)
    members.step()
    with pytest.raises(TransferError, match="closed"):
        ticket.done()


def test_close_lets_what_is_complete_end():
    members = Members(2)
    _, _, shape, copies = simple(members)
    tickets = members.restore(shape, copies)
    members.step()
    members.fanouts[0].close(1.0)
    assert tickets[0].done()


def test_queue_never_gets_deeper_than_max_ahead():
    now = iter(range(10_000))  # every look at the clock takes a second
    members = Members(2, clock=lambda: float(next(now)))
    _, _, shape, copies = simple(members)

    def restore_many():
        for number in range(9):
            members.fanouts[0].restore((number, 7), shape, copies[0], None)

    with pytest.raises(ExchangeError, match="did not end"):
        restore_many()
    assert len(members.exchanges[0].calls) == SMALL.max_ahead


def test_transfer_that_is_cut_off_ends_only_when_no_page_is_touched_any_more():
    """An absent rank, many exchanges ahead: what was queued before the error still scatters."""
    now = iter(range(10_000))  # every look at the clock takes a second
    members = Members(2, clock=lambda: float(next(now)))
    _, _, shape, copies = simple(members)
    for number in (1, 2):  # two pieces each
        members.fanouts[0].restore((number, 7), shape, copies[0], None)
    slots, pages = np.arange(100, 160), np.arange(300, 300 + 180)
    large = shape_of(slots, 3, 100)  # three pieces: there is room for two
    copy = members.copies(slots, pages, large)[0]
    ticket = members.fanouts[0].restore((3, 7), large, copy, None)
    assert len(members.exchanges[0].calls) == SMALL.max_ahead
    assert members.exchanges[0].aborted
    with pytest.raises(TransferError, match="did not end"):
        ticket.proven()
    assert not ticket.done(), "the device has not scattered yet"
    before = members.pages(0, pages, large).copy()
    ticket.fence()
    seen = []
    members.devices[0].main.add(lambda: seen.append(members.pages(0, pages, large).copy()))
    members.step()
    after = members.pages(0, pages, large)
    assert not np.array_equal(before, after), "nothing was scattered: this proves nothing"
    assert np.array_equal(seen, [after]), "what comes after the fence was overwritten"
    with pytest.raises(TransferError, match="did not end"):
        ticket.done()
    with pytest.raises(ExchangeError, match="did not end"):
        members.fanouts[0].check()


def test_transfer_whose_first_piece_ended_fails_with_its_second():
    members = Members(2)
    _, _, shape, copies = simple(members)
    members.fanouts[1].restore((1, 7), shape, copies[1], None)
    assert len(members.exchanges[1].calls) == 2
    fanout, rooms = members.fanouts[0], []

    def make_room():
        rooms.append(1)
        if len(rooms) == 2:  # the first piece has ended by now, proven
            members.step()
            fanout.poll()
            assert not fanout.num_in_flight
            members.exchanges[0].fail_next = 1

    fanout._make_room = make_room
    ticket = fanout.restore((1, 7), shape, copies[0], None)
    members.step()
    with pytest.raises(TransferError, match="can't queue"):
        ticket.proven()
    with pytest.raises(TransferError, match="can't queue"):
        ticket.done()


def test_fence_of_what_has_ended_waits_for_nothing_newer():
    """Events are used again: an old ticket must not wait for an exchange that is not complete."""
    members = Members(2)
    _, _, shape, copies = simple(members)
    old = members.restore(shape, copies)
    finish(old, members)
    while members.fanouts[0].num_in_flight < SMALL.max_ahead:
        members.fanouts[0].restore((9, 9), shape, copies[0], None)
    old[0].fence()
    seen = []
    members.devices[0].main.add(lambda: seen.append(1))
    members.step()
    assert seen


def test_device_is_used_only_where_that_ends_no_capture(monkeypatch):
    calls = [
        (ReusedEvent, "query"),
        (FakeDevice, "_copy"),
        (ReusedEvent, "record"),
        (FakeDevice, "streamWaitEvent"),
        (FakeDevice, "launch_prepared"),
        (LocalExchange, "abort"),
    ]
    used = []

    def watch(kind, name):
        call = getattr(kind, name)

        def use(self, *how, **more):
            used.append((kind, name))
            device = self.device if kind is LocalExchange else getattr(self, "_device", self)
            assert device.is_exempt(), name
            assert device.is_bound(), name
            return call(self, *how, **more)

        monkeypatch.setattr(kind, name, use)

    for call in calls:
        watch(*call)
    members = Members(2)
    _, _, shape, copies = simple(members)
    for _ in range(3):
        finish(members.restore(shape, copies), members)
    members.fanouts[0].close(1.0)
    assert set(used) == set(calls)
    assert not any(device.is_exempt() for device in members.devices)


def test_ranks_take_turns_with_the_larger_share(monkeypatch):
    members = Members(3)
    slots, pages = np.arange(4), np.arange(4)
    shape = shape_of(slots, 1, 64)  # three ranks share four pages: one of them copies two
    copied = [0] * 3
    for rank, device in enumerate(members.devices):
        one, rows = device.memcpyAsync, device.memcpy2DAsync

        def copy_one(dst, src, size, *rest, rank=rank, one=one):
            copied[rank] += size
            one(dst, src, size, *rest)

        def copy_rows(*how, rank=rank, rows=rows):
            copied[rank] += how[4] * how[5]  # width x height
            rows(*how)

        monkeypatch.setattr(device, "memcpyAsync", copy_one)
        monkeypatch.setattr(device, "memcpy2DAsync", copy_rows)
    larger = set()
    for _ in range(3):
        copied[:] = [0] * 3
        finish(members.restore(shape, members.copies(slots, pages, shape)), members)
        assert sorted(copied) == [64, 64, 128]
        larger.add(copied.index(128))
    assert larger == {0, 1, 2}

import threading
import time

import numpy as np
import pytest

from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from tests.support.cards import Driver, memory_card, random_keys, value_of

OK = Status.OK


@pytest.fixture
def make(drive):
    return lambda *faults, seed=0: drive(FaultyCard(memory_card(), faults, seed))


def first_word_even(keys):
    return keys[:, 0] % 2 == 0


def test_card_without_faults_is_the_inner_card(make):
    driver = make()
    keys = random_keys(5)
    assert driver.write(keys, [100] * 5) == [OK] * 5
    driver.check(keys, [100] * 5)


def test_picked_write_fails_and_is_not_stored(make):
    fault = Fault(Status.NO_SPACE, ops={Op.WRITE}, when=first_word_even)
    driver = make(fault)
    keys = np.array([[1, 0], [2, 0], [3, 0], [4, 0]], dtype=np.uint64)
    assert driver.write(keys, [100] * 4) == [OK, Status.NO_SPACE, OK, Status.NO_SPACE]
    assert driver.exist(keys) == [OK, Status.ABSENT, OK, Status.ABSENT]


def test_failed_read_scribbles_over_its_memory(make):
    driver = make(Fault(Status.CORRUPT, ops={Op.READ}, when=first_word_even))
    keys = np.array([[1, 0], [2, 0]], dtype=np.uint64)
    driver.write(keys, [100] * 2)
    status, values = driver.read(keys, [100] * 2)
    assert status == [OK, Status.CORRUPT]
    assert (values[1] == 0xEE).all()
    assert driver.exist(keys) == [OK, OK]


def test_same_seed_fails_the_same_entries(make):
    keys = random_keys(200)
    runs = []
    for seed in (1, 1, 2):
        driver = make(
            Fault(Status.IO_ERROR, probability=0.2),
            Fault(Status.ABSENT, probability=0.2),
            seed=seed,
        )
        runs.append([driver.exist(keys) for _ in range(3)])
    assert runs[0] == runs[1] != runs[2]
    assert 200 < sum(s == Status.IO_ERROR for run in runs for one in run for s in one) < 520


def test_all_entries_failed_answers_from_another_thread(make):
    driver = make(Fault(Status.IO_ERROR))
    assert driver.exist(random_keys(3)) == [Status.IO_ERROR] * 3
    assert threading.get_ident() not in {thread for _, thread in driver.answers.values()}


def test_delay_holds_the_answer_back(make):
    driver = make(Fault(delay_s=0.2))
    keys = random_keys(2)
    start = time.monotonic()
    assert driver.run(Op.WRITE, keys, [0, 0], [0, 0]) == [OK, OK]
    assert time.monotonic() - start >= 0.2


def test_shorter_delay_overtakes_a_longer_one(make):
    driver = make(Fault(ops={Op.EXIST}, delay_s=30.0))
    late = driver.start(Op.EXIST, random_keys(1))
    driver.card.faults = [Fault(Status.OK, delay_s=0.01)]
    assert driver.exist(random_keys(1)) == [OK]
    assert late not in driver.answers
    driver.close()
    assert driver.answers[late][0].tolist() == [Status.ABSENT]


def test_gone_card_fails_until_it_is_back(make):
    driver = make()
    keys = random_keys(2)
    driver.write(keys, [100] * 2)
    driver.card.gone = True
    assert driver.read(keys, [100] * 2)[0] == [Status.IO_ERROR] * 2
    driver.card.gone = False
    driver.check(keys, [100] * 2)


def test_short_read_brings_half_and_is_corrupt(make):
    driver = make(Fault(damage="short", when=first_word_even))
    keys = np.array([[1, 0], [2, 0]], dtype=np.uint64)
    driver.write(keys, [100] * 2)
    status, values = driver.read(keys, [100] * 2)
    assert status == [OK, Status.CORRUPT]
    assert np.array_equal(values[1][:50], value_of(keys[1], 100)[:50])
    assert (values[1][50:] == 0xEE).all()


def test_flipped_bit_is_corrupt(make):
    driver = make(Fault(damage="flip", ops={Op.READ}))
    keys = random_keys(1)
    driver.write(keys, [100])
    status, values = driver.read(keys, [100])
    assert status == [Status.CORRUPT]
    assert int((values[0] != value_of(keys[0], 100)).sum()) == 1


def test_damage_of_an_absent_value_is_absent(make):
    driver = make(Fault(damage="flip"))
    assert driver.read(random_keys(1), [100])[0] == [Status.ABSENT]


def test_fault_of_one_database_spares_the_others(drive):
    driver = drive(
        FaultyCard(memory_card(num_databases=3), [Fault(Status.IO_ERROR, databases={1})])
    )
    keys, databases = random_keys(6), np.arange(6) % 3
    assert driver.write(keys, [100] * 6, databases=databases) == [OK, Status.IO_ERROR, OK] * 2


def test_silent_batch_moves_bytes_only_when_let(make):
    driver = make()
    keys = random_keys(1)
    driver.write(keys, [100])
    driver.card.faults = [Fault(silent=True, ops={Op.READ})]
    place = driver.arena.place(100)
    token = driver.start(Op.READ, keys, [place], [100])
    assert driver.exist(keys) == [OK]  # others are answered
    assert token not in driver.answers
    assert (driver.arena.at(place, 100) == 0xA5).all()
    driver.card.answer_all()
    assert driver.wait(token).tolist() == [OK]
    assert np.array_equal(driver.arena.at(place, 100), value_of(keys[0], 100))


def test_held_answers_come_in_reverse(make):
    driver = make(Fault(hold=3))
    order = []
    on_done = driver.card._on_done
    driver.card._on_done = lambda token, status: (order.append(token), on_done(token, status))
    tokens = [driver.start(Op.EXIST, random_keys(1, seed=i)) for i in range(3)]
    for token in tokens:
        driver.wait(token)
    assert sorted(order) == tokens
    assert order != tokens
    late = driver.start(Op.EXIST, random_keys(1))
    assert late not in driver.answers
    driver.close()
    assert late in driver.answers


def test_faulty_card_closes_twice():
    driver = Driver(FaultyCard(memory_card()))
    driver.close()
    driver.close()

"""A gateway on a card that is too small: it goes on saving, and what lookups find loads."""

import numpy as np
import pytest

from adp_kv.errors import ConfigError
from gateway.cards.base import Op
from tests.support.cards import memory_card
from tests.support.process import wait_until
from tests.support.serving import Serving, get, put, random_chunks, sharded


def small_card(**changes):
    settings = {
        "capacity_bytes": 96 * 4096,
        "max_value_bytes": 4096,
        "num_databases": 2,
        "hit_grace_s": 0.0,
    }
    return memory_card(**(settings | changes))


def test_gateway_on_a_full_card_goes_on_saving():
    chunks = random_chunks(60)
    with Serving(card=small_card(), shared_memory_size=1 << 20) as serving:
        ranks = serving.join(sharded(2, 2, slice_bytes=2048))
        for number, chunk in enumerate(chunks):
            put(ranks, 100 + number, chunk[None], [0, 1])
        wait_until(lambda: ranks[0].lookup(chunks[-1:]) == [True], 5, "the last is stored")
        stored = np.array(ranks[0].lookup(chunks))
        assert 15 <= stored.sum() < 48
        assert not stored[:12].any()
        outcome = get(ranks, 7, chunks[stored], [0, 1])[0]
        assert set(outcome.status.values()) == {0}
        counters = ranks[0].stats()
        assert counters["card_evicted_chunks"] > 10
        assert counters.get("objects_missed", 0) == 0
        serving.assert_idle()


def test_values_carry_their_chunk_and_namespace():
    card, batches = small_card(), []
    submit = card.submit

    def watch(batch):
        batches.append(batch)
        submit(batch)

    card.submit = watch
    chunks = random_chunks(3)
    with Serving(card=card) as serving:
        ranks = serving.join(sharded(2, 1))
        put(ranks, 1, chunks, [0, 1])
        wait_until(lambda: all(ranks[0].lookup(chunks)), 5, "committed")
    writes = [batch for batch in batches if batch.op is Op.WRITE]
    assert all(batch.namespace == int.from_bytes(bytes(range(4)), "little") for batch in writes)
    values, markers = writes[0], writes[-1]
    assert values.groups.tolist() == chunks[[0, 1, 2, 0, 1, 2], 0].tolist()
    assert markers.groups.tolist() == chunks[:, 0].tolist()


def test_card_that_forgets_before_a_job_ends_is_refused():
    with (
        pytest.raises(ConfigError, match=r"job_deadline_s = 120.*uncommitted_s"),
        Serving(card=small_card(uncommitted_s=100.0), job_deadline_s=120),
    ):
        pass

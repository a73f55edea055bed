"""The gateway against a model of it: any order of saves, restores, faults and engines.

The model is one set: which chunks must be found. Bytes are checked by every get.
"""

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adp_kv.wire.keys import commit_keys, pack_keys
from adp_kv.wire.messages import Failed, Get, Release
from gateway.cards.base import Op, Status
from gateway.cards.faulty import Fault, FaultyCard
from gateway.metrics import render
from tests.support.cards import memory_card
from tests.support.metric_sums import Values, broken
from tests.support.serving import Serving, get, put, random_chunks, sharded

CHUNKS = random_chunks(6)
CACHES = [0, 1, 2]
SOME = st.lists(st.integers(0, len(CHUNKS) - 1), min_size=1, max_size=4, unique=True)
DAMAGED = [Fault(Status.CORRUPT, ops={Op.READ}, probability=0.4)]
# Of the objects alone: a commit record that is lost is just a chunk not found.
UNWRITTEN = [
    Fault(
        Status.IO_ERROR,
        ops={Op.WRITE},
        probability=0.4,
        when=lambda keys: ~np.isin(keys[:, 0], commit_keys(CHUNKS)[:, 0]),
    )
]


class GatewayMachine(RuleBasedStateMachine):
    """Two ranks and a scheduler side of one engine after another."""

    @initialize()
    def begin(self):
        self.card = FaultyCard(memory_card(), [], 1)
        self.serving = Serving(self.card, shared_memory_size=20 * 8192, batch_bytes=16384)
        self.number = 0
        self.found = set()
        self.join()
        self.save([0, 1, 2, 3])

    def join(self):
        name = f"engine {self.number}"
        *self.ranks, self.scheduler = self.serving.join(
            sharded(len(CACHES), 2), scheduler=True, engine=name
        )

    def next(self):
        self.number += 1
        return self.number

    @rule(rows=SOME)
    def save(self, rows):
        put(self.ranks, self.next(), CHUNKS[rows], CACHES)
        self.serving.assert_idle()
        self.found |= set(rows)

    @rule(row=st.integers(0, len(CHUNKS) - 1))
    def save_while_writes_fail(self, row):
        before = self.serving.server.counters.get("objects_not_written", 0)
        self.card.faults = UNWRITTEN
        put(self.ranks, self.next(), CHUNKS[[row]], CACHES)
        self.serving.assert_idle()
        self.card.faults = []
        if self.serving.server.counters.get("objects_not_written", 0) == before:
            self.found.add(row)

    @rule(rows=SOME)
    def save_that_a_rank_refuses(self, rows):
        put(self.ranks, self.next(), CHUNKS[rows], CACHES, ok=lambda rank: rank.rank == 0)
        self.serving.assert_idle()

    @rule(rows=SOME)
    def save_of_half_the_layers(self, rows):
        put(self.ranks, self.next(), CHUNKS[rows], CACHES[:1])
        for job in list(self.serving.server._engine._puts._jobs.values()):
            job.deadline = 0.0  # not by a short setting: a save on a busy host takes its time
        self.serving.assert_idle()

    @rule(rows=SOME, caches=st.sampled_from([[0], [2, 1], CACHES]), damaged=st.booleans())
    def load(self, rows, caches, damaged):
        self.card.faults = DAMAGED if damaged else []
        outcomes = get(self.ranks, self.next() << 24, CHUNKS[rows], caches)
        self.serving.assert_idle()
        self.card.faults = []
        assert outcomes[0].status == outcomes[1].status, "one view for all ranks"
        for i, code in outcomes[0].status.items():
            row = rows[i % len(rows)]
            assert not code or damaged or row not in self.found
            if code:
                self.found.discard(row)

    @rule(rows=SOME)
    def disagree(self, rows):
        seq = self.next() << 24
        for rank, chunks in zip(self.ranks, (CHUNKS[rows], CHUNKS[rows[:1]] + 1), strict=True):
            rank.send(Get(seq, [0], pack_keys(chunks)))
        for rank in self.ranks:
            rank.expect(Failed)
        self.serving.assert_idle()
        # Reads had begun for the first rank: what they missed is not offered, and was not.

    @rule(seq=st.integers(0, 1 << 62), first=st.integers(0, 9))
    def stray_release(self, seq, first):
        self.ranks[0].send(Release(seq | 1 << 62, first, ok=True))

    @rule(politely=st.booleans())
    def next_engine(self, politely):
        for rank in [*self.ranks, self.scheduler]:
            rank.close("bye" if politely else None)
        self.number += 1
        self.join()

    @invariant()
    def lookup_finds_what_it_must(self):
        if not hasattr(self, "found"):
            return
        stored = self.scheduler.lookup(CHUNKS)
        assert [row for row, there in enumerate(stored) if there] == sorted(self.found)

    def teardown(self):
        if not hasattr(self, "serving"):
            return
        self.card.faults = []
        self.serving.assert_idle()
        assert not broken(Values(render(self.serving.server.snapshot())))
        assert "unexpected_errors" not in self.serving.server.counters
        self.serving.stop()


TestGateway = GatewayMachine.TestCase
TestGateway.settings = settings(
    max_examples=15,
    stateful_step_count=16,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes, and the steps are few
    suppress_health_check=list(HealthCheck),
)

"""The turns and rows of benchmarks.agents, from an engine that is made up."""

import pytest

from benchmarks import agents
from benchmarks._results import Results

LOAD = agents.Load(agents=6, groups=2, shared=512, private=300, new=8, answer=4)


class MadeUp:
    """Answers at once; a turn with the exchange takes 0.8 s, one without 1 s."""

    def __init__(self):
        self.modes, self.prompts, self.stored = [], [], None

    def exchange(self, when):
        self.modes.append(when)
        return True

    def turn(self, prompts, answer):
        self.prompts.append([list(tokens) for tokens in prompts])
        seconds = 0.8 if self.modes[-1] == agents.ON else 1.0
        answers = [[7] * answer for _ in prompts]
        return agents.Turn(seconds, [seconds / 2] * len(prompts), answers, [512] * len(prompts))

    def wait_stored(self, num_chunks):
        self.stored = num_chunks


@pytest.fixture
def told():
    engine, results = MadeUp(), Results("agents")
    agents.run(engine, results, LOAD, pairs=3)
    return engine, {row.metric: row for row in results.rows}


def test_gain_compares_pairs_of_turns(told):
    _, rows = told
    assert rows["agents.6.tokens_per_s.gain"].value == pytest.approx(1.25)
    assert rows["agents.6.ttft.gain"].value == pytest.approx(0.8)
    assert rows["agents.6.tokens_per_s.on"].value == pytest.approx(6 * 4 / 0.8)
    assert not rows["agents.6.tokens_per_s.gain"].misses_target


def test_modes_take_turns_in_changing_order(told):
    engine, _ = told
    on, off = agents.ON, agents.OFF
    assert engine.modes == [off, off, on, on, off, off, on, on, off]


def test_histories_grow_and_prefixes_are_shared(told):
    engine, _ = told
    first, second = engine.prompts[0], engine.prompts[2]
    assert len({tuple(tokens[:512]) for tokens in first}) == 2
    assert len({tuple(tokens) for tokens in first}) == 6
    for before, after in zip(first, second, strict=True):
        assert after[: len(before)] == before
        assert len(after) == len(before) + 4 + 8
        assert after[len(before) : len(before) + 4] == [7] * 4


def test_all_chunks_are_stored_before_it_counts(told):
    engine, _ = told
    distinct = {tuple(t[: i + 256]) for t in engine.prompts[0] for i in range(0, 812 - 255, 256)}
    assert engine.stored == len(distinct)

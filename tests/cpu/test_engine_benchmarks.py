"""Rows of the benchmarks that run engines, from made-up times; what is sized for a GPU."""

import os
from pathlib import Path

import pytest

from adp_kv.units import GiB
from benchmarks import _engines, restore
from benchmarks._results import Results

SHAPES = {one.name: one for one in restore.all_shapes("cuda", quick=False)}


def test_shapes_have_the_issue_s_sizes():
    llama, mla = SHAPES["60k"], SHAPES["196k"]
    assert llama.prompt_tokens >= 60_000
    assert (llama.object_bytes, llama.num_layers) == (1 << 20, 32)
    assert llama.total_bytes == llama.hit_tokens * 128 * 1024
    assert mla.prompt_tokens >= 196_000
    assert (mla.object_bytes, mla.num_layers) == (256 * 1152, 61)
    for shape in SHAPES.values():
        assert shape.prompt_tokens < shape.config["max_position_embeddings"]


def made_up(first_token_s, **more):
    return restore.Times(first_token_s=first_token_s, **more)


@pytest.fixture
def rows():
    shape = SHAPES["60k"]
    at_link = shape.total_bytes / 55e9
    times = {
        "60k.plain": made_up([3.0, 2.9, 3.1], hit_s=[0.05, 0.06, 0.05]),
        "60k.offloading": made_up([0.2, 0.3, 0.25]),
        "60k.memory": made_up(
            [0.15, 0.16, 0.26],
            counted={"gets": 96, "objects_read": 96 * 235, "get_grants": 240},
            cpu=_engines.Usage(0.03, 3.0),
        ),
    }
    results = Results("restore")
    restore.add_rows(results, shape, times, 55.0)
    return {row.metric: row for row in results.rows}, at_link


def test_rows_set_restores_against_link_and_offloading(rows):
    rows, at_link = rows
    over_link = rows["restore.60k.memory.over_link"]
    assert over_link.value == pytest.approx(0.16 / at_link)
    assert over_link.target == 1.10
    assert over_link.baseline == pytest.approx(0.25 / at_link)
    worst = rows["restore.60k.memory.over_offloading"]
    assert worst.value == pytest.approx(0.26 / 0.25), "the worst round counts"
    assert worst.target == 1.0
    assert worst.misses_target
    assert rows["restore.60k.memory.added_over_link"].value == pytest.approx(0.11 / at_link)


def test_rows_count_requests_and_gateway_time(rows):
    rows, _ = rows
    assert rows["restore.60k.memory.requests"].value == 32
    assert rows["restore.60k.memory.grants"].value == 80
    assert rows["restore.60k.memory.gateway.main_thread"].value == pytest.approx(30_000 / 22560)


def test_gateway_settings_hold_every_chunk(monkeypatch, tmp_path):
    asked = {}

    def serve(kind, options, **settings):
        asked[kind] = options | settings

    monkeypatch.setattr(_engines.Gateway, "serve", serve)
    setup = _engines.Setup(device="cuda", folder=tmp_path)
    for kind in _engines.ADP:
        _engines.Contender(kind, SHAPES["196k"], setup)._serve()
    objects = SHAPES["196k"].num_chunks * 61
    memory, slab = asked["memory"], asked["slab"]
    assert memory["capacity_bytes"] // memory["max_value_bytes"] >= objects
    pieces = 2  # 294,912 bytes in fragments of 261,120
    assert slab["capacity_bytes"] // (256 << 10) >= pieces * objects
    assert slab["capacity_bytes"] < 40 * GiB


def test_cpu_usage_grows_with_work():
    before = _engines.cpu_usage(os.getpid())
    sum(i * i for i in range(2_000_000))
    used = _engines.cpu_usage(os.getpid()).since(before)
    assert 0 < used.main_s <= used.all_s


def test_waves_keep_all_engines_together_unless_one_more_runs(tmp_path):
    setup = _engines.Setup(device="cuda", folder=Path(tmp_path))

    def contenders(*kinds):
        return [_engines.Contender(kind, SHAPES["60k"], setup) for kind in kinds] + [
            _engines.Contender("memory", SHAPES["196k"], setup)
        ]

    assert [len(wave) for wave in restore.waves(contenders("plain", "memory"))] == [3]
    assert [len(wave) for wave in restore.waves(contenders("plain", "lmcache"))] == [2, 1]


def test_a_contender_that_fails_leaves_the_others(tmp_path, capsys):
    setup = _engines.Setup(device="cuda", folder=tmp_path)
    good, bad = (_engines.Contender(k, SHAPES["60k"], setup) for k in ("plain", "memory"))

    def fail():
        raise AssertionError("wrong token")

    field = _engines.Field([good, bad], together=False)
    assert field.attempt(good, lambda: 7) == 7
    assert field.attempt(bad, fail) is None
    assert field.contenders == [good]
    assert field.failed == {"60k.memory": "wrong token"}
    assert "60k.memory failed: wrong token" in capsys.readouterr().out

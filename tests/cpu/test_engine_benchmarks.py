"""Rows of the benchmarks that run engines, from made-up times; what is sized for a GPU."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from adp_kv.transfer.plan import Way
from adp_kv.units import GiB
from benchmarks import (
    _engines,
    _slow_gateway,
    control_path,
    graph_gaps,
    interference,
    load_mode,
    read_ahead,
    restore,
    save_overhead,
)
from benchmarks import memory_card as memory_card_benchmark
from benchmarks._results import Results, read_rows
from gateway.cards.base import Op
from gateway.cards.memory import MemorySettings
from tests.support.cards import Driver, memory_card, random_keys
from tests.support.process import wait_until

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


# 1 MiB and 294,912 bytes in fragments of 258,048
@pytest.mark.parametrize(("name", "pieces"), [("60k", 5), ("196k", 2)])
def test_gateway_settings_hold_every_chunk(monkeypatch, tmp_path, name, pieces):
    asked = {}

    def serve(kind, options, **settings):
        asked[kind] = options | settings

    monkeypatch.setattr(_engines.Gateway, "serve", serve)
    setup = _engines.Setup(device="cuda", folder=tmp_path)
    for kind in _engines.ADP:
        _engines.Contender(kind, SHAPES[name], setup)._serve()
    objects = SHAPES[name].num_chunks * SHAPES[name].num_layers
    memory, slab = asked["memory"], asked["slab"]
    assert memory["capacity_bytes"] // memory["max_value_bytes"] >= objects
    assert slab["capacity_bytes"] // (256 << 10) >= pieces * objects
    assert slab["capacity_bytes"] < 40 * GiB


def test_rings_fit_the_shared_memory(monkeypatch, capsys):
    usage = SimpleNamespace(free=10 * GiB)
    monkeypatch.setattr(_engines.shutil, "disk_usage", lambda _: usage)
    assert _engines.ring_bytes(2 * GiB, 3) == 2 * GiB
    assert _engines.ring_bytes(6 * GiB, 4) == 2 * GiB
    assert "2.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["memory", "offloading"])
def test_other_tokens_after_a_restore_are_noted_and_ours_are_an_error(tmp_path, kind):
    one = _engines.Contender(kind, SHAPES["60k"], _engines.Setup("cuda", tmp_path))
    one.forget = lambda: None
    one.reference = [1, 2]

    def generate(prompt, max_tokens=1):
        one.cached = cached
        return tokens

    one.generate = generate
    tokens, cached = [1, 2], one.shape.hit_tokens
    assert one.restores_same_tokens()
    tokens = [1, 3]
    if kind == "memory":
        with pytest.raises(AssertionError, match="after a restore"):
            one.restores_same_tokens()
    else:
        assert not one.restores_same_tokens()
    cached -= 1
    with pytest.raises(AssertionError, match="not all"):
        one.restores_same_tokens()


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


class MadeUpInterference:
    """Twice as slow beside kernels, a little beside the copy engine."""

    def __init__(self):
        self.asked = []

    def link(self):
        return 50.0

    def alone(self, load):
        return {"decode": 0.008, "compute": 0.020}[load]

    def beside(self, load, case, way):
        self.asked.append((load, case.name, way))
        factor = {"copy engine": 1.05, "planner": 1.10, "direct": 2.0}[way]
        more = 0.05 if case.kind == "strided" else 0.0
        return interference.Beside(self.alone(load) * (factor + more), 45.0)


def test_interference_takes_the_worst_case_of_the_planner():
    bench, results = MadeUpInterference(), Results("interference")
    interference.run(bench, results, interference.CASES, 2)
    rows = {row.metric: row for row in results.rows}
    row = rows["interference.decode.slowdown"]
    assert row.value == pytest.approx(1.15)
    assert row.baseline == pytest.approx(1.10)
    assert row.target == 1.08
    assert row.misses_target
    assert rows["interference.compute.contiguous.64KiB.direct.slowdown"].value == pytest.approx(2)
    assert rows["interference.decode.contiguous.72KiB.planner.link_share"].value == 0.9
    assert len(bench.asked) == 2 * 2 * 3 * 3


def test_traffic_keeps_restores_in_flight_and_counts_what_ended():
    flying = [0, 0]  # now, most

    def start():
        flying[0] += 1
        flying[1] = max(flying)
        began = time.monotonic()

        def ended():
            done = time.monotonic() - began > 0.01
            flying[0] -= done
            return done

        return ended

    with interference.Traffic(start, 7) as traffic:
        wait_until(lambda: traffic.num_ended > 20, 10, "traffic")
    assert flying == [0, interference.IN_FLIGHT]
    assert traffic.moved_bytes == 7 * traffic.num_ended


def test_traffic_that_fails_says_so():
    def start():
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"), interference.Traffic(start, 1) as traffic:
        traffic._thread.join(10)


def test_save_rows_compare_rounds_in_pairs():
    results = Results("save_overhead")
    steps = {"plain": [1.0, 2.0, 4.0], "memory": [1.02, 2.02, 4.4]}
    times = {kind: [save_overhead.Round(2 * s, s) for s in some] for kind, some in steps.items()}
    save_overhead.add_rows(results, save_overhead.PREFILL, times)
    rows = {row.metric: row for row in results.rows}
    assert rows["save.prefill.overhead_pct"].value == pytest.approx(2.0)
    assert rows["save.prefill.overhead_pct"].target == 3.0
    assert rows["save.prefill.overhead_pct.max"].value == pytest.approx(10.0)
    times["memory"] = [save_overhead.Round(2.5 * one.step_s, one.step_s) for one in times["plain"]]
    save_overhead.add_rows(results, save_overhead.DECODE, times)
    rows = {row.metric: row for row in results.rows}
    assert rows["save.decode.overhead_pct"].value == pytest.approx(0.0)
    assert rows["save.decode.batch.overhead_pct"].value == pytest.approx(25.0)


def test_decode_step_is_of_the_sequence_that_was_admitted_last():
    said = [
        SimpleNamespace(first_token_s=f, last_token_s=f + took) for f, took in ((5, 90), (7, 51.1))
    ]
    engine = SimpleNamespace(generate=lambda *_, **__: said, elapsed_s=100.0)
    shape = SimpleNamespace(config={"vocab_size": 100})
    contender = SimpleNamespace(engine=engine, shape=shape)
    found = save_overhead.one_round(contender, save_overhead.DECODE, 1)
    assert found == save_overhead.Round(100.0, pytest.approx(0.1))


def test_save_rounds_are_new_and_fit_the_card():
    shape = SHAPES["60k"]
    load = save_overhead.DECODE
    first, second = load.prompts(1, 1000), load.prompts(2, 1000)
    assert len({tuple(p[:16]) for p in first + second}) == 64
    assert [len(p) for p in first[:3]] == [64, 72, 80]
    room = save_overhead.room_for((save_overhead.PREFILL, load), shape, 5)
    assert room >= 6 * (load.chunks(256) + 2 * 62) * 32 * shape.object_bytes
    assert room < 60 * GiB


@pytest.mark.parametrize("kind", ["memory", "slab"])
def test_cards_keep_the_whole_prompt(kind):
    """Above evict_above a card evicts, and its databases are not equally full."""
    shape = SHAPES["60k"]
    each = shape.object_bytes if kind == "memory" else 4 * 256 * 1024  # fragments in slots
    held = shape.num_chunks * shape.num_layers * each
    assert held * 1.05 < MemorySettings(capacity_bytes=GiB).evict_above * _engines.room(kind, shape)


def test_outcome_looks_at_the_wait_alone():
    reply = {
        "times": [0.0, 1.0, 2.0, 3.0, 9.0, 10.0, 11.0],
        "added_s": 3.5,
        "first_token_s": 9.5,
    }
    found = load_mode.outcome(reply)
    assert found == load_mode.Outcome(first_token_s=6.0, before_s=1.0, mean_s=3.5, longest_s=6.0)


def test_load_mode_sizes():
    shape = SHAPES["60k"]
    per_chunk = 32 * shape.object_bytes
    sizes = {size.name: size.num_chunks * per_chunk for size in load_mode.all_sizes(shape)}
    assert sizes["0.1GB"] == pytest.approx(1e8, rel=0.2)
    assert sizes["1GB"] == pytest.approx(1e9, rel=0.02)
    assert sizes["8GB"] == shape.total_bytes


def test_slow_card_serves_one_batch_after_the_other(tmp_path):
    speed = tmp_path / "speed"
    card = _slow_gateway.SlowCard(memory_card(), speed)
    driver = Driver(card)
    try:
        keys = random_keys(8)
        driver.write(keys, [65536] * 8)
        speed.write_text("5e6")  # 0.105 s for all
        began = time.monotonic()
        tokens = [
            driver.start(Op.READ, keys[i : i + 1], [driver.arena.place(65536)], [65536])
            for i in range(8)
        ]
        for token in tokens:
            assert driver.wait(token).tolist() == [0]
        assert time.monotonic() - began >= 0.1
        speed.write_text("")
        driver.check(keys, [65536] * 8)
    finally:
        driver.close()


def test_control_path_dry_run_counts_grants(tmp_path):
    control_path.main(["--quick", f"--out={tmp_path}"])
    rows = {row.metric: row.value for row in read_rows(tmp_path / "control_path.json")}
    assert rows["control_path.60k.grants"] == 4
    assert rows["control_path.60k.wall"] > 0
    assert rows["control_path.60k.client.object"] > 0


def test_read_ahead_dry_run_has_rows_for_both(tmp_path):
    read_ahead.main(["--quick", f"--out={tmp_path}"])
    rows = {row.metric: row for row in read_rows(tmp_path / "read_ahead.json")}
    for layer in ("first_layer", "last_layer"):
        row = rows[f"read_ahead.wait20ms.{layer}"]
        assert row.value > 0
        assert row.baseline > 0


def test_memory_card_dry_run_moves_everything(tmp_path):
    memory_card_benchmark.main(["--quick", f"--out={tmp_path}"])
    rows = {row.metric: row.value for row in read_rows(tmp_path / "memory_card.json")}
    assert rows["memory_card.read"] >= rows["memory_card.read.default.batch16MiB"] > 0


def test_graph_gaps_says_what_a_step_takes_longer_and_goes_on_after_a_failure(capsys):
    def measured(name):
        if name == "copy.to_host":
            raise subprocess.CalledProcessError(1, [name], stderr="no device")
        return {"before": 1.2, "beside": 1.3, "after": 1.4, "rested": 1.4, "another_process": 1.2}

    results = Results("graph_gaps")
    assert not graph_gaps.run(results, graph_gaps.QUICK_CASES, measured)
    rows = {row.metric: row.value for row in results.rows}
    assert rows["graph_gaps.save.direct.step"] == pytest.approx(0.2 * 450)
    assert rows["graph_gaps.nothing.another_process"] == 1.2
    assert not any("copy.to_host" in name for name in rows)
    assert "no device" in capsys.readouterr().out


def test_graph_gaps_knows_every_way_of_the_mover():
    moves = {f"{side}.{way.value}" for side in ("save", "restore") for way in Way}
    assert moves <= set(graph_gaps.CASES)
    assert set(graph_gaps.QUICK_CASES) <= set(graph_gaps.CASES)

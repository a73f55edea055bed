"""The benchmarks that run engines, from end to end with tiny models; a GPU runs the same code."""

import pytest

from benchmarks import load_mode, restore, save_overhead
from benchmarks._results import read_rows

pytestmark = pytest.mark.vllm

STAGES = ("load", "first_grant", "last_copy_queued", "last_layer_fenced")


def run(benchmark, name, tmp_path, capsys, *more):
    """Return the rows of a dry run by metric; it must not have lost an engine."""
    status = benchmark.main(["--quick", f"--out={tmp_path}", *more])
    assert status == 0, capsys.readouterr().out
    return {row.metric: row.value for row in read_rows(tmp_path / f"{name}.json")}


def test_restore_dry_run_writes_rows(tmp_path, capsys):
    rows = run(restore, "restore", tmp_path, capsys, "--only=60k")
    for kind in ("memory", "slab"):
        assert rows[f"restore.60k.{kind}.first_token"] > 0
        assert rows[f"restore.60k.{kind}.requests"] == 4  # layers times ranks
        assert rows[f"restore.60k.{kind}.objects"] == 16
        assert rows[f"restore.60k.{kind}.same_tokens"] == 1
        assert rows[f"restore.60k.{kind}.grants"] == 4
        assert rows[f"restore.60k.{kind}.gateway.main_thread"] > 0
        stages = [rows[f"restore.60k.{kind}.stage.{stage}"] for stage in STAGES]
        assert stages == sorted(stages)
        assert stages[-1] < rows[f"restore.60k.{kind}.first_token.max"]
    assert rows["restore.60k.bytes"] == pytest.approx(16 * 262144 / 1e9)
    assert rows["restore.60k.gpu_cache"] < rows["restore.60k.recomputed"]


def test_load_mode_dry_run_writes_rows(tmp_path, capsys):
    rows = run(load_mode, "load_mode", tmp_path, capsys)
    for speed in ("fast", "slow"):
        for mode in load_mode.MODES:
            prefix = f"load_mode.{speed}.8GB.{mode}"
            assert rows[f"{prefix}.first_token"] > 0
            assert rows[f"{prefix}.others.longest"] >= rows[f"{prefix}.others.mean"] > 0


def test_save_overhead_dry_run_writes_rows(tmp_path, capsys):
    rows = run(save_overhead, "save_overhead", tmp_path, capsys)
    for load in ("prefill", "decode"):
        assert rows[f"save.{load}.on"] > 0
        assert rows[f"save.{load}.off"] > 0
        assert f"save.{load}.overhead_pct" in rows

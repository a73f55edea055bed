"""benchmarks.restore from end to end with tiny models; on a GPU it runs with large ones."""

import pytest

from benchmarks import restore
from benchmarks._results import read_rows

pytestmark = pytest.mark.vllm


def test_dry_run_restores_and_writes_rows(tmp_path, capsys):
    assert restore.main(["--quick", "--only=60k", f"--out={tmp_path}"]) == 0, (
        capsys.readouterr().out
    )
    rows = {row.metric: row.value for row in read_rows(tmp_path / "restore.json")}
    for kind in ("memory", "slab"):
        assert rows[f"restore.60k.{kind}.first_token"] > 0
        assert rows[f"restore.60k.{kind}.requests"] == 4  # layers times ranks
        assert rows[f"restore.60k.{kind}.objects"] == 16
        assert rows[f"restore.60k.{kind}.grants"] == 4
        assert rows[f"restore.60k.{kind}.gateway.main_thread"] > 0
    assert rows["restore.60k.bytes"] == pytest.approx(16 * 262144 / 1e9)
    assert rows["restore.60k.gpu_cache"] < rows["restore.60k.recomputed"]

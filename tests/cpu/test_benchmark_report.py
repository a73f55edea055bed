"""benchmarks._results and benchmarks.report, on made-up rows and a made-up repository."""

import dataclasses
import json
import subprocess

import pytest

from benchmarks import _plots, _results, report
from benchmarks._results import Results, Row

CODE = ("adp_kv/kernels",)


def row(**changes):
    made_up = Row(
        metric="restore",
        value=48.0,
        unit="GB/s",
        better="higher",
        target=46.0,
        baseline=24.0,
        gpu="GPU 9000",
        commit="0" * 40,
        versions={"torch": "2.13.0"},
        date="2025-08-01T10:00:00+00:00",
    )
    return dataclasses.replace(made_up, **changes)


def git(repo, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    command = ["git", *identity, *args]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path):
    """A repository whose kernels changed in the first commit and docs in the second."""
    for folder in ("adp_kv/kernels", "benchmarks/results", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "adp_kv/kernels/gather.py").write_text("a = 1\n")
    (tmp_path / "benchmarks/scatter.py").write_text(
        '"""A benchmark."""\n\nCODE = ("adp_kv/kernels",)\n'
    )
    (tmp_path / "README.md").write_text(
        "A\n<!-- results:scatter -->\nold\n<!-- /results:scatter -->\nB\n"
    )
    (tmp_path / "docs/other.md").write_text("<!-- results:absent -->\n<!-- /results:absent -->\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "docs/note.md").write_text("n\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "second")
    return tmp_path


@pytest.mark.parametrize(
    ("better", "value", "target", "missed"),
    [
        ("higher", 45.9, 46.0, True),
        ("higher", 46.0, 46.0, False),
        ("lower", 46.1, 46.0, True),
        ("lower", 46.0, 46.0, False),
        ("lower", 99.0, None, False),
    ],
)
def test_target_is_missed_on_the_worse_side_only(better, value, target, missed):
    assert row(better=better, value=value, target=target).misses_target is missed


def test_results_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("ADP_KV_COMMIT", "abc123")
    results = Results("scatter")
    added = results.add("restore", 1.5, "GB/s", better="higher", target=2, baseline=1.0)
    with pytest.raises(ValueError, match="twice"):
        results.add("restore", 1.5, "GB/s", better="higher")
    path = results.write(tmp_path)
    assert path == tmp_path / "scatter.json"
    assert _results.read_rows(path) == [added]
    assert added.commit == "abc123"
    assert added.gpu
    assert list(json.loads(path.read_text())[0]) == [
        *("metric", "value", "unit", "better", "target", "baseline"),
        *("gpu", "commit", "versions", "date"),
    ]


def test_read_rows_names_the_file_of_a_bad_row(tmp_path):
    (tmp_path / "bad.json").write_text('[{"metric": "x"}]')
    with pytest.raises(ValueError, match=r"bad\.json"):
        _results.read_rows(tmp_path / "bad.json")


def test_freshness_looks_at_the_code_paths_alone(repo):
    first, second = git(repo, "rev-parse", "HEAD~1"), git(repo, "rev-parse", "HEAD")
    assert report.freshness(first, CODE, repo) == ""  # only docs changed since
    (repo / "adp_kv/kernels/gather.py").write_text("a = 2\n")
    git(repo, "commit", "-qam", "third")
    assert report.freshness(first, CODE, repo) == report.STALE
    assert report.freshness(second, CODE, repo) == report.STALE
    assert report.freshness(git(repo, "rev-parse", "HEAD"), CODE, repo) == ""
    assert report.freshness(second + "-dirty", CODE, repo) == report.UNCOMMITTED
    assert report.freshness("f" * 40, CODE, repo) == report.UNVERIFIED
    assert report.freshness("unknown", CODE, repo) == report.UNVERIFIED


def test_code_paths_need_no_import(tmp_path):
    benchmark = tmp_path / "b.py"
    benchmark.write_text('import no_such_module\nCODE = ("a", "b")\n')
    assert report.code_paths(benchmark) == ("a", "b")
    benchmark.write_text("OTHER = 1\n")
    with pytest.raises(ValueError, match="CODE"):
        report.code_paths(benchmark)


def test_documents_are_filled_checked_and_stable(repo, capsys):
    head = git(repo, "rev-parse", "HEAD")
    rows = [row(commit=head), row(commit=head, metric="a | b", value=1.0)]
    text = json.dumps([dataclasses.asdict(one) for one in rows])
    (repo / "benchmarks/results/scatter.json").write_text(text)

    assert report.main(["--check"], repo) == 1
    assert "old" in (repo / "README.md").read_text()
    assert report.main([], repo) == 0
    filled = (repo / "README.md").read_text()
    assert filled.startswith("A\n<!-- results:scatter -->\n| what |")
    assert filled.endswith("<!-- /results:scatter -->\nB\n")
    assert "| restore | 48 | GB/s | ≥ 46 | 24 | 2.00x |  |" in filled
    assert f"| a \\| b | 1 | GB/s | ≥ 46 | 24 | 0.04x | {report.MISSED} |" in filled
    assert "old" not in filled
    assert filled.count("Measured on GPU 9000") == 1
    assert "Not measured yet." in (repo / "docs/other.md").read_text()

    assert report.main([], repo) == 0
    assert report.main(["--check"], repo) == 0
    assert (repo / "README.md").read_text() == filled
    capsys.readouterr()


def test_every_benchmark_declares_existing_code():
    for path in sorted((_results.REPO / "benchmarks").glob("*.py")):
        if path.name.startswith("_") or path.name == "report.py":
            continue
        for code in report.code_paths(path):
            assert (_results.REPO / code).exists(), f"{path.name}: CODE names {code}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_line_plot_writes_a_file(tmp_path):
    path = _plots.line_plot(
        tmp_path / "plots" / "p.png",
        {"kernel": [(1, 2.0), (2, 3.0)], "copy engine": [(1, 1.0), (2, 4.0)]},
        title="t",
        x_label="x",
        y_label="y",
        log_x=True,
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_speeds_are_drawn_by_kind(tmp_path):
    def speed(metric, value):
        return row(metric=metric, value=value, unit="GB/s")

    rows = [speed("scatter.link", 55.0)]
    rows += [speed(f"scatter.random.{kib}KiB.planner", 40.0 + kib) for kib in (8, 2)]
    rows += [speed("scatter.strided.4KiB-of-32KiB.direct", 50.0)]
    rows += [row(metric="scatter.random.8KiB.share", value=0.9, unit="of the link")]
    drawn = _plots.speed_plots("scatter", rows, tmp_path)
    assert [path.name for path in drawn] == ["scatter.random.png", "scatter.strided.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert _plots.speed_plots("other", rows[-1:], tmp_path) == []


def test_bar_plots_are_drawn_for_each_part(tmp_path):
    rows = [
        row(metric="restore.link", value=55.0),
        row(metric="restore.60k.at_link", value=143.0, unit="ms"),
        row(metric="restore.60k.recomputed", value=2904.0, unit="ms"),
        row(metric="restore.60k.memory.first_token", value=150.0, unit="ms"),
        row(metric="restore.60k.memory.first_token.max", value=170.0, unit="ms"),
        row(metric="restore.196k.memory.first_token", value=270.0, unit="ms"),
    ]
    drawn = _plots.bar_plots("restore", rows, tmp_path)
    assert [path.name for path in drawn] == ["restore.60k.png", "restore.196k.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)
    assert _plots.bar_plots("scatter", rows, tmp_path) == []

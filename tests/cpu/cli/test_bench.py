"""`adp-kv bench`: it measures what it says, leaves nothing behind, and says what is missing."""

import json

import pytest

from adp_kv import __version__
from adp_kv.cli import bench, main
from adp_kv.errors import AdpError, ConfigError
from gateway.bench import LANES, VALUES_A_BATCH, CardBench
from tests.support.cards import memory_card

SLAB = ["--card=slab", "--card-option=capacity_bytes=64MiB", "--card-option=num_databases=2"]


def test_card_is_measured_in_a_gateway_s_process(tmp_path, capsys):
    card = [*SLAB, f"--card-option=path={tmp_path}"]
    assert main.main(["bench", "card", "--seconds", "0.2", "--json", *card]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["card"] == "slab"
    assert told["num_databases"] == 2
    assert told["write"]["gb_s"] > 0
    assert told["read"]["gb_s"] > 0
    assert told["read"]["failed_values"] == 0


def test_full_card_ends_writing_and_everything_is_deleted(monkeypatch):
    card = memory_card(capacity_bytes=64 << 20, max_value_bytes=64 << 10)
    left = []
    close = card.close
    monkeypatch.setattr(card, "close", lambda: (left.append(card.stats()["values"]), close()))
    told = CardBench(card, 4096, 20.0).run()
    # No more than was under way when the first one was refused.
    assert 0 < told["write"]["failed_values"] <= LANES * VALUES_A_BATCH
    assert told["read"]["failed_values"] == 0
    assert told["read"]["gb_s"] > 0
    assert left == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card=slab"], "capacity_bytes is missing|path is missing"),
        (["--card=none"], "card kind 'none': unknown"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_card_that_can_not_be_opened_is_named(arguments, message):
    with pytest.raises(AdpError, match=message):
        bench.bench_card(arguments, 0.1)


def test_scatter_moves_pages_here_too():
    told = bench.bench_scatter(4096, 4)
    assert told["pages"] == 64 * 1024 * 1024 // 4096
    assert told["restore_gb_s"] > 0
    assert told["save_gb_s"] > 0
    with pytest.raises(ConfigError, match="a multiple of 8"):
        bench.bench_scatter(12, 4)
    with pytest.raises(ConfigError, match="--page-bytes"):
        bench.bench_scatter(0, 4)


def test_link_says_what_it_measured(monkeypatch):
    monkeypatch.setattr(bench, "LINK_BYTES", 1 << 20)
    told = bench.bench_link()
    assert told["bytes"] == 1 << 20
    assert told["host_to_device_gb_s"] > 0


def test_missing_torch_is_said(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert main.main(["bench", "link"]) == 2
    assert "run this where vLLM is" in capsys.readouterr().err


def test_unknown_argument_is_refused(capsys):
    assert main.main(["bench", "scatter", "--card=slab"]) == 2
    assert "unknown argument --card=slab" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["doctor", "--nonsense"])


def test_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        main.main(["--version"])
    assert capsys.readouterr().out == f"adp-kv {__version__}\n"

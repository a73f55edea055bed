"""`adp-kv inspect` finds what an engine's scheduler side would: same keys, same answers."""

import json
import logging
import re

import numpy as np
import pytest

from adp_kv.cli import main
from adp_kv.cli.inspect import read_tokens
from adp_kv.errors import ConfigError
from adp_kv.sdk.stats import ask_stats, ask_stored
from tests.support import tiny_models
from tests.support.serving import Serving, random_chunks, sharded, store

LOGGED = re.compile(r"for adp-kv inspect: (.*)")


def test_stranger_may_ask_what_is_stored():
    with Serving() as serving:
        ranks = serving.join(sharded(1, 1))
        chunks = random_chunks(4)
        store(ranks, chunks[:3])
        assert ask_stored(serving.address, chunks, 5.0).tolist() == [True, True, True, False]
        assert ask_stats(serving.address, 5.0)["chunks_committed"] == 3


def test_stranger_s_empty_question_is_refused():
    from adp_kv.errors import GatewayError

    with Serving() as serving:
        with pytest.raises(GatewayError, match="no gateway answers"):
            ask_stored(serving.address, np.zeros((0, 2), dtype=np.uint64), 0.3)
        assert ask_stats(serving.address, 5.0)["bad_messages"] == 1


def test_tokens_come_from_text_or_file(tmp_path):
    assert read_tokens("1, 2,3") == [1, 2, 3]
    (tmp_path / "t").write_text("4 5\n6")
    assert read_tokens(f"@{tmp_path}/t") == [4, 5, 6]
    for wrong in ("1,x", f"@{tmp_path}/none"):
        with pytest.raises(ConfigError, match="--tokens"):
            read_tokens(wrong)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_keys_are_those_of_the_engine_that_logged_them(tmp_path, capsys, salt):
    from tests.support.key_rig import PROMPT, Setup, chunk_keys

    (tmp_path / "config.json").write_text(json.dumps(tiny_models.load("llama").config))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("adp_kv")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("INFO")
    try:
        settings = {"chunk_size": 64}
        request = {"cache_salt": salt} if salt else {}
        chunks = chunk_keys(Setup(str(tmp_path), settings=settings, request=request))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (logged,) = [match[1].split() for line in lines if (match := LOGGED.search(line))]
    capsys.readouterr()  # vLLM's own words
    with Serving() as serving:
        ranks = serving.join(sharded(1, 1))
        store(ranks, chunks[:2])
        asked = ["inspect", "--json", "--gateway", serving.address, *logged]
        asked += ["--tokens", ",".join(map(str, PROMPT))] + (["--salt", salt] if salt else [])
        assert main.main(asked) == 0
        told = json.loads(capsys.readouterr().out)
        assert main.main([*asked, "--salt", "another"]) == 0
        other = json.loads(capsys.readouterr().out)
        assert main.main([a for a in asked if a != "--json"]) == 0
        assert "hit tokens  128" in capsys.readouterr().out
    assert [row["key"] for row in told["by_chunk"]] == [key.tobytes().hex() for key in chunks]
    assert (told["stored"], told["hit_tokens"]) == (2, 128)
    assert other["stored"] == 0


def status_of(arguments):
    try:
        return main.main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--namespace", "12"], "16 bytes in hex"),
        (["--namespace", "zz"], "not hex"),
        (["--chunk-tokens", "33"], "must be a multiple"),
        (["--tokens", "1,2"], "less than a chunk"),
        pytest.param(["--algorithm", "md5"], "--algorithm md5: ", marks=pytest.mark.vllm),
        (["--hash-tokens", "0"], "argument --hash-tokens: '0': expected a whole number"),
        (["--chunk-tokens", "0"], "argument --chunk-tokens: '0': expected a whole number"),
        (["--timeout", "-1"], "argument --timeout: '-1': expected seconds, more than 0"),
        (["--timeout", "nan"], "argument --timeout: 'nan': expected seconds"),
        (["--gateway", "here"], "argument --gateway: address = 'here': expected tcp://HOST:PORT"),
        (["--gateway", "tcp://here:65536"], "expected tcp://HOST:PORT"),
    ],
)
def test_wrong_argument_is_named(changed, message, capsys):
    usual = {
        "--namespace": "00" * 16,
        "--root": "00",
        "--algorithm": "sha256",
        "--hash-tokens": "32",
        "--chunk-tokens": "64",
        "--tokens": ",".join(["1"] * 64),
    }
    pairs = (usual | {changed[0]: changed[1]}).items()
    assert status_of(["inspect", *(f"{name}={value}" for name, value in pairs)]) == 2
    assert message in capsys.readouterr().err

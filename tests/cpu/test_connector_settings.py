"""kv_connector_extra_config: defaults, and which setting is at fault."""

import os
from pathlib import Path

import pytest

from adp_kv.config import HELP, ConnectorSettings, cache_folder, connector_settings, hash_seed
from adp_kv.errors import ConfigError


def test_empty_config_is_the_defaults():
    assert connector_settings({}) == ConnectorSettings()
    assert set(HELP) == set(ConnectorSettings.__struct_fields__)


def test_given_settings_are_taken():
    found = connector_settings(
        {"gateway": "ipc:///run/s", "chunk_size": 512, "save": False, "load_timeout_s": 3}
        | {"nvlink_fanout": True}
    )
    assert found.nvlink_fanout
    assert (found.gateway, found.chunk_size, found.save) == ("ipc:///run/s", 512, False)
    assert found.load_timeout_s == 3


@pytest.mark.parametrize(
    "gateway", ["tcp://127.0.0.1:555{dp_rank}", "ipc:///run/{dp_rank}.sock", "ipc:///" + 106 * "a"]
)
def test_address_may_name_a_data_parallel_rank_and_any_path(gateway):
    assert connector_settings({"gateway": gateway}).gateway == gateway


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gateway", "127.0.0.1:5557"),
        ("gateway", "tcp://host"),
        ("gateway", "tcp://127.0.0.1:65536"),
        ("gateway", "tcp://127.0.0.1:{rank}"),
        ("gateway", "ipc:///" + 107 * "a"),
        ("gateway", 5557),
        ("chunk_size", -1),
        ("chunk_size", "256"),
        ("key_namespace", 7),
        ("save", "yes"),
        ("load_mode", "sometimes"),
        ("nvlink_fanout", "yes"),
        ("fanout_staging_bytes", 1 << 20),
        ("lookup_timeout_s", 0),
        ("load_timeout_s", -1.0),
        ("save_timeout_s", float("nan")),
        ("gateway_timeout_s", "5s"),
        ("connect_timeout_s", None),
        ("max_pending_save_bytes", 0),
        ("staging_bytes", 0),
        ("staging_bytes", 1.5),
    ],
)
def test_wrong_value_names_the_setting(name, value):
    with pytest.raises(ConfigError, match=name):
        connector_settings({name: value})


def test_unknown_setting_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"'chunksize'.*chunk_size"):
        connector_settings({"chunksize": 256})


def test_hash_seed_is_the_environment_s(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_seed() == "7"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert hash_seed() is None


def test_measurements_are_kept_where_a_user_has_no_home(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder().name == f"adp_kv-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "adp_kv"

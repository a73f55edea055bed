"""The gateway's settings: where they come from, and which one is at fault."""

import os

import msgspec
import pytest

from adp_kv import __version__
from adp_kv.errors import ConfigError
from adp_kv.units import GiB
from gateway.config import ENV_PREFIX, HELP, Settings, export, load, parse_size


def toml(tmp_path, text):
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return f"--config={path}"


def test_flag_beats_environment_beats_file(tmp_path):
    config = toml(tmp_path, "lease_s = 1\nliveness_s = 2\nheartbeat_s = 3\n")
    env = {"ADP_GATEWAY_LEASE_S": "10", "ADP_GATEWAY_LIVENESS_S": "20", "OTHER": "x"}
    found = load([config, "--lease-s=100"], env)
    assert (found.lease_s, found.liveness_s, found.heartbeat_s) == (100, 20, 3)
    assert found.job_deadline_s == Settings().job_deadline_s
    assert load([], {}) == Settings()


def test_card_options_of_all_sources_add_up(tmp_path):
    config = toml(tmp_path, '[card_options]\npath = "/a"\nx = 1\n')
    found = load([config, "--card-option", "y=2", "--card-option", "path=/b"], {})
    assert found.card_options == {"path": "/b", "x": 1, "y": 2}
    env = {"ADP_GATEWAY_CARD_OPTIONS": "path=/c;z=10MiB"}
    assert load(["--card-option=z=1"], env).card_options == {"path": "/c", "z": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1.5", 1.5),
        ("a=true", True),
        ("a=False", False),
        ("a=2KiB", 2048),
        ("a=/x/y", "/x/y"),
        ("a=/x,/y", ["/x", "/y"]),
        ("a=b=c", "b=c"),
        ("a-b=1", 1),
    ],
)
def test_card_option_values_are_what_they_look_like(text, value):
    options = load(["--card-option", text], {}).card_options
    assert list(options.values()) == [value]
    assert set(options) <= {"a", "a_b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6GiB", 6 << 30),
        ("256 KiB", 256 << 10),
        ("10GB", 10**10),
        ("1.5MiB", 3 << 19),
        (" 7 b ", 7),
        ("131072", 131072),
        (5, 5),
        ("1tib", 1 << 40),
    ],
)
def test_sizes_have_units(text, value):
    assert parse_size(text, "io_size") == value


@pytest.mark.parametrize("wrong", ["", "six", "6XiB", "-1", "1e3", "KiB", None, 1.5, True, [1]])
def test_wrong_size_names_the_setting(wrong):
    with pytest.raises(ConfigError, match="io_size"):
        parse_size(wrong, "io_size")


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--lease-s=soon", "lease_s"),
        ("--lease-s=0", "lease_s"),
        ("--liveness-s=-1", "liveness_s"),
        ("--heartbeat-s=nan", "heartbeat_s"),
        ("--rank-deadline-s=nan", "rank_deadline_s"),
        ("--batch-bytes=0", "batch_bytes"),
        ("--io-size=-5", "io_size"),
        ("--shared-memory-size=4096", "shared_memory_size"),
        ("--shared-memory-size=lots", "shared_memory_size"),
        ("--listen=localhost:5557", "listen"),
        ("--listen=tcp://x", "listen"),
        ("--listen=ipc://relative", "listen"),
        ("--ring-name=a/b", "ring_name"),
        ("--placement=moon", "placement"),
        ("--log-level=LOUD", "log_level"),
        ("--card-option=novalue", "novalue"),
        ("--card-option==1", "=1"),
    ],
)
def test_wrong_value_names_the_setting(flag, named):
    with pytest.raises(ConfigError, match=named):
        load([flag], {})


def test_wrong_setting_says_where_it_was_set(tmp_path):
    config = toml(tmp_path, "lease_s = -1\n")
    with pytest.raises(ConfigError, match=r"gateway\.toml.*lease_s"):
        load([config], {})
    with pytest.raises(ConfigError, match=r"environment.*lease_s"):
        load([], {"ADP_GATEWAY_LEASE_S": "-1"})
    with pytest.raises(ConfigError, match=r"command line.*lease_s"):
        load(["--lease-s=-1"], {})


def test_unknown_setting_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'leese_s'.*lease_s"):
        load([toml(tmp_path, "leese_s = 1\n")], {})
    with pytest.raises(ConfigError, match="'leese_s'"):
        load([], {f"{ENV_PREFIX}LEESE_S": "1"})
    with pytest.raises(SystemExit) as exit_info:
        load(["--leese-s=1"], {})
    assert exit_info.value.code == 2


def test_wrong_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load([f"--config={tmp_path}/nothing.toml"], {})
    with pytest.raises(ConfigError, match=r"gateway\.toml"):
        load([toml(tmp_path, "lease_s = = 1")], {})
    with pytest.raises(ConfigError, match="lease_s"):
        load([toml(tmp_path, "lease_s = [1]")], {})
    with pytest.raises(ConfigError, match="io_size"):
        load([toml(tmp_path, "io_size = 1.5")], {})


def test_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        load(["--version"], {})
    assert capsys.readouterr().out == f"adp-gateway {__version__}\n"


def test_help_mentions_every_setting(capsys):
    with pytest.raises(SystemExit) as exit_info:
        load(["--help"], {})
    assert exit_info.value.code == 0
    shown = "".join(capsys.readouterr().out.split())
    for name in Settings.__struct_fields__:
        flag = "card-option" if name == "card_options" else name.replace("_", "-")
        assert f"--{flag}" in shown
        assert "".join(HELP[name].split()) in shown
    assert set(HELP) == set(Settings.__struct_fields__)


def test_ring_name_follows_the_address():
    names = [
        Settings(listen=listen).effective_ring_name
        for listen in ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "ipc:///run/adp/s")
    ]
    assert names == ["127-0-0-1-5557", "127-0-0-1-5558", "run-adp-s"]
    assert Settings(ring_name="mine").effective_ring_name == "mine"


def test_fragment_size_follows_the_placement():
    for card in ("nvme_kv", "resp"):
        assert Settings(card=card).effective_fragment_size == 261120
        assert Settings(card=card, placement="remote").effective_fragment_size == 131072
    assert Settings(placement="remote", fragment_size=7).effective_fragment_size == 7
    for card in ("slab", "memory", "mooncake"):
        assert Settings(card=card).effective_fragment_size == 1 << 31  # as much as it takes
    assert Settings(card="memory", fragment_size=7).effective_fragment_size == 7


def test_settings_can_not_change():
    with pytest.raises(AttributeError):
        Settings().lease_s = 1
    assert isinstance(Settings(), msgspec.Struct)


def test_variables_of_a_kubernetes_service_are_no_settings():
    """A Service called adp-gateway puts these into every container of its namespace."""
    injected = {
        "ADP_GATEWAY_SERVICE_HOST": "gateway.invalid",
        "ADP_GATEWAY_SERVICE_PORT": "5557",
        "ADP_GATEWAY_SERVICE_PORT_ZMQ": "5557",
        "ADP_GATEWAY_PORT": "tcp://gateway.invalid:5557",
        "ADP_GATEWAY_PORT_5557_TCP_ADDR": "gateway.invalid",
    }
    assert load([], injected) == Settings()
    with pytest.raises(ConfigError, match="service"):
        load([], {"ADP_GATEWAY_SERVICE": "x"})


def test_sizes_of_a_card_in_a_file_may_have_units(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(
        '[card_options]\npath = "/x"\ncapacity_bytes = "2GiB"\nname = "7"\nother = "5 apples"\n'
    )
    options = load(["--config", str(file)], {}).card_options
    expected = {"path": "/x", "capacity_bytes": 2 * GiB, "name": "7", "other": "5 apples"}
    assert options == expected


def test_exported_variables_leave_what_was_set(monkeypatch):
    for name in ("KEPT", "DEFAULT", "ALWAYS"):
        monkeypatch.setenv(f"ADP_TEST_{name}", "mine")
    monkeypatch.delenv("ADP_TEST_DEFAULT")
    export({"ADP_TEST_ALWAYS": "a"}, unless_set={"ADP_TEST_KEPT": "b", "ADP_TEST_DEFAULT": "c"})
    found = [os.environ[f"ADP_TEST_{name}"] for name in ("KEPT", "DEFAULT", "ALWAYS")]
    assert found == ["mine", "c", "a"]

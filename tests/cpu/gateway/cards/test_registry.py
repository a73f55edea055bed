import subprocess
import sys

import pytest

from adp_kv.errors import ConfigError
from gateway.cards.base import Status
from gateway.cards.registry import card_kinds, create_card
from tests.support.cards import nvme_host, random_keys


@pytest.fixture
def settings(tmp_path, valkey, mooncake_store, monkeypatch):
    """Settings of each kind, as a command line gives them."""
    monkeypatch.setattr("gateway.cards.nvme.card.KernelHost", nvme_host)
    return {
        "memory": {"capacity_bytes": 1 << 20},
        "slab": {"capacity_bytes": 1 << 20, "path": str(tmp_path / "c")},
        "nvme_kv": {"devices": "/dev/ng0n1"},
        "resp": {"endpoints": valkey.unix},
        "mooncake": {"masters": mooncake_store.address},
    }


@pytest.mark.parametrize("kind", card_kinds())
def test_card_made_by_kind_works(kind, settings, drive):
    assert set(settings) == set(card_kinds())
    driver = drive(create_card(kind, settings[kind]))
    keys = random_keys(2)
    assert driver.write(keys, [100] * 2) == [Status.OK] * 2
    driver.check(keys, [100] * 2)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        pytest.param(
            "disk", {}, "'disk': unknown; one of memory, slab, nvme_kv, resp, mooncake", id="kind"
        ),
        pytest.param("memory", {}, "memory card.*--card-option capacity_bytes=", id="missing"),
        pytest.param("memory", {"capacity_bytes": 1 << 20, "sped": 1}, "sped", id="unknown"),
        pytest.param("memory", {"capacity_bytes": "1 GB"}, r"capacity_bytes", id="type"),
        pytest.param(
            "slab", {"path": "x", "capacity_bytes": 1 << 20, "io_engine": "aio"}, "aio", id="value"
        ),
        pytest.param(
            "slab",
            {"path": "x", "capacity_bytes": 1 << 20, "slot_bytes": 7},
            "slot_bytes",
            id="range",
        ),
        pytest.param("nvme_kv", {}, "nvme_kv card.*devices", id="nvme-missing"),
        pytest.param(
            "nvme_kv", {"devices": "/dev/ng0n1", "dialect": "other"}, "dialect", id="nvme-value"
        ),
        pytest.param("resp", {"endpoints": "h:1"}, "resp card: endpoints", id="resp-endpoint"),
        pytest.param("resp", {"endpoints": "tcp://h:1", "password": 1}, "password", id="resp-type"),
        pytest.param("mooncake", {"masters": "h"}, "mooncake card: masters", id="mooncake-master"),
    ],
)
def test_wrong_settings_are_named(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        create_card(kind, settings)


def test_registry_alone_imports_no_card():
    code = (
        "import sys, gateway.cards.registry as r; r.card_kinds();"
        "kinds = ('slab', 'nvme', 'resp', 'mooncake', 'memory');"
        "names = [m for k in kinds for m in sys.modules if m.startswith('gateway.cards.' + k)];"
        "sys.exit(bool(names) or 'xxhash' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

import subprocess
import sys

import pytest

from adp_kv.errors import ConfigError
from gateway.cards.base import Status
from gateway.cards.registry import card_kinds, create_card
from tests.support.cards import random_keys


@pytest.mark.parametrize("kind", ["memory", "slab"])
def test_card_made_by_kind_works(kind, tmp_path, drive):
    path = {"path": str(tmp_path / "c")} if kind == "slab" else {}
    driver = drive(create_card(kind, {"capacity_bytes": 1 << 20} | path))
    keys = random_keys(2)
    assert driver.write(keys, [100] * 2) == [Status.OK] * 2
    driver.check(keys, [100] * 2)


def test_every_kind_has_a_test():
    assert card_kinds() == ("memory", "slab")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        pytest.param("disk", {}, "'disk': unknown; one of memory, slab", id="kind"),
        pytest.param("memory", {}, "memory card.*capacity_bytes", id="missing"),
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
    ],
)
def test_wrong_settings_are_named(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        create_card(kind, settings)


def test_registry_alone_imports_no_card():
    code = (
        "import sys, gateway.cards.registry as r; r.card_kinds();"
        "sys.exit('gateway.cards.slab' in sys.modules or 'xxhash' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""README's tables of settings hold every setting with its default, and no other."""

import re
from pathlib import Path

import msgspec
import pytest

from adp_kv.config import HELP as CONNECTOR_HELP
from adp_kv.config import ConnectorSettings
from adp_kv.units import KiB, MiB, format_bytes
from gateway.config import HELP as GATEWAY_HELP
from gateway.config import Settings

README = Path(__file__).parents[2] / "README.md"


def rows_below(heading: str) -> dict[str, str]:
    section = README.read_text().split(f"### {heading}", 1)[1].split("\n#", 1)[0]
    cells = re.findall(r"^\| (\w+) \| (.*?) \|", section, re.MULTILINE)
    return {name: default for name, default in cells if name != "setting"}


def shown(default: object) -> set[str]:
    if isinstance(default, bool):
        return {str(default).lower()}
    if isinstance(default, int) and default >= KiB:
        return {str(default), format_bytes(default).replace(".0 ", " ")}
    if isinstance(default, int | float):
        return {f"{default:g}"}
    return {str(default), f"`{default}`", f'"{default}"'}


@pytest.mark.parametrize(
    ("heading", "struct", "names"),
    [
        ("Connector settings", ConnectorSettings, set(CONNECTOR_HELP)),
        ("Gateway settings", Settings, set(GATEWAY_HELP)),
    ],
    ids=["connector", "gateway"],
)
def test_readme_has_every_setting(heading, struct, names):
    rows = rows_below(heading)
    renamed = {"card_option": "card_options"}
    assert {renamed.get(name, name) for name in rows} == names
    for field in msgspec.structs.fields(struct):
        if field.default is msgspec.NODEFAULT or field.name == "ring_name":
            continue
        row = rows[field.name]
        if row:
            assert row in shown(field.default), f"{field.name}: README says {row}"


def test_sizes_are_shown_in_binary_units():
    assert "16 MiB" in shown(16 * MiB)

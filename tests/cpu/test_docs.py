"""The documents are whole: tables from the code are fresh, links and test names lead somewhere."""

import re

import pytest
import yaml

from scripts import generate_docs
from tests.support.process import REPO

DOCS = REPO / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ids = [str(page.relative_to(DOCS)) for page in PAGES]


def defined_tests():
    found = set()
    for path in (REPO / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    return found


def test_generated_tables_are_fresh(capsys):
    assert generate_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_shown_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    shown = re.findall(r"<!-- generated:([\w-]+) -->", text)
    assert sorted(shown) == sorted(generate_docs.blocks())


def test_stale_table_is_found(monkeypatch, capsys, tmp_path):
    (tmp_path / "a.md").write_text(
        "<!-- generated:gateway-settings -->\n<!-- /generated:gateway-settings -->"
    )
    monkeypatch.setattr(generate_docs, "DOCS", tmp_path)
    assert generate_docs.main(["--check"]) == 1
    assert "stale: a.md" in capsys.readouterr().err
    assert generate_docs.main([]) == 0
    assert "`shared_memory_size`" in (tmp_path / "a.md").read_text()
    assert generate_docs.main(["--check"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" in target or target.startswith("#"):
            continue
        path = (page.parent / target.partition("#")[0]).resolve()
        assert path.exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_tests_that_a_page_names_exist(page):
    text = page.read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= defined_tests(), f"{page.name} names {sorted(named - defined_tests())}"
    for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (REPO / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("section", ["gateway", "Ranks", "card", "Ring"])
def test_every_failure_names_its_test(section):
    text = (DOCS / "failures.md").read_text()
    (part,) = [p for p in text.split("\n## ") if p.split("\n")[0].find(section) >= 0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 5
    for row in rows:
        assert re.search(r"`test_\w+`", row.split("|")[4]), row


def test_navigation_has_every_page_once():
    text = (REPO / "mkdocs.yml").read_text()
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    assert yaml.safe_load(text)["strict"] is True

import os

import pytest

from gateway.cards import direct_io
from gateway.cards.direct_io import alignment_of, open_direct


def test_alignment_works_for_direct_io(tmp_path):
    assert alignment_of(tmp_path / "not" / "there") in (512, 4096)
    assert list(tmp_path.iterdir()) == []


def test_alignment_asked_and_tried_agree(tmp_path):
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, 8192)
    try:
        asked = direct_io._asked(descriptor)
        assert direct_io._tried(descriptor) <= (asked or 4096)
    finally:
        os.close(descriptor)


def test_alignment_unknown_is_a_page(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(direct_io.os, "open", refuse)
    assert alignment_of(tmp_path) == 4096


def test_open_of_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_direct(tmp_path / "no", os.O_RDWR)

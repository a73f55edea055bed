"""adp-gateway card verify|stats|format."""

import json
import os
import stat

import pytest

from gateway.__main__ import main
from gateway.cards import slab_format
from gateway.cards.slab_format import DATA_OFFSET
from tests.support.cards import Arena, Driver, slab_card
from tests.support.chunks import Chunks

SLOT_BYTES = 4096
NUM_SLOTS = 60


@pytest.fixture
def path(tmp_path):
    return tmp_path / "card"


def options(path, **changes):
    settings = {
        "path": path,
        "capacity_bytes": NUM_SLOTS * SLOT_BYTES,
        "slot_bytes": SLOT_BYTES,
        "num_databases": 2,
        "lock_wait_s": 0.1,
    }
    return [f"--card-option={name}={value}" for name, value in (settings | changes).items()]


@pytest.fixture
def run(path, capsys):
    """Return a function that runs the command: exit status, what it said, its errors."""

    def ran(verb, *flags, **changes):
        code = main(["card", verb, *flags, *options(path, **changes)])
        out, err = capsys.readouterr()
        return code, out, err

    return ran


def open_card(path, **changes):
    settings = {"capacity_bytes": NUM_SLOTS * SLOT_BYTES, "slot_bytes": SLOT_BYTES}
    return Driver(slab_card(path, **(settings | {"num_databases": 2} | changes)), Arena(1 << 20))


def filled(path, num_chunks=10, **changes):
    driver = open_card(path, **changes)
    chunks = Chunks(driver)
    for number in range(num_chunks):
        assert chunks.store(number)
    driver.close()


def test_whole_card_verifies(path, run):
    filled(path)
    code, out, _ = run("verify", "--json")
    assert code == 0
    assert json.loads(out) == {
        "values": 30,
        "bytes": 30 * 500,
        "corrupt": 0,
        "failed": 0,
        "chunks": 10,
    }


def test_damaged_value_is_told_and_goes(path, run):
    filled(path)
    with (path / "slab-0001.data").open("r+b") as file:
        file.seek(DATA_OFFSET + 3 * SLOT_BYTES + 10)
        file.write(b"\x00\xff\x00")
    code, out, _ = run("verify")
    assert code == 1
    assert "corrupt 1\n" in out
    assert run("verify")[0] == 0
    driver = open_card(path)
    chunks = Chunks(driver)
    assert chunks.lookup(range(10)).count(False) == 1
    driver.close()


def test_stats_tell_what_is_there(path, run):
    filled(path)
    code, out, _ = run("stats", "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["groups"], told["values"], told["free_slots"]) == (10, 40, NUM_SLOTS - 30)


def test_looking_evicts_nothing(path, run):
    filled(path, 16, evict_above=1.0)
    told = json.loads(run("stats", "--json", evict_above=0.5, evict_to=0.1)[1])
    assert told["groups"] == 16
    assert json.loads(run("verify", "--json", evict_above=0.5, evict_to=0.1)[1])["chunks"] == 16


def test_card_in_use_is_refused(path, run):
    driver = open_card(path)
    for verb in ("verify", "stats", "format"):
        code, _, err = run(verb, "--force")
        assert code == 2
        assert "another process has this card open" in err
    driver.close()


def test_format_makes_an_empty_card(path, run):
    code, out, _ = run("format")
    assert code == 0
    assert f"free_slots {NUM_SLOTS}\n" in out


def test_format_of_a_card_needs_force(path, run):
    filled(path)
    code, _, err = run("format")
    assert code == 2
    assert "--force" in err
    assert json.loads(run("stats", "--json")[1])["groups"] == 10
    code, out, _ = run("format", "--force", "--json", slot_bytes=8192, num_databases=1)
    assert code == 0
    assert json.loads(out)["values"] == 0
    assert sorted(f.name for f in path.iterdir()) == [
        "card.json",
        "lock",
        "slab-0000.data",
        "slab-0000.journal",
    ]


@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_directory_of_somebody_else_is_never_formatted(path, run, flags):
    path.mkdir()
    (path / "thesis.tex").write_text("precious")
    code, _, err = run("format", *flags)
    assert code == 2
    assert "thesis.tex" in err
    assert [f.name for f in path.iterdir()] == ["thesis.tex"]


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A file of zeros that passes for a block device; set `busy` to have it in use."""
    monkeypatch.setattr("gateway.cards.slab_store.stat.S_ISBLK", lambda mode: True)
    file = tmp_path / "device"
    file.write_bytes(bytes(3 * DATA_OFFSET + NUM_SLOTS * SLOT_BYTES))
    return file


def format_device(run, device, *flags):
    return run("format", *flags, devices=device, num_databases=1)


LABELS = [
    pytest.param(1080, b"\x53\xef", "ext4", id="ext4"),
    pytest.param(0, b"XFSB", "XFS", id="xfs"),
    pytest.param(65600, b"_BHRfS_M", "Btrfs", id="btrfs"),
    pytest.param(512, b"EFI PART", "GPT", id="gpt"),
    pytest.param(0, b"LUKS\xba\xbe", "LUKS", id="luks"),
    pytest.param(700_000, b"words", "data that is not a slab", id="data"),
    pytest.param(-512, b"EFI PART", "at its end", id="end"),
]


@pytest.mark.parametrize(("offset", "label", "name"), LABELS)
def test_device_with_content_needs_force(run, device, offset, label, name):
    content = bytearray(device.read_bytes())
    offset %= len(content)
    content[offset : offset + len(label)] = label
    device.write_bytes(content)
    code, _, err = format_device(run, device)
    assert code == 2
    assert name in err
    assert "--force" in err
    assert device.read_bytes() == content
    assert format_device(run, device, "--force")[0] == 0
    assert slab_format.is_slab(device)
    assert run("verify", devices=device, num_databases=1)[0] == 0


def test_empty_device_is_formatted(run, device):
    assert format_device(run, device)[0] == 0
    code, _, err = format_device(run, device)
    assert code == 2
    assert "--force" in err


def test_mounted_device_is_never_formatted(run, device, monkeypatch):
    real = os.open

    def busy(path, flags, *args, **kwargs):
        if flags & os.O_EXCL and not flags & os.O_CREAT:
            raise OSError(16, "Device or resource busy")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", busy)
    content = device.read_bytes()
    code, _, err = format_device(run, device, "--force")
    assert code == 2
    assert "mounted" in err
    assert device.read_bytes() == content


def test_file_is_no_device(run, tmp_path):
    file = tmp_path / "notes"
    file.write_text("precious")
    assert not stat.S_ISBLK(file.stat().st_mode)
    code, _, err = format_device(run, file, "--force")
    assert code == 2
    assert "no block device" in err
    assert file.read_text() == "precious"


@pytest.mark.parametrize("verb", ["verify", "format"])
def test_kind_that_can_not_says_what_can(verb, capsys, valkey_address):
    code = main(["card", verb, "--card=resp", f"--card-option=endpoints={valkey_address}"])
    assert code == 2
    assert capsys.readouterr().err.startswith(f"adp-gateway card {verb}: this kind of card")


@pytest.fixture
def valkey_address():
    from tests.support.valkey import ValkeyServer

    with ValkeyServer() as server:
        yield server.unix


def test_missing_option_is_named(capsys):
    assert main(["card", "stats", "--card=slab"]) == 2
    assert "path is missing" in capsys.readouterr().err

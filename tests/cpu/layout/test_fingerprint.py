"""Digests: everything that changes bytes changes them, and nothing else."""

import json
import os

import numpy as np
import pytest

from adp_kv.layout import fingerprint
from adp_kv.layout.fingerprint import Fingerprints, digest, weights_fingerprint

FACTS = {"model": "m", "block": 16, "share": 0.5, "mla": True, "root": b"\x00", "none": None}


def test_digest_ignores_order_alone():
    assert digest(FACTS) == digest(dict(reversed(FACTS.items())))
    assert len(digest(FACTS)) == 16
    assert digest({"a": [1, 2]}) == digest({"a": (1, 2)})
    assert digest({}).hex() == "a4c348b8ef46724a5505ef1624e0eedd"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "M"),
        ("model", b"m"),
        ("model", ["m"]),
        ("block", 17),
        ("block", "16"),
        ("block", 16.0),
        ("share", 0.25),
        ("mla", False),
        ("mla", 1),
        ("root", b""),
        ("root", "\x00"),
        ("none", 0),
        ("none", ""),
        ("more", None),
    ],
)
def test_every_fact_changes_the_digest(name, value):
    assert digest(FACTS | {name: value}) != digest(FACTS)


def test_missing_fact_changes_the_digest():
    for name in FACTS:
        assert digest({k: v for k, v in FACTS.items() if k != name}) != digest(FACTS)
    assert digest({"a": {"x": 1, "y": 2}}) == digest({"a": {"y": 2, "x": 1}})
    assert digest({"a": {"x": 1, "y": 2}}) != digest({"a": {"x": 2, "y": 1}})


def tensors(changed=(), seed=0, num=40, items=5000):
    """Return named random weights; those whose number is in changed differ by a little."""
    rng = np.random.default_rng(seed)
    every = {f"layers.{i}.w": rng.standard_normal(items).astype(np.float32) for i in range(num)}
    for i in changed:
        every[f"layers.{i}.w"] *= 1.001
    return every


def save(folder, weights, name="model.safetensors"):
    """Write a safetensors file."""
    folder.mkdir(exist_ok=True)
    header, offset = {}, 0
    for key, value in weights.items():
        end = offset + value.nbytes
        header[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / name).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in weights.values():
            file.write(value.tobytes())
    return folder


def test_same_weights_are_the_same(tmp_path):
    first, second = (save(tmp_path / name, tensors()) for name in "ab")
    assert weights_fingerprint(first) == weights_fingerprint(second) is not None


def test_fine_tune_of_all_weights_differs(tmp_path):
    base = save(tmp_path / "a", tensors())
    tuned = save(tmp_path / "b", tensors(changed=range(40)))
    assert weights_fingerprint(base) != weights_fingerprint(tuned)


@pytest.mark.parametrize("layer", [0, 1, 7, 20, 38, 39])
def test_fine_tune_of_one_tensor_differs(tmp_path, layer):
    base = save(tmp_path / "a", tensors())
    tuned = save(tmp_path / "b", tensors(changed=[layer]))
    assert weights_fingerprint(base) != weights_fingerprint(tuned)


def test_other_file_names_and_sizes_differ(tmp_path):
    prints = {
        weights_fingerprint(save(tmp_path / "a", tensors())),
        weights_fingerprint(save(tmp_path / "b", tensors(), "model-2.safetensors")),
        weights_fingerprint(save(tmp_path / "c", tensors(num=41))),
        weights_fingerprint(save(tmp_path / "d", tensors(seed=1))),
    }
    assert len(prints) == 4


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.gguf", "w.safetensors"])
def test_files_without_a_readable_header_are_sampled(tmp_path, name):
    rng = np.random.default_rng(0)
    prints = set()
    for content in (
        b"",
        b"x",
        rng.bytes(7),
        rng.bytes(4096),
        rng.bytes(300_000),
        b"\xff" * 300_000,
    ):
        (tmp_path / name).write_bytes(content)
        prints.add(weights_fingerprint(tmp_path))
    assert len(prints) == 6


def test_folder_without_weights_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weights_fingerprint(tmp_path) is None
    assert weights_fingerprint(tmp_path / "nothing") is None


def test_large_file_is_not_read_whole(tmp_path):
    folder = save(tmp_path / "a", tensors(num=4))
    with (folder / "big.bin").open("wb") as file:
        file.truncate(1 << 40)
    assert weights_fingerprint(folder) is not None
    assert fingerprint.FORMAT_VERSION == 1


def test_folder_is_read_again_only_when_it_has_changed(tmp_path, monkeypatch):
    """A request each asks for its adapter, in vLLM's scheduler."""
    read = []

    def counted(folder):
        read.append(folder)
        return weights_fingerprint(folder)

    monkeypatch.setattr(fingerprint, "weights_fingerprint", counted)
    file, known = tmp_path / "adapter_model.bin", Fingerprints()
    file.write_bytes(b"a" * 100)
    first = known.fingerprint(tmp_path)
    assert known.fingerprint(tmp_path) == first == weights_fingerprint(tmp_path)
    assert len(read) == 1
    file.write_bytes(b"b" * 100)
    os.utime(file, ns=(1, 1))  # as old as it likes: another time, though of the same size
    assert known.fingerprint(tmp_path) == weights_fingerprint(tmp_path) != first
    (tmp_path / "adapter_config.json").write_text("{}")
    assert known.fingerprint(tmp_path) == weights_fingerprint(tmp_path)
    file.unlink()
    (tmp_path / "adapter_config.json").unlink()
    assert known.fingerprint(tmp_path) is None

"""Thresholds measured at start: crossovers, the budget, the cache, and the whole on a stand-in."""

import functools
import itertools
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.fake_cuda import FakeDevice, FakeEvent

torch = pytest.importorskip("torch")
from adp_kv.transfer import cuda_mover, tuning  # noqa: E402
from adp_kv.transfer.copy_engine import CopyEngine  # noqa: E402
from adp_kv.transfer.plan import NEVER, RESTORE, SAVE, Way  # noqa: E402
from adp_kv.transfer.registration import RingRegistration  # noqa: E402
from adp_kv.transfer.settings import MoverSettings  # noqa: E402
from adp_kv.units import KiB, MiB  # noqa: E402


@pytest.mark.parametrize(
    ("is_faster", "found"),
    [
        ([True, True, True], 1),
        ([False, True, True], 2),
        ([True, False, True], 4),
        ([True, True, False], NEVER),
    ],
)
def test_crossover_is_where_a_way_stays_faster(is_faster, found):
    assert tuning.crossover([1, 2, 4], is_faster) == found


def machine_ratios(to_device, kind, size, *, clear=2.0):
    """Ratios of times on a machine whose crossovers are known."""
    wins = {
        (True, "staged"): 4 * MiB, (True, "strided"): 32 * KiB, (True, "batch"): 128 * KiB,
        (False, "staged"): MiB, (False, "strided"): NEVER, (False, "batch"): 512 * KiB,
    }  # fmt: skip
    return 1 / clear if size >= wins[to_device, kind] else clear


def test_measured_thresholds_are_the_crossovers():
    tuned, _ = tuning.measure_thresholds(machine_ratios, ["staged", "strided", "batch"])
    assert (tuned.restore.staged, tuned.restore.strided) == (4 * MiB, 32 * KiB)
    assert (tuned.restore.batch, tuned.save.batch) == (128 * KiB, 512 * KiB)
    assert (tuned.save.staged, tuned.save.strided) == (MiB, NEVER)
    assert (tuned.save.beside, tuned.restore.extent) == (SAVE.beside, RESTORE.extent)
    assert tuned.is_complete


def test_long_runs_are_staged_whatever_was_measured():
    def kernel_always_wins(_to_device, _kind, _size):
        return 3.0

    tuned, _ = tuning.measure_thresholds(kernel_always_wins, ["staged", "strided", "batch"])
    assert (tuned.restore.staged, tuned.save.staged) == (32 * MiB, 32 * MiB)
    assert (tuned.restore.strided, tuned.restore.batch) == (NEVER, NEVER)


def test_noise_does_not_move_a_default():
    noisy = functools.partial(machine_ratios, clear=1.05)
    tuned, _ = tuning.measure_thresholds(noisy, ["staged", "strided", "batch"])
    assert (tuned.restore, tuned.save.staged) == (RESTORE, SAVE.staged)


@pytest.mark.parametrize(("ratio", "batch"), [(1.2, SAVE.batch), (1.3, NEVER)])
def test_saves_stay_with_the_copy_engine_though_it_is_somewhat_slower(ratio, batch):
    tuned, _ = tuning.measure_thresholds(lambda *_: ratio, ["batch"])
    assert tuned.save.batch == batch
    assert tuned.restore.batch == NEVER, "somebody waits for it"


def test_what_the_budget_does_not_reach_keeps_its_default():
    def measure(to_device, kind, size):
        if not to_device:
            raise TimeoutError
        return machine_ratios(to_device, kind, size)

    tuned, _ = tuning.measure_thresholds(measure, ["staged", "strided", "batch"])
    assert tuned.restore.staged == 4 * MiB
    assert tuned.save == SAVE
    assert not tuned.is_complete


@pytest.fixture
def small(monkeypatch):
    """Make what is measured small enough for a device that copies in Python."""
    monkeypatch.setattr(cuda_mover.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(tuning, "RING_BYTES", 256 * KiB)
    monkeypatch.setattr(tuning, "TOTAL_BYTES", 128 * KiB)
    monkeypatch.setattr(tuning, "_REPEATS", 1)
    monkeypatch.setattr(tuning, "BUDGET_S", 30.0)
    sizes = {"staged": (64 * KiB, 128 * KiB), "strided": (16 * KiB,), "batch": (16 * KiB,)}
    monkeypatch.setattr(tuning, "SIZES", sizes)


def a_mover(device):
    settings = MoverSettings(staging_bytes=MiB, max_pages=64)
    ring = RingRegistration(device, 0)
    return cuda_mover.CudaMover(device, CopyEngine(device, device), ring, settings)


def used(mover):
    return mover._thresholds


def test_tuning_measures_once_and_is_cached_for_the_machine(small, tmp_path):
    device = FakeDevice()
    first, second, third = (a_mover(device) for _ in range(3))
    tuning.tune(first, device, tmp_path / "cache", has_batch=True)
    (path,) = (tmp_path / "cache").iterdir()
    assert {chosen.force for chosen in used(first)} == {None}
    assert not device.registered, "the ring that was measured with is given back"
    calls = len(device.calls)
    tuning.tune(second, device, tmp_path / "cache", has_batch=True)
    assert used(second) == used(first)
    assert len(device.calls) == calls, "measured again"
    device.name = "another GPU"
    tuning.tune(third, device, tmp_path / "cache", has_batch=True)
    assert len(device.calls) > calls
    assert b"another GPU" in path.read_bytes()


def test_time_of_a_way_is_until_all_its_transfers_ended(small):
    ended = set()

    def restore(_copy, _after):
        number = next(numbers)
        polls = iter([False, True])

        def done():
            if next(polls):
                ended.add(number)
            return number in ended

        return SimpleNamespace(done=done)

    numbers = itertools.count()
    device = FakeDevice()
    with tuning._Rig(a_mover(device), device, time.monotonic() + 30) as rig:
        rig._seconds(restore, rig._copy("staged", 64 * KiB), 5, Way.DIRECT)
    assert ended == set(range(5))


OURS = {"format": tuning.FORMAT, "machine": "a device", "restore": {"batch": 5}, "save": {}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 3, "machine": 3}',
        json.dumps(OURS | {"format": tuning.FORMAT - 1}),
        json.dumps(OURS | {"restore": {"batch": 0}}),
        json.dumps(OURS | {"restore": {"batch": "5"}}),
    ],
    ids=["empty", "no table", "parts missing", "older", "zero", "text"],
)
def test_cache_that_is_damaged_or_older_is_measured_anew(small, tmp_path, content):
    device = FakeDevice()
    (tmp_path / "tuning-0.json").write_text(content)
    tuning.tune(a_mover(device), device, tmp_path, has_batch=True)
    assert device.calls
    assert device.machine().encode() in (tmp_path / "tuning-0.json").read_bytes()


def test_cache_of_this_machine_and_format_is_used_as_it_is(small, tmp_path):
    device = FakeDevice()
    (tmp_path / "tuning-0.json").write_text(json.dumps(OURS))
    mover = a_mover(device)
    tuning.tune(mover, device, tmp_path, has_batch=True)
    assert not device.calls
    assert used(mover) == (replace(RESTORE, batch=5), SAVE)


def test_folder_that_cant_be_written_is_no_error(small, tmp_path):
    (tmp_path / "file").touch()
    device = FakeDevice()
    mover = a_mover(device)
    tuning.tune(mover, device, tmp_path / "file", has_batch=True)
    assert device.calls


def test_budget_spent_is_not_cached(small, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "BUDGET_S", 0.0)
    device = FakeDevice()
    mover = a_mover(device)
    tuning.tune(mover, device, tmp_path, has_batch=True)
    assert used(mover) == (RESTORE, SAVE)
    assert not list(tmp_path.iterdir())


def test_failing_measurement_leaves_defaults_and_a_mover_that_works(small, caplog, tmp_path):
    device = FakeDevice()
    device.fail_copies = True
    mover = a_mover(device)
    tuning.tune(mover, device, tmp_path, has_batch=True)
    assert used(mover) == (RESTORE, SAVE)
    assert "default thresholds" in caplog.text
    assert not device.registered

"""The doctor on machines that lack one thing each: what it finds, and that it says what to do."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from adp_kv.cli import doctor, main
from adp_kv.cli.gpu import Gpus
from adp_kv.errors import GatewayError
from adp_kv.units import GiB, MiB
from tests.support.process import REPO, child_env
from tests.support.serving import Serving

TWO = Gpus(["H200", "H200"], "13.0", {(0, 1): True})


def subject(tmp_path, **how):
    usual = {"shared_memory_size": MiB, "gateway": "", "shm": tmp_path, "gpus": Gpus}
    return doctor.Subject(**(usual | how))


def named(findings):
    return {finding.name: finding for finding in findings}


def test_healthy_machine_has_nothing_to_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "environment", {"PYTHONHASHSEED": "0"}.get)
    monkeypatch.setattr(doctor, "vllm_version", lambda: "0.32.0")
    findings = named(doctor.examine(subject(tmp_path)))
    assert {f.status for f in findings.values()} <= {"ok", "absent", "warn"}
    must = {"python", "vllm", "shared memory", "ring files", "PYTHONHASHSEED", "cache layout"}
    assert {name for name, f in findings.items() if f.status == "ok"} >= must


def test_every_trouble_comes_with_its_fix(tmp_path, monkeypatch):
    """Everything is wrong at once; each line says how to mend it."""
    (tmp_path / "adp_kv-old.ring").touch()
    monkeypatch.setattr(doctor, "environment", {"VLLM_KV_CACHE_LAYOUT": "LHBNC"}.get)
    monkeypatch.setattr(doctor, "vllm_version", lambda: "0.11.2")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _which: (8 * MiB, 8 * MiB))
    monkeypatch.setattr(doctor, "_SYS_IO_URING_SETUP", 100_000)  # no such system call

    def nobody(address, _timeout_s, _key_file):
        raise GatewayError(f"no gateway answers at {address}")

    apart = Gpus(["A", "B"], "12.4", {(0, 1): False})
    wrong = subject(
        tmp_path,
        shared_memory_size=1 << 60,
        gateway="tcp://127.0.0.1:1",
        gpus=lambda: apart,
        ask=nobody,
    )
    findings = named(doctor.examine(wrong))
    expected = {
        "vllm": ("warn", "0.25 to 0.33"),
        "peer access": ("warn", "nvlink_fanout off"),
        "cupy": ("fail", "pip install"),
        "shared memory": ("fail", "--shm-size"),
        "ring files": ("warn", "next one of that name removes it"),
        "memlock": ("warn", "LimitMEMLOCK=infinity"),
        "io_uring": ("warn", "io_uring_disabled=0"),
        "PYTHONHASHSEED": ("warn", "PYTHONHASHSEED=0"),
        "cache layout": ("fail", "unset it"),
        "gateway": ("fail", "adp-gateway --listen tcp://127.0.0.1:1"),
    }
    for name, (status, fix) in expected.items():
        assert findings[name].status == status, findings[name]
        assert fix in findings[name].fix
    assert {n for n, f in findings.items() if f.status in {"warn", "fail"}} == set(expected)


def test_gpus_are_told(tmp_path):
    findings = named(doctor.examine(subject(tmp_path, gpus=lambda: TWO)))
    assert findings["gpu"].found == "2x H200, driver for CUDA 13.0"
    assert findings["peer access"].status == "ok"


def test_machine_without_a_driver_is_no_failure(tmp_path):
    findings = named(doctor.examine(subject(tmp_path, gpus=lambda: Gpus(reason="no driver"))))
    assert findings["gpu"] == doctor.Finding("gpu", "absent", "no driver")
    assert findings["cupy"].status in {"ok", "absent"}


def test_missing_shm_is_a_finding(tmp_path):
    finding = doctor.check_shm(subject(tmp_path / "nothing"))
    assert finding.status == "fail"
    assert "mount a tmpfs" in finding.fix


@pytest.mark.parametrize("free", [6 * GiB - 1, 6 * GiB])
def test_ring_fits_to_the_byte(tmp_path, monkeypatch, free):
    room = SimpleNamespace(f_bavail=free, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _path: room)
    finding = doctor.check_shm(subject(tmp_path, shared_memory_size=6 * GiB))
    assert finding.status == ("ok" if free == 6 * GiB else "fail")


def test_running_gateway_is_asked(tmp_path):
    with Serving() as serving:
        finding = doctor.check_gateway(subject(tmp_path, gateway=serving.address))
    assert finding.status == "ok"
    assert "0 values" in finding.found


def test_key_file_that_can_not_be_read_is_what_to_mend(tmp_path):
    """Not the gateway, which may well run."""
    wrong = subject(tmp_path, gateway="tcp://127.0.0.1:1", key_file=str(tmp_path / "none"))
    finding = doctor.check_gateway(wrong)
    assert finding.status == "fail"
    assert "No such file" in finding.found
    assert finding.fix == "give --key-file the gateway's key_file"


def test_command_line_tells_json_and_status(capsys, monkeypatch):
    sick = [doctor.Finding("a", "ok", "well"), doctor.Finding("b", "fail", "ill", "a pill")]
    monkeypatch.setattr(doctor, "examine", lambda _subject: sick)
    assert main.main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told[1] == {"name": "b", "status": "fail", "found": "ill", "fix": "a pill"}
    assert main.main(["doctor"]) == 1
    assert "fix: a pill" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda _subject: sick[:1])
    assert main.main(["doctor"]) == 0


def test_doctor_runs_where_there_is_neither_torch_nor_vllm():
    """As on a gateway's machine: those imports fail, and the doctor does not need them."""
    program = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'cupy', 'triton'): sys.modules[name] = None\n"
        "from adp_kv.cli.main import main\n"
        "sys.exit(main(['doctor', '--json', '--shared-memory-size', '1MiB']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPO,
        env=child_env({"PYTHONHASHSEED": "0"}),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {line["name"] for line in json.loads(done.stdout)} >= {"gpu", "io_uring", "memlock"}

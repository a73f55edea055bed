"""What deploy/ starts fits together: settings, sockets, sizes, users, probes, paths.

Nothing is built or started here (deploy/README.md says what that leaves open); where the tools
are installed, systemd-analyze, kubectl and promtool judge their files too.
"""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml

from adp_kv.config import connector_settings
from adp_kv.units import GiB
from gateway.cards.registry import create_card
from gateway.config import load
from tests.support.confined_gateway import FAMILIES
from tests.support.gateways import Gateway
from tests.support.process import REPO, free_port

DEPLOY = REPO / "deploy"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
CONFIGS = sorted(DEPLOY.rglob("*.toml"))
UNIT = DEPLOY / "systemd" / "adp-gateway@.service"
SIZES = {"Gi": GiB, "gb": GiB, "Ti": 1024 * GiB}


def read(path):
    return yaml.safe_load((DEPLOY / path).read_text())


def size(text):
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
    return int(number) * SIZES[unit]


def settings(path):
    return load(["--config", str(DEPLOY / path)], {})


def connector(text):
    """Return the connector's settings in a --kv-transfer-config."""
    config = json.loads(text)
    assert config["kv_connector"] == "AdpConnector"
    assert config["kv_connector_module_path"] == "adp_kv.connector"
    return connector_settings(config["kv_connector_extra_config"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_gateway_takes_its_settings(path):
    found = load(["--config", str(path)], {})
    create_card(found.card, found.card_options)  # opens nothing
    assert found.listen.startswith("ipc://"), "no socket on the network"
    assert found.metrics


def test_compose_parts_fit():
    services = read("docker/compose.yaml")["services"]
    gateway, vllm = services["gateway"], services["vllm"]
    found = settings("docker/gateway.toml")
    transfer = vllm["command"][vllm["command"].index("--kv-transfer-config") + 1]
    assert connector(transfer).gateway == found.listen
    assert vllm["environment"]["PYTHONHASHSEED"] == "0"
    assert gateway["ipc"] == "shareable"
    assert vllm["ipc"] == "service:gateway"
    assert size(gateway["shm_size"]) > found.shared_memory_size
    assert gateway["ulimits"]["memlock"] == vllm["ulimits"]["memlock"] == -1
    assert gateway.get("user") == vllm.get("user")
    folder = found.listen.removeprefix("ipc://").rpartition("/")[0]
    for service in (gateway, vllm):
        assert f"run:{folder}" in service["volumes"]
    assert f"card:{found.card_options['path']}" in gateway["volumes"]
    assert vllm["depends_on"]["gateway"]["condition"] == "service_healthy"
    assert all(p.startswith("127.0.0.1:") for s in services.values() for p in s.get("ports", []))
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "docker" / source).exists(), volume
            else:
                assert source in read("docker/compose.yaml")["volumes"]


def test_prometheus_scrapes_what_compose_serves():
    jobs = read("docker/prometheus.yaml")["scrape_configs"]
    targets = {t for job in jobs for config in job["static_configs"] for t in config["targets"]}
    port = settings("docker/gateway.toml").metrics.rpartition(":")[2]
    assert targets == {f"gateway:{port}", "vllm:8000"}
    source = read("docker/grafana-datasource.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    # What Grafana takes a rate over is four times this.
    assert {job["scrape_interval"] for job in jobs} == {source["jsonData"]["timeInterval"]}
    provider = read("docker/grafana-provisioning.yaml")["providers"][0]
    mounts = read("docker/compose.yaml")["services"]["grafana"]["volumes"]
    assert f"../grafana:{provider['options']['path']}:ro" in mounts


def dockerfile(name):
    """Return a Dockerfile's instructions as (word, arguments)."""
    text = (DEPLOY / "docker" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_dockerfile_copies_what_is_there(name):
    steps = dockerfile(name)
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {w for w, _ in steps} <= known | {"ENTRYPOINT", "CMD", "ARG"}
    copied = set()
    for word, arguments in steps:
        if word == "COPY" and not arguments.startswith("--from"):
            *sources, _target = shlex.split(arguments)
            copied |= set(sources)
    assert all((REPO / source).exists() for source in copied)
    packages = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(packages["targets"]["wheel"]["packages"]) <= copied
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied
    (install,) = (step for word, step in steps if word == "RUN" and "pip install" in step)
    extra = re.search(r"\.\[(.+?)\]", install)[1]
    given = [step.split("=") for word, step in steps if word == "ARG" and "=" in step]
    extra = re.sub(r"\$\{(\w+)\}", lambda m: dict(given)[m[1]], extra)
    assert extra in PROJECT["optional-dependencies"]


def debian_packages(tmp_path, extras):
    """Return what the gateway's image installs with apt-get, from its own RUN step."""
    (step,) = (s for word, s in dockerfile("Dockerfile") if word == "RUN" and "apt-get" in s)
    log = tmp_path / extras
    log.touch()
    for name in ("apt-get", "rm"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        program.chmod(0o755)
    env = {"PATH": str(tmp_path), "EXTRAS": extras}
    subprocess.run(["/bin/sh", "-ec", step], env=env, check=True, timeout=10)
    called = [line.split() for line in log.read_text().splitlines()]
    return {w for c in called if "install" in c for w in c[2:] if not w.startswith("-")}


def test_image_has_the_libraries_of_the_extras_that_were_asked_for(tmp_path):
    default = dict(s.split("=") for w, s in dockerfile("Dockerfile") if w == "ARG" and "=" in s)
    assert debian_packages(tmp_path, default["EXTRAS"]) == set(), "the default image stays small"
    brought = re.search(r"DEBIAN_PACKAGE=\((.+)\)", (REPO / "scripts/setup_env.sh").read_text())[1]
    needed = set(re.findall(r"\]=(\S+)", brought))
    assert debian_packages(tmp_path, "gateway,mooncake") == needed
    assert "mooncake" in PROJECT["optional-dependencies"]
    documented = (REPO / "docs/mooncake.md").read_text()
    assert all(name in documented for name in {"EXTRAS=gateway,mooncake", *needed})


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_stage_declares_the_arguments_it_uses(name):
    """One that is declared before the first FROM only is empty in every RUN."""
    declared = set()
    for word, arguments in dockerfile(name):
        if word == "FROM":
            declared = set()
        elif word == "ARG":
            declared.add(arguments.partition("=")[0])
        else:
            assert set(re.findall(r"\$\{(\w+)\}", arguments)) <= declared, arguments


def test_dockerfile_starts_what_is_installed():
    words = dict(dockerfile("Dockerfile"))
    assert json.loads(words["ENTRYPOINT"])[0] in PROJECT["scripts"]
    (option, path) = json.loads(words["CMD"])
    assert option == "--config"
    mounted = read("docker/compose.yaml")["services"]["gateway"]["volumes"]
    assert f"./gateway.toml:{path}:ro" in mounted
    assert words["EXPOSE"] == settings("docker/gateway.toml").metrics.rpartition(":")[2]


@pytest.fixture(scope="module")
def pod():
    return read("kubernetes/serving.yaml")["spec"]["template"]["spec"]


def test_pod_shares_memory_socket_and_user(pod):
    (gateway,), (vllm,) = pod["initContainers"], pod["containers"]
    found = settings("kubernetes/gateway.toml")
    transfer = vllm["args"][vllm["args"].index("--kv-transfer-config") + 1]
    assert connector(transfer).gateway == found.listen
    assert {"name": "PYTHONHASHSEED", "value": "0"} in vllm["env"]
    mounts = [{m["mountPath"]: m["name"] for m in c["volumeMounts"]} for c in (gateway, vllm)]
    for path in ("/dev/shm", found.listen.removeprefix("ipc://").rpartition("/")[0]):
        assert mounts[0][path] == mounts[1][path]
    volumes = {v["name"]: v for v in pod["volumes"]}
    shm = volumes[mounts[0]["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert size(shm["sizeLimit"]) > found.shared_memory_size
    assert size(gateway["resources"]["limits"]["memory"]) > size(shm["sizeLimit"])
    for rights in (gateway["securityContext"], vllm["securityContext"]):
        assert rights["runAsUser"] == gateway["securityContext"]["runAsUser"]
        assert "IPC_LOCK" in rights["capabilities"]["add"]
    claims = read("kubernetes/serving.yaml")["spec"]["volumeClaimTemplates"]
    named = set(volumes) | {claim["metadata"]["name"] for claim in claims}
    assert {name for mount in mounts for name in mount.values()} <= named
    room = size(claims[0]["spec"]["resources"]["requests"]["storage"])
    assert room > found.card_options["capacity_bytes"]
    assert mounts[0][found.card_options["path"]] == claims[0]["metadata"]["name"]


def test_probes_hit_ports_and_paths_that_are_served(pod):
    (gateway,), (vllm,) = pod["initContainers"], pod["containers"]
    assert gateway["restartPolicy"] == "Always", "a sidecar, not a step before vLLM"
    port = settings("kubernetes/gateway.toml").metrics.rpartition(":")[2]
    for container, path in ((gateway, "/healthz"), (vllm, "/health")):
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        for probe in (p for name, p in container.items() if name.endswith("Probe")):
            assert probe["httpGet"]["path"] == path
            assert probe["httpGet"]["port"] in ports
    assert gateway["ports"][0]["containerPort"] == int(port)
    annotations = read("kubernetes/serving.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == port
    service = read("kubernetes/service.yaml")["spec"]
    labels = read("kubernetes/serving.yaml")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert service["ports"][0]["targetPort"] in {p["name"] for p in vllm["ports"]}


def test_kustomization_names_its_files():
    found = read("kubernetes/kustomization.yaml")
    named = found["resources"] + found["configMapGenerator"][0]["files"]
    there = {p.name for p in (DEPLOY / "kubernetes").iterdir()} - {"kustomization.yaml"}
    assert set(named) == there
    config = next(
        v
        for v in read("kubernetes/serving.yaml")["spec"]["template"]["spec"]["volumes"]
        if v["name"] == "config"
    )
    assert config["configMap"]["name"] == found["configMapGenerator"][0]["name"]


@pytest.fixture(scope="module")
def service():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    return unit["Service"]


def test_unit_fits_its_example(service):
    program, option, path = shlex.split(service["ExecStart"])
    assert program.rpartition("/")[2] in PROJECT["scripts"]
    assert option == "--config"
    assert path == "/etc/adp-kv/%i.toml"
    assert service["LimitMEMLOCK"] == "infinity"
    found = settings("systemd/engine0.toml")
    assert found.listen.startswith(f"ipc:///run/{service['RuntimeDirectory']}/")
    assert found.card_options["path"].startswith(f"/var/lib/{service['StateDirectory']}/")


@pytest.mark.parametrize("listen", ["tcp", "ipc"])
def test_unit_lets_a_gateway_open_its_sockets(tmp_path, service, listen):
    """ZeroMQ looks at the interfaces when it binds to TCP, and aborts where it may not."""
    address = f"ipc://{tmp_path}/s" if listen == "ipc" else None
    with Gateway.serve(
        address=address,
        card_options={"capacity_bytes": "1MiB"},
        env={FAMILIES: service["RestrictAddressFamilies"]},
        program="tests.support.confined_gateway",
        shared_memory_size="1MiB",
        metrics=f"127.0.0.1:{free_port()}",
    ) as gateway:
        assert gateway.counters()
        gateway.stop()


TOOLS = {
    "systemd-analyze": ["systemd-analyze", "verify", "--man=no"],
    "kubectl": ["kubectl", "kustomize", str(DEPLOY / "kubernetes")],
    "promtool": ["promtool", "check", "config", str(DEPLOY / "docker" / "prometheus.yaml")],
}


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if shutil.which(tool)])
def test_installed_tool_takes_the_file(tmp_path, tool):
    command = TOOLS[tool]
    if tool == "systemd-analyze":
        # It wants the program and the user to exist: this machine's stand in for them.
        text = UNIT.read_text().replace("/opt/adp-kv/bin/adp-gateway", "/bin/true")
        unit = tmp_path / "adp-gateway@engine0.service"
        unit.write_text(text.replace("User=vllm", "User=root"))
        command = [*command, str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    if tool == "kubectl":
        kinds = {doc["kind"] for doc in yaml.safe_load_all(done.stdout)}
        assert kinds == {"ConfigMap", "Service", "StatefulSet"}
    elif tool == "systemd-analyze":
        assert "adp-gateway@engine0.service" not in done.stderr, done.stderr

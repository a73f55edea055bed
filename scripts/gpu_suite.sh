#!/usr/bin/env bash
# GPU tests and all benchmarks on this machine, with whatever Python it has. What needs two GPUs
# is left out where there is one, and named in the summary.
#
#   scripts/gpu_suite.sh OUTDIR [part ...]
#
# Parts: `tests` (pytest -m "gpu or multi_gpu") and the benchmarks' names; all by default.
# A part that fails does not stop the rest; the exit status is non-zero if any failed.
# OUTDIR gets PART.log, tests.xml, NAME.json (rows) and summary.txt.
#
# Settings (environment):
#   PYTHON         interpreter with torch, cupy, triton and vLLM [python3]
#   TESTS          where to look for tests [tests]
#   PART_TIMEOUT   seconds for each part [900]
#   JOBS           tests at a time, where pytest-xdist is installed [a quarter of the cores]
#   ADP_KV_COMMIT  commit of this tree, where there is no .git
set -uo pipefail
if [ $# -lt 1 ]; then sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; fi

mkdir -p "$1" || exit 2
OUT=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
PART_TIMEOUT=${PART_TIMEOUT:-900}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONHASHSEED=0

if [ -z "${ADP_KV_COMMIT:-}" ] && ! git rev-parse HEAD >/dev/null 2>&1; then
    echo "gpu_suite: no .git and no ADP_KV_COMMIT: the rows will not say which code they measured" >&2
fi

if [ $# -gt 0 ]; then
    parts=("$@")
else
    parts=(tests)
    for file in benchmarks/*.py; do
        name=$(basename "$file" .py)
        case $name in _* | report) ;; *) parts+=("$name") ;; esac
    done
fi

# A machine may have pytest and not its timeout plugin, whose settings are then unknown.
# Nor do other plugins it may have belong here: pytest-benchmark warns beside pytest-xdist, and
# warnings are errors.
pytest_flags=(-p no:benchmark)
if ! "$PYTHON" -c 'import pytest_timeout' 2>/dev/null; then
    pytest_flags+=(-o addopts=--import-mode=importlib -W "ignore::pytest.PytestConfigWarning")
fi
# Tests of one engine stay together (tests/gpu/conftest.py); most of their time is its start.
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    pytest_flags+=(-n "${JOBS:-$((($(nproc) + 3) / 4))}" --dist loadgroup)
fi

# Left out by the number of devices, never by a test that skips itself.
marks="gpu or multi_gpu"
: > "$OUT/summary.txt"
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
    marks="gpu and not multi_gpu"
    echo "NOT RUN, one device: tests marked multi_gpu, benchmarks fanout and agents" |
        tee -a "$OUT/summary.txt"
    for i in "${!parts[@]}"; do
        case ${parts[$i]} in fanout | agents) unset "parts[$i]" ;; esac
    done
fi

run_part() {
    if [ "$1" = tests ]; then
        # shellcheck disable=SC2086  # TESTS may name several
        timeout -k 20 "$PART_TIMEOUT" "$PYTHON" -m pytest "${pytest_flags[@]}" \
            -m "$marks" -ra --junitxml="$OUT/tests.xml" ${TESTS:-tests}
    else
        timeout -k 20 "$PART_TIMEOUT" "$PYTHON" -m "benchmarks.$1" --out "$OUT"
    fi
}

failed=0
for part in "${parts[@]}"; do
    began=$SECONDS
    run_part "$part" 2>&1 | tee "$OUT/$part.log"
    status=${PIPESTATUS[0]}
    verdict=ok
    if [ "$status" -ne 0 ]; then
        verdict="FAILED ($status)"
        failed=1
    fi
    echo "$part: $verdict, $((SECONDS - began)) s" | tee -a "$OUT/summary.txt"
done
exit $failed

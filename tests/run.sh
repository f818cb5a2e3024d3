#!/usr/bin/env bash
# Format, lint and tests.
#
#     bash tests/run.sh                       # what CI runs
#     bash tests/run.sh --full                # the slow tests, too
#     bash tests/run.sh tests/test_smoke.py   # any other argument goes to pytest: a file, -k NAME, -x, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh || exit 1

pytest_arguments=()
for argument in "$@"; do
    if [[ $argument == --full ]]; then
        pytest_arguments+=(-m '') # no marker deselects anything
    else
        pytest_arguments+=("$argument")
    fi
done

export OMP_NUM_THREADS=1        # most tests start several processes: one thread each, or they fight for the cores
export PET_LOCAL_ADDR=127.0.0.1 # torchrun --local_addr: do not look up this machine's name, which may not resolve

failed=()
"$PYTHON" -m ruff format --check . || failed+=('format (ruff format . mends it)')
"$PYTHON" -m ruff check . || failed+=('lint')
"$PYTHON" -m pytest -q -rfEs --durations=10 "${pytest_arguments[@]}" || failed+=('tests')

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo 'passed: format, lint, tests'

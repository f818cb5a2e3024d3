#!/usr/bin/env bash
# Format, lint and tests.
#
#     bash tests/run.sh                       # some 6 minutes on two cores: every lesson, and every script but DeepSpeed's
#     bash tests/run.sh --more                # 15 to 30 minutes: all tests but those that are marked slow
#     bash tests/run.sh --full                # all tests
#     bash tests/run.sh --full=1/12           # --more, and the slow tests of a twelfth of the files: what CI runs, in turns
#     bash tests/run.sh tests/test_smoke.py   # any other argument goes to pytest, which then chooses among those of --more
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh || exit 1

pytest_arguments=()
(($#)) || pytest_arguments=(--five-minutes) # tests/five_minutes.txt
for argument in "$@"; do
    if [[ $argument == --more ]]; then
        : # pyproject.toml leaves out what is slow
    elif [[ $argument == --full ]]; then
        pytest_arguments+=(-m '') # no marker deselects anything
    elif [[ $argument == --full=* ]]; then
        pytest_arguments+=(-m '' "--slow-part=${argument#*=}")
    else
        pytest_arguments+=("$argument")
    fi
done

SECONDS=0                       # bash counts them
export OMP_NUM_THREADS=1        # most tests start several processes: one thread each, or they fight for the cores
export PET_LOCAL_ADDR=127.0.0.1 # torchrun --local_addr: do not look up this machine's name, which may not resolve

failed=()
"$PYTHON" -m ruff format --check . || failed+=('format (ruff format . mends it)')
"$PYTHON" -m ruff check . || failed+=('lint')
# Three files at a time, since much is waiting; each file by one worker, for its fixtures train models. conftest.py says
# which come first. Another -n among the arguments counts: -n 0 is one process, for a debugger.
"$PYTHON" -m pytest -q -rfEs --durations=10 -n 3 --dist loadfile --no-loadscope-reorder "${pytest_arguments[@]}" ||
    failed+=('tests')
took=$(printf '%d:%02d minutes' $((SECONDS / 60)) $((SECONDS % 60)))

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    echo "in $took"
    exit 1
fi
echo "passed: format, lint, tests in $took"

#!/usr/bin/env bash
# The numerics with the rounding of CPUs that are not here (see rounding.py). A test that asks for equal bits where the same
# numbers are computed in two ways fails here, though it passes on a CPU that happens to round both alike.
#
#     bash tests/rounding.sh                          # the tests of cpus.sh with seeds 1 to 3; CI runs them with one, in turns
#     bash tests/rounding.sh 4                        # with another seed
#     bash tests/rounding.sh 4 tests/test_moe.py -x   # other tests; what follows a seed goes to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh || exit 1

# When torch is imported it calls what packages on its path name as entry points `torch.backends`, in every process.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/rounding-1.dist-info"
printf 'Metadata-Version: 2.1\nName: rounding\nVersion: 1\n' >"$folder/rounding-1.dist-info/METADATA"
printf '[torch.backends]\nrounding = rounding:start\n' >"$folder/rounding-1.dist-info/entry_points.txt"
cp tests/rounding.py "$folder"

seeds=()
while [[ ${1-} =~ ^[0-9]+$ ]]; do
    seeds+=("$1")
    shift
done
((${#seeds[@]})) || seeds=(1 2 3)
settings=("${seeds[@]/#/PYTHONPATH=$folder TEST_ROUNDING=}")
if (($#)); then
    for setting in "${settings[@]}"; do
        # shellcheck disable=SC2086 # two variables
        env $setting OMP_NUM_THREADS=1 PET_LOCAL_ADDR=127.0.0.1 "$PYTHON" -m pytest -q -rfEs "$@"
    done
else
    bash tests/cpus.sh "${settings[@]}"
fi

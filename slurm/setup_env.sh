#!/usr/bin/env bash
# Make the virtual environment that the jobs use. On a login node, once, and again when requirements.txt has changed:
#
#     bash slurm/setup_env.sh
#
# Each requirement comes from the cluster's own wheels where they have it (`pip --no-index`: built for its CPUs and GPUs),
# else from the package index. pyarrow is part of the module `arrow`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source slurm/common.sh
load_modules

VENV=${VENV:-$PWD/.venv}
if [[ ! -x $VENV/bin/python ]]; then
    say "making $VENV with $(python3 --version)"
    if command -v virtualenv > /dev/null; then
        virtualenv --no-download "$VENV" > /dev/null # the clusters' own advice
    else
        python3 -m venv "$VENV"
    fi
fi
pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" < /dev/null
}

grep -v -e '^#' -e '^$' requirements.txt | while read -r requirement; do
    if pip install --quiet --no-index "$requirement" 2> /dev/null; then
        say "$requirement: from this cluster"
    elif pip install --quiet "$requirement"; then
        say "$requirement: from the package index"
    else
        fail "$requirement: neither here nor on the index: on a login node? are the modules the ones you want (module list)?"
    fi
done
sha256sum < requirements.txt > "$VENV/complete" # what ../setup_env.sh looks for
say "ready: $VENV"

#!/usr/bin/env bash
# Slurm, munge and shellcheck for tests/slurm/test_slurm.py, and iproute2 for tests/benchmarks/test_slow_link.py, from Debian's or Ubuntu's
# own packages. Nothing is started.
#
#     bash tests/install_slurm.sh      # as root; returns at once when everything is there
#
# Where they cannot be installed this says why and ends with 1; the tests then skip.
set -euo pipefail

say() {
    echo "[slurm for tests] $*" >&2
}

missing=()
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge shellcheck:shellcheck ip:iproute2 tc:iproute2; do
    # The daemons live in /usr/sbin, which is not in every user's PATH.
    PATH=$PATH:/usr/sbin command -v "${pair%:*}" > /dev/null || missing+=("${pair#*:}")
done
((${#missing[@]})) || exit 0

if ! command -v apt-get > /dev/null; then
    say "not installed: ${missing[*]} missing and there is no apt-get here"
    exit 1
fi
if ((EUID != 0)); then
    say "not installed: ${missing[*]} missing and only root can install them"
    exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
say "installing ${missing[*]}"
if ! apt-get install -y --no-install-recommends "${missing[@]}" > "$log" 2>&1; then
    # The lists of packages are empty in most container images, and old in others.
    apt-get update > "$log" 2>&1 || true
    if ! apt-get install -y --no-install-recommends "${missing[@]}" > "$log" 2>&1; then
        say "not installed: $(grep '^E:' "$log" | head -n 1)"
        exit 1
    fi
fi

# shellcheck shell=bash
# Sourced by quickstart.sh and tests/run.sh. Sets PYTHON to an interpreter that has everything in requirements.txt:
#
#   source setup_env.sh && "$PYTHON" train_ddp.py config/quickstart.py
#
# 1. .venv beside this file, when it is complete;
# 2. else this shell's python3, when it has every package (a container image, conda, modules of a cluster);
# 3. else .venv is made, or completed. When this shell's python3 has a torch that fits, .venv borrows it, and only what is
#    missing is installed.

unset PYTHONSAFEPATH # scripts import what lies beside them

setup_env() {
    local here venv wanted base missing
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || return
    venv=$here/.venv
    wanted=$(sha256sum < "$here/requirements.txt") || return # .venv/complete names the requirements that it meets

    PYTHON=$venv/bin/python
    if [[ -x $PYTHON && $(cat "$venv/complete" 2> /dev/null) == "$wanted" ]]; then
        return
    fi
    base=$(find_python) || return
    missing=$(missing_packages "$base")
    if [[ -z $missing ]]; then
        PYTHON=$base
        return
    fi

    if [[ ! -x $PYTHON ]]; then
        setup_say "making $venv with $("$base" --version)"
        if ! "$base" -m venv --clear "$venv" > /dev/null 2>&1; then
            setup_say "error: $base -m venv failed: install Python's venv module (Debian, Ubuntu: apt install python3-venv)"
            return 1
        fi
        if [[ $missing != torch* ]]; then
            setup_say "borrowing the torch of $base"
            "$base" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
                > "$(echo "$venv"/lib/python3*/site-packages)/borrowed.pth"
        fi
    fi
    missing=$(missing_packages "$PYTHON")
    if [[ $missing == torch* ]]; then
        pip_install '0.2 GB for CPUs, 5 GB with CUDA' "$(cpu_build "${missing%%$'\n'*}")" || return
        missing=$(missing_packages "$PYTHON")
    fi
    if [[ -n $missing ]]; then
        mapfile -t missing <<< "$missing"
        pip_install 'up to 0.2 GB' "${missing[@]}" || return
    fi
    echo "$wanted" > "$venv/complete"
}

setup_say() {
    echo "[setup] $*" >&2
}

# The first Python of a supported version: this shell's own, or another one that is installed.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2> /dev/null; then
            command -v "$name"
            return
        fi
    done
    setup_say "error: Python 3.10 to 3.13 needed, found $(python3 --version 2>&1 | head -n 1)"
    return 1
}

# The requirements that interpreter $1 does not meet, one per line; torch is the first in the file.
missing_packages() {
    "$1" -W ignore - "$(dirname "${BASH_SOURCE[0]}")/requirements.txt" << 'END'
import sys
from importlib import metadata

try:
    from packaging.requirements import Requirement
except ImportError:
    try:
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        Requirement = None  # a Python this bare has none of the packages

with open(sys.argv[1]) as requirements:
    lines = [line.strip() for line in requirements if line.strip() and not line.startswith('#')]
for line in lines:
    try:
        requirement = Requirement(line)
        is_met = requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
        if is_met and requirement.name == 'torch':
            import torch  # noqa: F401  there is more to a working torch than its files
    except Exception:
        is_met = False
    if not is_met:
        print(line)
END
}

# What to install for the torch requirement $1: on a machine without an NVIDIA driver the newest CPU build (2.13.0+cpu) that
# pip's index has, or else $1 itself, which pip takes for the newest CUDA build and its gigabytes.
cpu_build() {
    local build=
    if ! command -v nvidia-smi > /dev/null; then
        build=$("$PYTHON" -m pip index versions torch 2> /dev/null | "$PYTHON" -c '
import re, sys
from pip._vendor.packaging.requirements import Requirement

wanted = Requirement(sys.argv[1]).specifier
builds = [build for build in re.findall(r"[0-9.]+\+cpu", sys.stdin.read()) if wanted.contains(build)]
print(*builds[:1])
' "$1")
    fi
    echo "${build:+torch==}${build:-$1}"
}

# pip in .venv, quiet but for what it is about to do and the reason of a failure. $1: the size of the packages $2, ...
pip_install() {
    local log size=$1
    shift
    log=$(dirname "$(dirname "$PYTHON")")/pip.log
    setup_say "installing $* ($size to download, which takes minutes; progress: tail -f $log)"
    "$PYTHON" -m pip --version > /dev/null 2>&1 || "$PYTHON" -m ensurepip > "$log" 2>&1
    if ! "$PYTHON" -m pip install --progress-bar off "$@" > "$log" 2>&1; then
        setup_say "error: pip failed, is the package index reachable? $(grep '^ERROR' "$log" | tail -n 1) (all of it: $log)"
        return 1
    fi
}

setup_env

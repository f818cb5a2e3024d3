#!/usr/bin/env bash
# Chromium for the tests of pages (tests/browser.py), from Debian's own packages.
#
#     bash tests/install_browser.sh      # as root; returns at once when it is there
#
# Where it cannot be installed this says why and ends with 1; they then skip.
set -euo pipefail

command -v chromium > /dev/null && exit 0
if ! command -v apt-get > /dev/null || ((EUID != 0)); then
    echo '[browser for tests] not installed: it takes apt-get, and root' >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
echo '[browser for tests] installing chromium' >&2
# The lists of packages are empty in most container images, and old in others.
if ! { apt-get update && apt-get install -y --no-install-recommends chromium; } > "$log" 2>&1; then
    echo "[browser for tests] not installed: $(grep '^E:' "$log" | head -n 1)" >&2
    exit 1
fi

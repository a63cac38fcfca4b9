#!/usr/bin/env bash
# Run the tests that touch torch with other torch versions than the pinned one: scripts/check_torch_versions.sh [2.10 2.15]
# Without arguments: the oldest supported one and the newest that the package index has below the upper bound.
# Each version gets its own environment under build/, which is used again when it is there; pip downloads torch, which
# can be gigabytes.  Other versions warn of other things, so warnings are no errors here.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=2.10
below=2.16
newest() {
    python3 -m pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' |
        grep -E '^[0-9]+\.[0-9]+\.[0-9]+$' | sort -V | awk -F. -v below="${below#2.}" '$1 == 2 && $2 < below' | tail -n 1
}
versions=("$@")
[ $# -gt 0 ] || versions=("$oldest.*" "$(newest)")
mkdir -p build
for version in "${versions[@]}"; do
    case $version in *.*.* | *'*') ;; *) version="$version.*" ;; esac
    env="build/torch-${version%.\*}"
    [ -x "$env/bin/python" ] || python3 -m venv "$env"
    grep -v '^torch==' constraints.txt >"$env/constraints.txt"
    "$env/bin/pip" install -q -c "$env/constraints.txt" "torch==$version" -e '.[tests]'
    "$env/bin/python" -c 'import torch; print("torch", torch.__version__)'
    "$env/bin/python" -m pytest -q -n auto -W default tests/policy tests/lazy tests/backends tests/pytorch tests/training tests/examples
done

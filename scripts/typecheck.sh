#!/usr/bin/env bash
# Check the types of the package and its programs: scripts/typecheck.sh [python].
# mypy does not know that the folder lowering is the package xla_amp.lowering, so it gets a tree in which it is.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(realpath --no-symlinks "${1:-$root/.venv/bin/python}")
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/xla_amp"
ln -s "$root"/xla_amp/* "$tree/xla_amp/"
ln -s "$root/lowering" "$tree/xla_amp/lowering"
ln -s "$root"/examples/*.py "$root"/scripts/*.py "$tree/"
cd "$tree"
"$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p xla_amp
"$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" ./*.py

#!/usr/bin/env bash
# The first hour on a machine with a GPU, without network: scripts/gpu_day.sh [--dry-run] [--parts NAME...] [--again]
# Installs this tree without its dependencies into the Python that is there, unless it can be imported already.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import xla_amp' 2>/dev/null || "$python" -m pip install -q --no-deps --no-build-isolation -e .
exec "$python" scripts/hardware_day.py gpu "$@"

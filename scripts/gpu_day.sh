#!/usr/bin/env bash
# A quarter of an hour on a machine with a GPU, without network:
# scripts/gpu_day.sh [--minutes 12] [--dry-run] [--parts NAME...] [--again]
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/hardware_day.py gpu "$@"

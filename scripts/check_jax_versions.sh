#!/usr/bin/env bash
# Run the tests that touch JAX with another one than the pinned: PYTHON=python3.12 scripts/check_jax_versions.sh [0.11.2]
# Without arguments: the newest 0.11 and 0.12 of the package index; JAX 0.11 and 0.12 need Python 3.12.  Each
# version gets its own environment under build/, with the newest Flax, Orbax and compilers for it; it is used again when
# it is there.  Other versions warn of other things, so warnings are no errors here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.12}
versions=("$@")
[ $# -gt 0 ] || versions=('0.11.*' '0.12.*')
mkdir -p build
for version in "${versions[@]}"; do
    env="build/jax-${version%.\*}"
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    follows='jax|jaxlib|jax-cuda12-p[a-z]*|libtpu|flax|orbax-checkpoint'
    grep -v -E "^($follows)==" constraints.txt >"$env/constraints.txt"
    "$env/bin/pip" install -q -U -c "$env/constraints.txt" "jax==$version" "jaxlib==$version" -e '.[tests]'
    "$env/bin/python" -c 'import jax; print("jax", jax.__version__)'
    "$env/bin/python" -m pytest -q -n auto -W default tests/jax_front tests/stablehlo tests/lowering tests/lazy tests/backends tests/training
done

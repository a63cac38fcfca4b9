#!/usr/bin/env bash
# Run the tests of the torch_xla engine: scripts/torch_xla_env.sh [pytest arguments]
# They need torch_xla 2.9 and the torch that belongs to it, in an environment of their own under build/, which is used
# again when it is there (XLA_AMP_TORCH_XLA_ENV names another place).  The first time pip downloads some 3 GB, most of
# them CUDA libraries that torch's wheel depends on; a GPU is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2.9.0
env=${XLA_AMP_TORCH_XLA_ENV:-build/torch-xla-${version%.*}}
if [ ! -e "$env/complete" ]; then
    python3 -m venv "$env"
    grep -v '^torch==' constraints.txt >"$env/constraints.txt"
    "$env/bin/pip" install -q -c "$env/constraints.txt" "torch==$version" "torch_xla==$version" \
        jax numpy pytest pytest-timeout pytest-xdist expecttest hypothesis absl-py matplotlib rich scikit-learn tqdm
    touch "$env/complete"
fi
# No dependencies: what they are is said above, and torch_xla ties torch to one version.
"$env/bin/pip" install -q --no-deps -e .
export PJRT_DEVICE=${PJRT_DEVICE:-CPU}
"$env/bin/python" -c 'import torch, torch_xla; print("torch", torch.__version__, "torch_xla", torch_xla.__version__)'
exec "$env/bin/python" -m pytest -q "$@" tests/torch_xla_engine tests/engines/test_choice.py

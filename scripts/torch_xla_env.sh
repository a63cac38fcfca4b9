#!/usr/bin/env bash
# Run the tests of the torch_xla engine: scripts/torch_xla_env.sh [pytest arguments]
# They need torch_xla 2.9 and the torch that belongs to it, in an environment of their own under build/, which is used
# again when it is there (XLA_AMP_TORCH_XLA_ENV names another place).  The first time pip downloads some 3 GB, most of
# them CUDA libraries that torch's wheel depends on; 8 GB are on disk in the end, 13 GB while pip unpacks; a GPU is not
# needed.  Where the environment cannot be made nothing has been tested, so that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
env=${XLA_AMP_TORCH_XLA_ENV:-build/torch-xla-2.9}
packages=(pytest pytest-timeout pytest-xdist expecttest hypothesis)

mkdir -p "$env"
exec 9>"$env/lock" # one run at a time: the environment has the package of one tree
flock 9
grep -v '^torch==' constraints.txt >"$env/constraints.txt" # the extra says which torch belongs to torch_xla
wanted=$({ python3 --version; cat "$env/constraints.txt" pyproject.toml; echo "${packages[@]}"; } | sha256sum)
if [ "$(cat "$env/complete" 2>/dev/null)" != "$wanted" ]; then
    free=$(df -Pk "$env" | awk 'NR == 2 { print $4 }')
    if [ ! -x "$env/bin/pytest" ] && [ "$free" -lt 13000000 ]; then
        echo "NOT TESTED: the torch_xla engine. Its environment needs 13 GB at $env, which has $((free / 1000000));" \
            "free some, or name another place in XLA_AMP_TORCH_XLA_ENV" >&2
        exit 1
    fi
    rm -f "$env/complete"
    if ! { python3 -m venv "$env" &&
        "$env/bin/pip" install -q -c "$env/constraints.txt" -e '.[examples,torch-xla]' "${packages[@]}"; }; then
        echo "NOT TESTED: the torch_xla engine. Its environment could not be made at $env" >&2
        exit 1
    fi
    echo "$wanted" >"$env/complete"
else
    "$env/bin/pip" install -q --no-deps -e .
fi
export PJRT_DEVICE=${PJRT_DEVICE:-CPU}
"$env/bin/python" -c 'import torch, torch_xla; print("torch", torch.__version__, "torch_xla", torch_xla.__version__)'
exec "$env/bin/python" -m pytest -q "$@" tests/torch_xla_engine tests/engines/test_choice.py

"""XLA compiler options for steps, by platform.

An option is listed only if XLA's default gives a slower program, or another program than the user wrote.  An option in
``XLA_FLAGS`` is not set here; ``XLA_AMP_COMPILER_OPTIONS`` replaces and adds options
(`xla_amp.common.config.compiler_options`).  JAX accepts options for a whole program only, so torch code inside a JAX
program is compiled with the options of that program.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from xla_amp.common import compiling, config
from xla_amp.lazy.programs import pjrt


class Option(NamedTuple):
    """A row of the table."""

    value: str
    """As XLA reads it: ``"False"``, ``"0"``."""
    why: str
    source: str


OPTIONS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "cpu": {},
        "gpu": {
            "xla_allow_excess_precision": Option(
                "False",
                "If allowed, XLA omits a rounding between two float32 computations, and stores in float32 what the "
                "policy has cast to a low dtype: a third more bytes for a residual network with leaky ReLU.",
                "xla/xla.proto, DebugOptions; tests/training/test_compile_options.py",
            ),
        },
        "tpu": {},
    }
)
"""Platform -> name of the XLA option -> its value."""


def for_platform(platform: str) -> dict[str, str]:
    """``compiler_options`` of `jax.jit` for a program on `platform`.

    The user's options apply to the device only: the CPU backend rejects TPU options.

    Args:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Raises:
        PolicyError: ``XLA_AMP_COMPILER_OPTIONS`` cannot be read.
    """
    named = config.xla_flags()
    ours = {name: option.value for name, option in OPTIONS.get(platform, {}).items()}
    if compiling.runs_few_times():
        ours |= {name: str(value) for name, value in compiling.quick_options(platform, 0).items()}
    ours = {name: value for name, value in ours.items() if name not in named}
    theirs = config.compiler_options() if platform == pjrt.platform() else {}
    return {name: value for name, value in (ours | theirs).items() if value}

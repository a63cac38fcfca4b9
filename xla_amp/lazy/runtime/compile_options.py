"""What XLA is asked for beyond its defaults when a step is compiled, by platform.

An option stands here only where XLA's default gives a slower program, or another one than the user wrote.  Users
change options in two ways, as those of JAX do: what ``XLA_FLAGS`` names is left as it says there, and
``XLA_AMP_COMPILER_OPTIONS`` replaces and adds (`xla_amp.config.compiler_options`).  JAX takes options for a whole
program only, so a recording that becomes a part of a user's program has those of that program.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from xla_amp import config
from xla_amp.lazy.runtime import pjrt


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
                "Allowed, XLA leaves out a rounding between two float32 computations.  What one kernel hands to the "
                "next is then stored in float32 although the policy's casts made it low: for a residual network "
                "with leaky ReLU a third more bytes.",
                "xla/xla.proto, DebugOptions; tests/training/test_compile_options.py",
            ),
        },
        "tpu": {},
    }
)
"""Platform -> name of XLA's option -> what we ask for."""


def for_platform(platform: str) -> dict[str, str]:
    """Options for a program on `platform`, as `jax.jit` takes them (``compiler_options``).

    The user's are for the device: what the host computes beside a TPU would not know TPU's options.

    Raises:
        PolicyError: ``XLA_AMP_COMPILER_OPTIONS`` cannot be read.
    """
    named = config.xla_flags()
    ours = {name: option.value for name, option in OPTIONS.get(platform, {}).items() if name not in named}
    theirs = config.compiler_options() if platform == pjrt.platform() else {}
    return {name: value for name, value in (ours | theirs).items() if value}

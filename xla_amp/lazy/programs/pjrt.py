"""The PJRT device of lazy tensors, its platform, and the compiler options for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax

from xla_amp.common import compiling, config
from xla_amp.errors import DeviceError
from xla_amp.lazy.programs import compilation_cache

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


@functools.cache
def jax_device() -> jax.Device:
    """The JAX device of lazy tensors: the first of the configured platform, or JAX's default.

    Raises:
        DeviceError: the configured platform has no device here.
    """
    wanted = config.platform()
    compilation_cache.start()
    try:
        return jax.local_devices(backend=wanted)[0] if wanted else jax.local_devices()[0]
    except RuntimeError as error:
        raise DeviceError(
            f"JAX has no device of the platform {wanted or 'that JAX_PLATFORMS names'}: {error}. "
            "Unset XLA_AMP_PLATFORM and PJRT_DEVICE to take JAX's default, or install JAX's plugin for it"
        ) from error


_peak = 0


def live_bytes() -> tuple[int, int]:
    """(bytes of JAX's live arrays, their peak), for a platform without memory statistics.

    The peak is that of the calls: one after the first run of each program, and one for each question.
    """
    global _peak
    arrays: list[jax.Array] = jax.live_arrays(jax_device().platform)
    live = sum(array.nbytes for array in arrays)
    _peak = max(_peak, live)
    return live, _peak


def reset_peak() -> None:
    """Lowers the peak of `live_bytes` to what is live now."""
    global _peak
    _peak = 0
    live_bytes()


@functools.cache
def platform() -> str:
    """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
    name: str = jax_device().platform
    return _PLATFORMS.get(name, name)


# ---- compiler options by platform ------------------------------------------------------------------------------------


# If excess precision is allowed, XLA omits a rounding between two float32 computations, and stores in float32 what the
# policy has cast to a low dtype: a third more bytes for a residual network with leaky ReLU (xla/xla.proto,
# DebugOptions).
OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType({"gpu": {"xla_allow_excess_precision": "False"}})
"""Platform -> name of the XLA option -> its value as XLA reads it."""


def compiler_options(of: str) -> dict[str, str]:
    """``compiler_options`` of `jax.jit` for a program on the platform `of`.

    The user's options apply to the device only: the CPU backend rejects TPU options.

    Args:
        of: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Raises:
        PolicyError: ``XLA_AMP_COMPILER_OPTIONS`` cannot be read.
    """
    named = config.xla_flags()
    ours = dict(OPTIONS.get(of, {}))
    if compiling.runs_few_times():
        ours |= {name: str(value) for name, value in compiling.quick_options(of, 0).items()}
    ours = {name: value for name, value in ours.items() if name not in named}
    theirs = config.compiler_options() if of == platform() else {}
    return {name: value for name, value in (ours | theirs).items() if value}

"""The PJRT device of lazy tensors, and its platform."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax

from xla_amp import hardware
from xla_amp.common import config
from xla_amp.errors import DeviceError
from xla_amp.lazy.programs import compilation_cache

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
_absent: tuple[str, str] | None = None
"""Platform and kind of the absent device that a step is exported for."""


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
def counts_memory() -> bool:
    """Whether the platform keeps memory statistics."""
    return bool(jax_device().memory_stats())


def platform() -> str:
    """``"cpu"``, ``"gpu"`` or ``"tpu"``: of the device, or of the absent one that a step is exported for."""
    return _absent[0] if _absent else _present()


def is_absent() -> bool:
    """Whether steps are recorded for a device that is not here (`absent`)."""
    return _absent is not None


def device_kind() -> str:
    """The device by the name that its driver gives it; of an absent one the name of the target, ``"h200"``."""
    return _absent[1] if _absent else str(jax_device().device_kind)


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU, or of the absent one; None for other devices, or where it is not known."""
    if _absent:
        given = hardware.specification(_absent[1]).get("compute") if _absent[1] in hardware.names() else None
        return (int(given[0]), int(given[1])) if given else None
    return hardware.compute_capability(jax_device())


@functools.cache
def _present() -> str:
    name: str = jax_device().platform
    return _PLATFORMS.get(name, name)


@contextlib.contextmanager
def absent(platform: str, kind: str) -> Iterator[None]:
    """Inside, steps are recorded for `platform`, which this machine need not have; they cannot run.

    Args:
        platform: as `platform`.
        kind: as `device_kind`.
    """
    global _absent
    outer, _absent = _absent, (platform, kind)
    try:
        yield
    finally:
        _absent = outer

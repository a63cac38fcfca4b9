"""Checked `torch.autocast` regions for PyTorch's own devices (cuda, cpu, xpu, hpu, mps, torch_tpu's tpu).

torch disables autocast with a warning where it does not support the dtype or the device; here both are errors, but for
float32.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from xla_amp.backends import devices
from xla_amp.common import events
from xla_amp.errors import AutocastWarning, DeviceError, UnsupportedDtypeError

LOW_DTYPES = (torch.bfloat16, torch.float16)
"""Low dtypes that torch's autocast accepts on each of these devices."""


def is_available(device_type: str) -> bool:
    """Whether this torch has autocast for the device type (not whether such a device is present).

    Raises:
        DeviceArgumentError: torch knows no device of that name.
    """
    try:
        return bool(torch.amp.is_autocast_available(device_type))
    except RuntimeError as error:
        raise devices.DeviceArgumentError(
            f"autocast: torch knows no device type {device_type!r}; expected 'cuda', 'cpu', 'xpu', 'hpu', 'mps', "
            "or 'xla' for the active XLA device"
        ) from error


def check_device(device_type: str) -> None:
    """Raises unless a region on `device_type` would have an effect.

    Raises:
        DeviceError: torch has no autocast for it, or it is ``cuda`` and there is no CUDA device.
    """
    if not is_available(device_type):
        raise DeviceError(f"User specified an unsupported autocast device_type '{device_type}'")
    if device_type == "cuda" and not torch.cuda.is_available():
        beside = ""
        if find_spec("torch_xla") is not None:
            beside = " (torch_xla is installed, but autocast('cuda') does not affect tensors on an XLA device)"
        raise DeviceError(
            f"autocast('cuda'): there is no CUDA device, so autocast would do nothing{beside}. Pass the device that "
            "your tensors are on, e.g. autocast(tensor.device) or autocast('xla'), or enabled=False for no "
            "mixed precision"
        )


def check_dtype(device_type: str, dtype: object) -> None:
    """Raises unless `dtype` can be the low dtype on `device_type`.

    Raises:
        UnsupportedDtypeError: it cannot; the message names those that can.
    """
    if dtype not in LOW_DTYPES:
        raise UnsupportedDtypeError(
            f"autocast({device_type!r}, dtype={dtype!r}): expected torch.bfloat16 or torch.float16, got {dtype!r} "
            f"({type(dtype).__name__}); to switch autocast off pass enabled=False"
        )
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise UnsupportedDtypeError(
            "autocast('cuda', dtype=torch.bfloat16): this CUDA device has no bfloat16; pass dtype=torch.float16"
        )


def check_flags(device_type: str, dtype: object, enabled: object, cache_enabled: object) -> bool:
    """Whether a region is enabled: `enabled`, but with the low dtype float32 False and a warning, as torch does.

    Raises:
        TypeError: a flag is not a bool.
    """
    if isinstance(dtype, bool) and isinstance(enabled, torch.dtype):
        raise TypeError(
            f"autocast({device_type!r}, {dtype}, {enabled}): the order is autocast(device, dtype, enabled), torch's; "
            f"torch_xla's is autocast(device, enabled, dtype). Type autocast({device_type!r}, {enabled}, {dtype})"
        )
    for name, flag in (("enabled", enabled), ("cache_enabled", False if cache_enabled is None else cache_enabled)):
        if not isinstance(flag, bool):
            raise TypeError(
                f"autocast({device_type!r}, {name}={flag!r}): expected True or False, got {type(flag).__name__}"
            )
    if enabled and dtype is torch.float32:
        events.warn(
            f"autocast({device_type!r}, dtype=torch.float32): Disabling autocast, whose low dtypes are torch.bfloat16 "
            "and torch.float16. For float32 pass enabled=False",
            AutocastWarning,
        )
        return False
    return bool(enabled)


def enter(region: torch.autocast) -> None:
    """Enters the region of torch, which leaves its state half set if entering fails; here it is restored."""
    name = region.device
    before = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name), torch.is_autocast_cache_enabled()
    depth = _depth()
    try:
        region.__enter__()
    except BaseException:
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(name, before[0])
        torch.set_autocast_dtype(name, before[1])
        torch.set_autocast_cache_enabled(before[2])
        raise


def _depth() -> int:
    """How many regions are open in this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def region(
    device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
) -> torch.autocast:
    """A new checked `torch.autocast`.  New for each entry, because torch keeps the state to restore on the instance.

    Args:
        dtype: low dtype; None is torch's default for the device type.
        enabled: False gives a region without mixed precision, which needs neither the device nor the dtype.
        cache_enabled: whether torch caches casts of weights until the outermost region ends; None leaves it unchanged.

    Raises:
        DeviceError: the region would have no effect.
        UnsupportedDtypeError: the device has no such low dtype.
    """
    if not enabled:
        is_available(device_type)
        return torch.autocast(device_type, None, False, cache_enabled)
    check_device(device_type)
    if dtype is not None:
        check_dtype(device_type, dtype)
    return torch.autocast(device_type, dtype, True, cache_enabled)


def drop_casts_after_steps() -> RemovableHandle:
    """Clears torch's cache of weight casts after every optimizer step, until the handle is removed.

    torch caches a weight's cast until the outermost region ends.  In a region of several training steps, each later
    step would use the weights of the first.
    """
    return register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())

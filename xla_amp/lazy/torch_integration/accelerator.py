"""``torch.accelerator`` for the lazy device: torch asks a C++ allocator and guard, and a Python device has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch

from xla_amp.errors import DeviceError
from xla_amp.lazy.runtime import pjrt
from xla_amp.lazy.runtime.execute import sync
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


def memory_stats() -> dict[str, int]:
    """PJRT's statistics in bytes; where the platform keeps none (XLA:CPU), ``bytes_in_use`` of JAX's live arrays."""
    found = pjrt.jax_device().memory_stats()
    if found:
        return dict(found)
    live = jax.live_arrays(pjrt.jax_device().platform)
    return {"bytes_in_use": sum(array.nbytes for array in live)}


def _statistic(*names: str) -> int:
    stats = memory_stats()
    for name in names:
        if name in stats:
            return stats[name]
    raise DeviceError(
        f"the platform {pjrt.platform()!r} keeps no statistic {' or '.join(names)} of its memory, only "
        f"{', '.join(stats)}: see torch.accelerator.memory_stats()"
    )


def _free_and_total() -> tuple[int, int]:
    total = _statistic("bytes_limit")
    return total - _statistic("bytes_in_use"), total


def _no_reset() -> None:
    raise DeviceError("PJRT's memory statistics count from the start of the process and cannot be reset")


ANSWERS: dict[str, Callable[[], Any]] = {
    "empty_cache": sync,  # XLA's allocator gives nothing back; what was recorded frees what it holds
    "get_memory_info": _free_and_total,
    "max_memory_allocated": lambda: _statistic("peak_bytes_in_use"),
    "max_memory_reserved": lambda: _statistic("peak_pool_bytes", "peak_bytes_in_use"),
    "memory_allocated": lambda: _statistic("bytes_in_use"),
    "memory_reserved": lambda: _statistic("pool_bytes", "bytes_in_use"),
    "memory_stats": memory_stats,
    "reset_accumulated_memory_stats": _no_reset,
    "reset_peak_memory_stats": _no_reset,
    "synchronize": lambda: sync(wait=True),
}
"""Function of torch.accelerator -> what it does for the lazy device (bytes)."""


def install() -> None:
    """Has the functions of ``torch.accelerator`` answer for the lazy device; other devices are asked as ever."""
    for name, answer in ANSWERS.items():
        for module in (torch.accelerator, getattr(torch.accelerator, "memory", None)):
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, _routed(original, answer))


def _routed(original: Callable[..., Any], answer: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if given is None or isinstance(given, int):
            kind = torch.accelerator.current_accelerator()
            lazy = kind is not None and kind.type == DEVICE_TYPE
        else:
            lazy = torch.device(given).type == DEVICE_TYPE
        return answer() if lazy else original(*args, **kwargs)

    return routed

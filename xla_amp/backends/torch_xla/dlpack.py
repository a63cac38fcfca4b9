"""Zero-copy exchange of arrays between torch_xla and JAX through DLPack.

torch_xla ends the process when it exports a value that is not computed yet (an unexecuted graph, or an execution that
has not finished), so exporting waits for the tensor first.  torch_xla 2.9 imports CPU memory only, and
PJRT's TPU client exports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
import torch_xla
import torch_xla.utils.dlpack as dlpack

from xla_amp.backends.torch_xla import DEVICE_TYPE, platform
from xla_amp.errors import EngineError

_EXPORTS = ("cpu", "gpu")
"""Platforms whose memory torch_xla exports."""
_IMPORTS = ("cpu",)
"""Platforms whose memory torch_xla imports."""


class _Capsule:
    """A capsule with its device, as `jax.dlpack.from_dlpack` expects it."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The tensor's value as a JAX array in the same memory; waits for it.

    The array must not outlive the tensor's next in-place change by torch_xla, which may reuse the memory.

    Raises:
        TypeError: not a tensor on torch_xla's device.
        EngineError: the platform shares no memory; go through ``tensor.cpu()``.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != DEVICE_TYPE:
        got = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"to_jax expects a tensor on torch_xla's device, got {got}")
    _check("to_jax", _EXPORTS)
    value = tensor.detach()
    torch_xla._XLAC._xla_sync_multi([value], [], True)
    kind = (2, tensor.device.index or 0) if platform() == "gpu" else (1, 0)  # DLPack's numbers: kDLCUDA, kDLCPU
    array: jax.Array = jax.dlpack.from_dlpack(_Capsule(dlpack.to_dlpack(value), kind))
    return array


def from_jax(array: jax.Array) -> torch.Tensor:
    """A JAX array as a tensor on torch_xla's device in the same memory.

    Raises:
        TypeError: not a JAX array.
        EngineError: the platform shares no memory, or the array is on another platform.
    """
    if not isinstance(array, jax.Array):
        raise TypeError(f"from_jax expects a jax.Array, got {type(array).__name__}")
    _check("from_jax", _IMPORTS)
    if array.platform() not in _IMPORTS:
        raise EngineError(
            f"from_jax: the array is on {array.platform()!r} and torch_xla on {platform()!r}; move it with "
            "jax.device_put first"
        )
    array.block_until_ready()
    tensor: torch.Tensor = dlpack.from_dlpack(array.__dlpack__())
    return tensor


def _check(caller: str, platforms: Sequence[str]) -> None:
    if platform() not in platforms:
        raise EngineError(
            f"{caller}: torch_xla's client for {platform()!r} shares no memory; go through the host, "
            "e.g. jax.numpy.asarray(tensor.cpu().numpy())"
        )

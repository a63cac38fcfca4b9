"""Refuse nested tensors of the layout strided; those of the layout jagged are made of tensors of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from xla_amp.errors import DeviceError
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


def refuse(*_: Any, **__: Any) -> NoReturn:
    """A kernel, and the fallback for operations on such tensors, which torch can make in ways that call no kernel.

    Raises:
        DeviceError: always.
    """
    raise DeviceError(
        f"nested tensors of the layout torch.strided do not exist on the device {DEVICE_TYPE!r}. Use "
        "torch.nested.nested_tensor(..., layout=torch.jagged), or a padded tensor (torch.nested.to_padded_tensor on "
        "the CPU) with a mask"
    )


KERNELS: dict[str, Callable[..., Any]] = {
    "_nested_tensor_from_tensor_list": refuse,
    "_nested_tensor_from_mask": refuse,
}
"""ATen name -> kernel."""

"""Refuse nested tensors of the layout strided; those of the layout jagged are made of tensors of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

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


def replace_constructors() -> None:
    """Makes torch's functions refuse a result on the device; they make it of CPU tensors without calling a kernel."""

    def checked(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = original(*args, **kwargs)
            if made.layout is torch.strided and made.device.type == DEVICE_TYPE:
                refuse()
            return made

        return make

    torch.nested.nested_tensor = checked(torch.nested.nested_tensor)
    torch.nested.as_nested_tensor = checked(torch.nested.as_nested_tensor)

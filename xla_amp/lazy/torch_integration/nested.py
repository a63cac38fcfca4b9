"""Refuse what the device cannot give torch: nested tensors of the layout strided, and code of inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from xla_amp.errors import DeviceError, EngineError
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


# ---- inductor --------------------------------------------------------------------------------------------------------


def _refuse() -> NoReturn:
    raise EngineError(
        "torch.compile: inductor, its default backend, generates no code for the device 'jax'. Write "
        "torch.compile(model, backend='xla_amp')"
    )


class _Refusing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def __call__(cls, *_: Any, **__: Any) -> Any:
        _refuse()


class NoCodeGenerator(metaclass=_Refusing):
    """Raises where inductor begins to use it; the message names the backend that compiles for the device."""

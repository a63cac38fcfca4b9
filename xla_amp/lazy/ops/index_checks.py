"""Check the range of uploaded indices before an operation is recorded.

An XLA program cannot raise: on the device an out-of-range read returns the nearest element or NaN, and an out-of-range
write is dropped.  Uploaded indices, such as the tokens and labels of a batch, are checked in the host's copy
(`transfer.copies`); indices that the device computes are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_amp.lazy.ops import host_eval
from xla_amp.lazy.runtime import mesh
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

Kernel = Callable[..., Any]


def on_host(index: Any) -> torch.Tensor | None:
    """The host's copy of an index tensor, or None; computes nothing and does not wait."""
    if not isinstance(index, torch.Tensor) or index.device.type != DEVICE_TYPE or mesh.active is not None:
        return None
    if not index.numel() or index.dtype not in (torch.int32, torch.int64):
        return None
    return host_eval.copy_of(index)


def _checked(
    operation: str, name: str, position: int, extent: Callable[..., int], but: Callable[..., int | None]
) -> Callable[[Kernel], Kernel]:
    def around(kernel: Kernel) -> Kernel:
        def checked(*args: Any, **kwargs: Any) -> Any:
            index = args[position] if position < len(args) else kwargs.get(name)
            values = on_host(index)
            if values is not None:
                _compare(operation, name, values, extent(*args, **kwargs), but(*args, **kwargs))
            return kernel(*args, **kwargs)

        return checked

    return around


def _compare(operation: str, name: str, values: torch.Tensor, extent: int, ignored: int | None) -> None:
    least, greatest = (int(value) for value in values.aminmax())
    if least >= 0 and greatest < extent:
        return
    wrong = (values < 0) | (values >= extent)
    if ignored is not None:
        wrong &= values != ignored
    if bool(wrong.any()):
        raise IndexError(
            f"{operation}: expected {name} from 0 to {extent - 1}, but got {int(values[wrong][0])}"
            + ("" if ignored is None else f" (and it is not ignore_index, which is {ignored})")
        )


def _rows(weight: torch.Tensor, *_: Any, **__: Any) -> int:
    return weight.shape[0]


def _along(self: torch.Tensor, dim: int, *_: Any, **__: Any) -> int:
    return self.shape[dim] if self.dim() else 1


def _classes(self: torch.Tensor, *_: Any, **__: Any) -> int:
    return self.shape[1] if self.dim() > 1 else self.shape[0]


def _none(*_: Any, **__: Any) -> None:
    return None


def _ignored(
    self: torch.Tensor, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, **_: Any
) -> int:
    return ignore_index


CHECKED: dict[str, Callable[[Kernel], Kernel]] = {
    "embedding": _checked("embedding", "indices", 1, _rows, _none),
    "gather": _checked("gather", "index", 2, _along, _none),
    "index_select": _checked("index_select", "index", 2, _along, _none),
    "nll_loss2d_forward": _checked("nll_loss2d", "target", 1, _classes, _ignored),
    "nll_loss_forward": _checked("nll_loss", "target", 1, _classes, _ignored),
    **{
        name: _checked(name.partition(".")[0], "index", 2, _along, _none)
        for name in ("scatter.src", "scatter.value", "scatter_add", "scatter_.src", "scatter_.value", "scatter_add_")
    },
}
"""ATen name -> wrapper of its kernel."""

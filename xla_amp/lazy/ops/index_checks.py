"""Check the range of uploaded indices before an operation is recorded.

An XLA program cannot raise: on the device an out-of-range read returns the nearest element or NaN, and an out-of-range
write is dropped.  Uploaded indices, such as the tokens and labels of a batch, are checked in the host's copy
(`host_copies`), in every operation; indices that the device computes are not checked, nor are uploads above 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xla_amp.lazy.ops import host_eval
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

Kernel = Callable[..., Any]


def on_host(index: Any) -> torch.Tensor | None:
    """The host's copy of an index tensor, or None; computes nothing and does not wait."""
    if not isinstance(index, torch.Tensor) or not index.numel() or index.dtype not in (torch.int32, torch.int64):
        return None
    if index.device.type != DEVICE_TYPE:
        return index if index.device.type == "cpu" else None
    return host_eval.copy_of(index) if mesh.active is None else None


Extent = Callable[..., int]


def _along(self: torch.Tensor, dim: int, *_: Any, **__: Any) -> int:
    return self.size(dim) if self.dim() else 1


def _classes(self: torch.Tensor, *_: Any, **__: Any) -> int:
    return self.shape[1] if self.dim() > 1 else self.shape[0]


def _elements(self: torch.Tensor, *_: Any, **__: Any) -> int:
    return self.numel()


def _last(self: torch.Tensor, *_: Any, **__: Any) -> int:
    return self.shape[-1] if self.dim() else 1


def _rows(weight: torch.Tensor, *_: Any, **__: Any) -> int:
    return weight.shape[0] if weight.dim() else 1


def _ignored(
    self: torch.Tensor, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, **_: Any
) -> int:
    return ignore_index


class Check(NamedTuple):
    """How the indices of an operation are checked."""

    names: tuple[str, ...]
    """ATen names, with overload."""
    argument: str
    position: int
    extent: Extent
    error: type[Exception] = IndexError
    """What torch raises."""
    negative: bool = False
    """Whether negative indices count from the end."""
    ignored: Callable[..., int | None] = lambda *_, **__: None


def _forms(*names: str) -> tuple[str, ...]:
    """The names with those of the in-place forms."""
    return (*names, *(f"{base}_" + dot + overload for base, dot, overload in (n.partition(".") for n in names)))


CHECKS = (
    Check(("embedding",), "indices", 1, _rows),
    Check(("_embedding_bag", "_embedding_bag_forward_only"), "indices", 1, _rows, RuntimeError),
    Check(("gather",), "index", 2, _along, RuntimeError),
    Check(_forms("index_add"), "index", 2, _along, RuntimeError),
    Check(_forms("index_copy", "index_reduce"), "index", 2, _along),
    Check(_forms("index_fill.int_Scalar", "index_fill.int_Tensor"), "index", 2, _along, negative=True),
    Check(("index_select",), "index", 2, _along),
    Check(("multi_margin_loss",), "target", 1, _last, RuntimeError),
    Check(("nll_loss2d_forward", "nll_loss_forward"), "target", 1, _classes, ignored=_ignored),
    Check(_forms("put"), "index", 1, _elements, negative=True),
    Check(
        _forms(
            "scatter.reduce",
            "scatter.src",
            "scatter.value",
            "scatter.value_reduce",
            "scatter_add",
            "scatter_reduce.two",
        ),
        "index",
        2,
        _along,
        RuntimeError,
    ),
    Check(("take",), "index", 1, _elements, negative=True),
)


def _compare(operation: str, check: Check, values: torch.Tensor, extent: int, ignored: int | None) -> None:
    start = -extent if check.negative else 0
    least, greatest = (int(value) for value in values.aminmax())
    if least >= start and greatest < extent:
        return
    wrong = (values < start) | (values >= extent)
    if ignored is not None:
        wrong &= values != ignored
    if bool(wrong.any()):
        raise check.error(
            f"{operation}: expected {check.argument} from {start} to {extent - 1}, but got {int(values[wrong][0])}"
            + ("" if ignored is None else f" (and it is not ignore_index, which is {ignored})")
        )


def _checked(name: str, check: Check) -> Callable[[Kernel], Kernel]:
    operation = name.partition(".")[0].removesuffix("_forward")

    def around(kernel: Kernel) -> Kernel:
        def checked(*args: Any, **kwargs: Any) -> Any:
            index = args[check.position] if check.position < len(args) else kwargs.get(check.argument)
            values = on_host(index)
            if values is not None:
                _compare(operation, check, values, check.extent(*args, **kwargs), check.ignored(*args, **kwargs))
            return kernel(*args, **kwargs)

        return checked

    return around


_OF_SEVERAL = Check(("index.Tensor",), "indices", 1, _along, negative=True)


def check_several(kernel: Kernel) -> Kernel:
    """Checks the list of indices of ``x[i, j]`` and ``x[i, j] = v``, one for each dimension; masks take several."""

    def checked(self: torch.Tensor, indices: Any, *rest: Any, **options: Any) -> Any:
        dim = 0
        for index in indices:
            masks = index is not None and index.dtype in (torch.bool, torch.uint8)
            values = None if masks or dim >= self.dim() else on_host(index)
            if values is not None:
                _compare("index", _OF_SEVERAL, values, self.shape[dim], None)
            dim += index.dim() if masks else 1
        return kernel(self, indices, *rest, **options)

    return checked


CHECKED: dict[str, Callable[[Kernel], Kernel]] = {
    "index.Tensor": check_several,
    **{name: _checked(name, check) for check in CHECKS for name in check.names},
}
"""ATen name -> wrapper of its kernel."""

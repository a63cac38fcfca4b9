"""Check the range of uploaded indices before an operation is recorded.

An XLA program cannot raise: on the device an out-of-range read returns the nearest element or NaN, and an out-of-range
write is dropped.  Uploaded indices, such as the tokens and labels of a batch, are checked in the host's copy
(`dtypes.copies`), in every operation; indices that the device computes are not checked, nor are uploads above 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xla_amp.lazy.ops.operators import Wrapper, before
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import host_values
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


def on_host(index: Any) -> torch.Tensor | None:
    """The host's copy of an index tensor, or None; computes nothing and does not wait."""
    if not isinstance(index, torch.Tensor) or not index.numel() or index.dtype not in (torch.int32, torch.int64):
        return None
    if index.device.type != DEVICE_TYPE:
        return index if index.device.type == "cpu" else None
    return host_values.copy_of(index) if mesh.active is None else None


def _size(x: torch.Tensor, dim: int) -> int:
    return x.size(dim) if x.dim() else 1


def _along(self: torch.Tensor, dim: int, *_: Any) -> int:
    return _size(self, dim)


def _elements(self: torch.Tensor, *_: Any) -> int:
    return self.numel()


class IndexRule(NamedTuple):
    """How the indices of operations are checked."""

    operations: str
    """ATen names of the functional variants, with overload."""
    argument: str
    position: int
    extent: Callable[..., int]
    error: type[Exception] = IndexError
    """What torch raises."""
    negative: bool = False
    """Whether negative indices count from the end."""
    ignored: int | None = None
    """Position of the argument whose value is no index."""


RULES = (
    IndexRule("embedding", "indices", 1, lambda weight, *_: _size(weight, 0)),
    IndexRule("_embedding_bag _embedding_bag_forward_only", "indices", 1, lambda x, *_: _size(x, 0), RuntimeError),
    IndexRule("gather index_add", "index", 2, _along, RuntimeError),
    IndexRule("index_copy index_reduce index_select", "index", 2, _along),
    IndexRule("index_fill.int_Scalar index_fill.int_Tensor", "index", 2, _along, negative=True),
    IndexRule(
        "nll_loss2d_forward nll_loss_forward", "target", 1, lambda x, *_: _size(x, min(1, x.dim() - 1)), ignored=4
    ),
    IndexRule("put take", "index", 1, _elements, negative=True),
    IndexRule(
        "scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add scatter_reduce.two",
        "index",
        2,
        _along,
        RuntimeError,
    ),
)


def _compare(operation: str, rule: IndexRule, values: torch.Tensor, extent: int, ignored: int | None) -> None:
    start = -extent if rule.negative else 0
    least, greatest = (int(value) for value in values.aminmax())
    if least >= start and greatest < extent:
        return
    wrong = (values < start) | (values >= extent)
    if ignored is not None:
        wrong &= values != ignored
    if bool(wrong.any()):
        raise rule.error(
            f"{operation}: expected {rule.argument} from {start} to {extent - 1}, but got {int(values[wrong][0])}"
            + ("" if ignored is None else f" (and it is not ignore_index, which is {ignored})")
        )


def _checked(name: str, rule: IndexRule) -> Wrapper:
    operation = name.partition(".")[0].removesuffix("_forward")

    def check(*args: Any, **options: Any) -> None:
        values = on_host(args[rule.position])
        if values is not None:
            ignored = None if rule.ignored is None else args[rule.ignored]
            _compare(operation, rule, values, rule.extent(*args), ignored)

    return before(check)


_OF_SEVERAL = IndexRule("index.Tensor", "indices", 1, _along, negative=True)


@before
def check_several(self: torch.Tensor, indices: Any, *rest: Any, **options: Any) -> None:
    """Checks the list of indices of ``x[i, j]`` and ``x[i, j] = v``, one for each dimension; masks take several."""
    dim = 0
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        values = None if masks or dim >= self.dim() else on_host(index)
        if values is not None:
            _compare("index", _OF_SEVERAL, values, self.shape[dim], None)
        dim += index.dim() if masks else 1


def _inplace(name: str) -> str:
    base, dot, overload = name.partition(".")
    return f"{base}_{dot}{overload}"


CHECKED: dict[str, Wrapper] = {
    each: _checked(n, rule) for rule in RULES for n in rule.operations.split() for each in (n, _inplace(n))
}
"""ATen name -> wrapper of its kernel; some have no in-place variant."""

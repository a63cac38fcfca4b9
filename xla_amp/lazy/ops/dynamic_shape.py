"""Operations whose result has a data-dependent size.

XLA compiles for fixed sizes, so these are computed on the host: the trace is flushed, the operands are downloaded and
the results are uploaded.  Each call counts in ``metrics.host_syncs``, and the first one of each operation warns.  If
the host can compute the operands (`host_values`), as a mask of uploaded labels, there is no download and no wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_amp.common import events
from xla_amp.lazy.ops.operators import KernelTable
from xla_amp.lazy.tensors import host_values, tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

aten = torch.ops.aten
KERNELS = KernelTable()
"""ATen name -> kernel."""

ON_HOST = (
    "_unique",
    "_unique2",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
)
"""Operations that run on the CPU."""

_announced: set[str] = set()


def announce(name: str) -> None:
    """Warns, once for each operation, that the size of its result depends on data."""
    if name in _announced:
        return
    _announced.add(name)
    gradient = None if events.user_frame() is not None else torch._C._current_autograd_node()
    if gradient is not None:  # torch's formula of a gradient, in a thread without a line of the user's
        events.warn(
            f"torch's formula of a gradient ({gradient.name()}) asks for a result whose size depends on data ({name}): "
            "each backward pass runs what was recorded and waits for it. See docs/pytorch.md#what-ends-a-step",
            at=(f"<{gradient.name()}>", 0),
        )
        return
    events.warn(
        f"the size of what {name} returns depends on data: each call runs what was recorded and waits for it. Inside a "
        "training step, prefer an operation of fixed size (torch.where, nonzero_static, a mask that multiplies)",
    )


def _to_host(value: Any, name: str) -> Any:
    """`value` with tensors of the device read to the CPU, for the operation `name`."""
    if not isinstance(value, torch.Tensor) or value.device.type != DEVICE_TYPE:
        return value
    found = host_values.value(value)
    if found is None:
        announce(name)
        found = tensor_io.to_host(value)
    return found


def _to_device(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_to_device, value))
    return transfer.to_device(value) if isinstance(value, torch.Tensor) else value


def _on_host(name: str, *args: Any, **kwargs: Any) -> Any:
    operator = getattr(aten, name).default
    options = {key: _to_host(value, name) for key, value in kwargs.items()}
    return _to_device(operator(*(_to_host(value, name) for value in args), **options))


KERNELS.update({name: functools.partial(_on_host, name) for name in ON_HOST})


@KERNELS.implements("bincount")
def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    numbers = _to_host(self, "bincount")  # the greatest decides the size; weights stay on the device
    empty = None if weights is None else torch.zeros(weights.shape, dtype=weights.dtype)
    counts: torch.Tensor = _to_device(aten.bincount(numbers, empty, minlength))
    return counts if weights is None else counts.index_add_(0, self.to(torch.int64), weights.to(counts))


@KERNELS.implements("masked_select")
def _masked_select(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    self, mask = torch.broadcast_tensors(self, mask)
    return self.reshape(-1).index_select(0, positions(mask.reshape(-1), "masked_select").view(-1))


def positions(mask: torch.Tensor, name: str) -> torch.Tensor:
    """Indices where `mask` is true, int64[count, dimensions], read for the operation `name`."""
    return transfer.to_device(torch.nonzero(_to_host(mask, name)))


def expand_masks(index: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The ``index.Tensor`` kernel `index`, with boolean masks converted to indices (a host sync for their count)."""

    def indexed(self: torch.Tensor, indices: Any) -> torch.Tensor:
        expanded: list[Any] = []
        for i in indices:
            if i is not None and i.dtype in (torch.bool, torch.uint8):
                expanded += positions(i.to(self.device), "indexing with a mask").unbind(1)
            else:
                expanded.append(i if i is None or i.device.type == DEVICE_TYPE else i.to(self.device))
        return index(self, expanded)

    return indexed


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """``torchvision::nms``, int64[boxes kept], by torchvision's kernel of the CPU, which lacks half types."""
    given = (_to_host(x, "torchvision::nms") for x in (dets, scores))
    kept: torch.Tensor = torch.ops.torchvision.nms(*(x if x.itemsize > 2 else x.float() for x in given), iou_threshold)
    return transfer.to_device(kept)


def find_length(repeat: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The ``repeat_interleave.Tensor`` kernel `repeat`, with the length of the result read from the data by default."""

    def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
        if output_size is not None:
            return repeat(repeats, output_size=output_size)
        known_repeats = _to_host(repeats, "repeat_interleave without output_size")
        return transfer.to_device(aten.repeat_interleave.Tensor(known_repeats))

    return repeat_interleave

"""What the kernels of some operations do with their arguments before anything is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_amp.lazy.graph.buffer import Poisoned
from xla_amp.lazy.ops.index_checks import CHECKED
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

Kernel = Callable[..., Any]


def _take_indices_along(kernel: Kernel) -> Kernel:
    """``x[i] = v`` takes indices from the CPU, as on every device of torch."""

    def index_put(self: torch.Tensor, indices: Any, *rest: Any, **options: Any) -> Any:
        moved = [i if i is None or i.device.type == DEVICE_TYPE else i.to(self.device) for i in indices]
        return kernel(self, moved, *rest, **options)

    return index_put


def _revive(tensor: torch.Tensor) -> None:
    buffer = tensor.untyped_storage()._xla_amp  # type: ignore[attr-defined]
    whole = buffer is not None and tensor.shape == buffer.spec.shape and tensor.is_contiguous()
    if whole and buffer.number < 0 and type(buffer.array) is Poisoned:
        buffer.array = None  # memory never written


def _overwrite(kernel: Kernel) -> Kernel:
    """A tensor whose value a failed step took gets a new one from an operation that does not look at the old one."""

    def overwriting(self: Any, *rest: Any, **options: Any) -> Any:
        for tensor in self if isinstance(self, (list, tuple)) else (self,):
            _revive(tensor)
        return kernel(self, *rest, **options)

    return overwriting


PREPARED: dict[str, Callable[[Kernel], Kernel]] = {
    **CHECKED,
    **dict.fromkeys(("_index_put_impl_", "_unsafe_index_put", "index_put", "index_put_"), _take_indices_along),
    **dict.fromkeys(
        (
            "_foreach_zero_",
            "bernoulli_.Tensor",
            "bernoulli_.float",
            "cauchy_",
            "exponential_",
            "fill_.Scalar",
            "fill_.Tensor",
            "geometric_",
            "log_normal_",
            "normal_",
            "random_",
            "random_.from",
            "random_.to",
            "uniform_",
            "zero_",
        ),
        _overwrite,
    ),
}
"""ATen name -> what is put around its kernel."""

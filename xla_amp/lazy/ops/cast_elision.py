"""Operands that autocast leaves as they are, because the operation that reads them casts them by itself.

A cast is two operations to record, one in each direction, and most of those of a network of convolutions stand between
a ReLU and a convolution, or a convolution and a batch norm that is to be computed in float32.  Where the lowering has
`follows`, the operation takes such an operand uncast and gives its gradient in the operand's own dtype, with the same
numbers.  Only where what autograd then keeps is no larger: `ROWS` says when.  A weight is always cast: an optimizer may
change it before the backward pass, which needs it as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from xla_amp.lazy.ops.composites import taken_apart
from xla_amp.types import Cast


class Row(NamedTuple):
    """Which operand of an operation may stay as it is."""

    cast: Cast
    """The policy's cast that would change it."""
    made_by: frozenset[str]
    """Names of the gradients of what may have made it."""
    leader: int
    """Place of the argument whose dtype the operand, which comes first, then takes."""
    missing: int | None = None
    """Place of an argument that must not be given."""
    call: Callable[..., Any] | None = None
    """What to call then instead of the operation."""


def _batch_norm(*arguments: Any) -> torch.Tensor:
    # What torch's composite comes to by way of three more.
    *operands, _cudnn_enabled = arguments
    return torch.native_batch_norm(*operands)[0]


_KEPT = frozenset(("ReluBackward0", "SigmoidBackward0", "TanhBackward0"))
# torch compares a bias's dtype with the input's before `convolution` is reached.
_CONVOLUTION = Row("low", _KEPT, leader=1, missing=2)
ROWS: Mapping[str, Row] = MappingProxyType(
    {
        # Autograd keeps these operands anyway, for their own gradients, which are made of the result (PyTorch's
        # derivatives.yaml); of anything else the low cast is what should be kept.
        "conv1d": _CONVOLUTION,
        "conv2d": _CONVOLUTION,
        "conv3d": _CONVOLUTION,
        # Low already: half of what its float32 form takes.
        "batch_norm": Row("fp32", frozenset(("ConvolutionBackward0",)), leader=1, call=_batch_norm),
    }
)
"""Operation, as policies call it -> its row."""

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_current_node = torch._C._current_autograd_node


class _Here(threading.local):
    """What this thread is doing."""

    calling = False


_here = _Here()


def may_stay(operand: Any, made_by: frozenset[str]) -> bool:
    """Whether nobody sees the difference: one of `made_by` is its gradient, and no transform, mode or hook is shown
    operations, or what autograd keeps of them.  An operand without elements torch may treat in a way of its own."""
    return (
        type(operand) is torch.Tensor
        and (gradient := operand.grad_fn) is not None
        and gradient.name() in made_by
        and operand.numel() > 0
        and not taken_apart()
        and _top_hooks(False) is None
    )


def caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose kernel may meet an uncast operand."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _here.calling = True
        try:
            return function(*args, **kwargs)
        finally:
            _here.calling = False

    return call


def is_called() -> bool:
    """Whether a call is under way that leaves an operand uncast."""
    return _here.calling


def is_expected() -> bool:
    """Whether an operand of another dtype may be met now: such a call is under way, or the derivative of one."""
    return is_called() or _current_node() is not None

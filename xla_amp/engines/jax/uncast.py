"""Operands that autocast leaves as they are, because the operation that reads them casts them by itself.

A cast is two operations to record, one in each direction, and half of those of a network of convolutions stand between
a ReLU and a convolution.  Where the lowering has `follows`, the operation takes such an operand uncast and gives its
gradient in the operand's own dtype, with the same numbers.  Only where autograd keeps the operand anyway, for the
gradient of what made it: of anything else the low cast is what should be kept, and a weight that an optimizer changes
before the backward pass must have been cast before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from xla_amp.engines.jax.composites import taken_apart

PLACES: Mapping[str, tuple[int, int, int]] = MappingProxyType(dict.fromkeys(("conv1d", "conv2d", "conv3d"), (0, 1, 2)))
"""Operation, as policies call it -> places of the operand, of the one whose dtype it then takes, and of one that must
be missing.

Each hands its input and its weight on to ``convolution``, which has `follows`; torch compares the input's dtype with
that of a bias on the way.
"""

KEPT = frozenset(("ReluBackward0", "SigmoidBackward0", "TanhBackward0"))
"""Gradients that are made of the operation's result.  Source: PyTorch's derivatives.yaml."""

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_current_node = torch._C._current_autograd_node


class _Here(threading.local):
    """What this thread is doing."""

    calling = False


_here = _Here()


def may_stay(operand: Any) -> bool:
    """Whether nobody sees the difference: it is kept anyway, and no transform, mode or hook is shown operations, or
    what autograd keeps of them."""
    return (
        type(operand) is torch.Tensor
        and (made_by := operand.grad_fn) is not None
        and made_by.name() in KEPT
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


def is_expected() -> bool:
    """Whether an operand of another dtype may be met now: such a call is under way, or the derivative of one."""
    return _here.calling or _current_node() is not None

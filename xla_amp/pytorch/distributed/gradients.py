"""Gradients and parameters of replicas in several processes: averages, and copies of the first process's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_amp.common import arguments
from xla_amp.engines import base, devices
from xla_amp.pytorch.distributed import xm_collectives

__all__ = ["broadcast_master_param", "reduce_gradients"]


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Copies the first process's parameters and buffers to all others, and ends the step."""
    xm_collectives.collective_broadcast([*model.parameters(), *model.buffers()], pin_layout=False)
    devices.engine().sync()


def reduce_gradients(
    optimizer: torch.optim.Optimizer,
    groups: xm_collectives.Groups = None,
    pin_layout: bool = True,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Averages the gradients over all processes, in place.

    Call it before `GradScaler.unscale_` and `step`, which check the result for inf and NaN.  A sparse gradient gets the
    entries of all processes, uncoalesced; each process must have the same number of entries.

    Args:
        optimizer: whose gradients.
        groups: as `all_reduce`.
        pin_layout: torch_xla's option of that name.
        dtype: the dtype in which floating gradients are sent and added; None is float32, and float64 for those of
            float64.  ``torch.bfloat16`` halves the traffic.  A sum that overflows in it is inf, even if each process's
            part is finite, and the step is skipped on all.

    Raises:
        TypeError: `dtype` is not a floating dtype of 16 bits or more.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(f"reduce_gradients(dtype={dtype!r}): {arguments.SUM_DTYPE.format('torch')}")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"reduce_gradients(optimizer): expected an optimizer of torch, got {optimizer!r}")
    average([p for group in optimizer.param_groups for p in group["params"]], groups, pin_layout, dtype=dtype)


def average(
    parameters: Sequence[torch.Tensor],
    groups: xm_collectives.Groups = None,
    pin_layout: bool = True,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """`reduce_gradients` of the gradients of these parameters, as far as they have one."""
    checked = xm_collectives.checked_groups("reduce_gradients", groups)
    count = xm_collectives.group_size(checked)
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if count == 1 or not found:
        return
    pairs = [(gradient, _sum_dtype(gradient.dtype, dtype)) for gradient in found]

    def mean(total: torch.Tensor) -> torch.Tensor:
        low = total.is_floating_point() and total.dtype.itemsize < 4
        # Before a division XLA:GPU does not put all gradients into one collective.
        return (total.float() if low else total) * (1.0 / count)

    dense = [(gradient, wanted) for gradient, wanted in pairs if not gradient.is_sparse]
    with torch.no_grad():
        # One collective for all gradients.
        options = {"reduce_type": xm_collectives.REDUCE_SUM, "pin_layout": pin_layout}
        sent = [gradient.to(wanted) for gradient, wanted in dense]
        reduced = base.processes().collective("all_reduce", sent, checked, **options)
        for (gradient, _), value in zip(dense, reduced, strict=True):
            gradient.copy_(mean(value))
        for gradient, wanted in pairs:
            if gradient.is_sparse:  # a sum of sparse tensors is all their entries
                entries = gradient.coalesce()
                values = xm_collectives.all_gather(entries.values().to(wanted), 0, groups, None, pin_layout)
                indices = xm_collectives.all_gather(entries.indices(), 1, groups, None, pin_layout)
                joined = torch.sparse_coo_tensor(
                    indices, mean(values).to(gradient.dtype), gradient.shape, check_invariants=False
                )
                gradient.copy_(joined)


def _sum_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of the dtype `own` are sent and added."""
    return (asked or torch.promote_types(own, torch.float32)) if own.is_floating_point else own


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that `optimizer` would apply, as the tensors themselves."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

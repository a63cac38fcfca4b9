"""Collectives between processes: those of ``torch_xla.core.xla_model``.

Each is recorded as an operation of the step: no process runs or waits before the step ends.  In a single process they
return copies.  None is differentiable, as in torch_xla: reduce gradients, not losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from xla_amp.engines import base

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "REDUCE_TYPES",
    "all_gather",
    "all_reduce",
    "collective_broadcast",
    "reduce_scatter",
]

REDUCE_TYPES = ("sum", "mul", "and", "or", "min", "max")
"""Reductions of `all_reduce`, also as REDUCE_SUM and so on, as in torch_xla."""
REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = REDUCE_TYPES

Groups = Sequence[Sequence[int]] | None
"""Groups of ranks that communicate, such as ``[[0, 1], [2, 3]]``; None is one group of all."""


def checked_groups(call: str, groups: Groups) -> tuple[tuple[int, ...], ...] | None:
    """The groups as tuples of numbers; `call` names the function in errors.

    Raises:
        ValueError: groups that do not hold each rank once, or are of different sizes.
    """
    if groups is None:
        return None
    found = tuple(tuple(int(rank) for rank in group) for group in groups)
    world = base.processes().world_size()
    if sorted(rank for group in found for rank in group) != list(range(world)) or len(set(map(len, found))) != 1:
        raise ValueError(
            f"{call}(groups={[list(group) for group in found]}): expected groups of one size in which each of the "
            f"processes 0 to {world - 1} is once, e.g. [{list(range(world))}]"
        )
    return found


def group_size(groups: tuple[tuple[int, ...], ...] | None) -> int:
    """Processes in each of the groups."""
    return base.processes().world_size() if groups is None else len(groups[0])


def _dimension(call: str, name: str, tensor: torch.Tensor, dim: int, parts: int = 1) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{call}: expected a tensor, got {tensor!r} ({type(tensor).__name__})")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{call}({name}={dim}): there is no such dimension in a tensor of shape {list(tensor.shape)}")
    dim %= tensor.dim()
    if tensor.shape[dim] % parts:
        raise ValueError(
            f"{call}({name}={dim}): an extent of {tensor.shape[dim]} does not divide over {parts} processes"
        )
    return dim


def _reduce_type(call: str, reduce_type: str) -> None:
    if reduce_type not in REDUCE_TYPES:
        raise ValueError(f"{call}({reduce_type!r}, ...): expected one of {', '.join(map(repr, REDUCE_TYPES))}")


def _into(output: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    if output is None:
        return result
    with torch.no_grad():
        return output.copy_(result)


@overload
def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor,
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor: ...
@overload
def all_reduce(
    reduce_type: str,
    inputs: Sequence[torch.Tensor],
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> None: ...
def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor | None:
    """Reduces tensors over all processes and multiplies the result by `scale`.

    Args:
        reduce_type: one of `REDUCE_TYPES`.
        inputs: a tensor, or a list of tensors that are changed in place.
        scale: factor of the result.
        groups: groups of ranks that reduce separately; None is one group of all.
        cctx: accepted and unused, as in torch_xla.
        pin_layout: torch_xla's option of that name.

    Returns:
        A new tensor for a tensor, None for a list.

    Raises:
        ValueError: an unknown reduce type, or groups that do not hold each rank once.
        TypeError: `inputs` is neither a tensor nor a sequence of tensors.
    """
    _reduce_type("all_reduce", reduce_type)
    processes, checked = base.processes(), checked_groups("all_reduce", groups)
    options = {"reduce_type": reduce_type, "pin_layout": pin_layout}
    if isinstance(inputs, torch.Tensor):
        [reduced] = processes.collective("all_reduce", [inputs], checked, **options)
        return reduced if scale == 1.0 else reduced * scale
    if not isinstance(inputs, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        raise TypeError(f"all_reduce: expected a tensor or a list of tensors, got {inputs!r} ({type(inputs).__name__})")
    with torch.no_grad():
        if processes.world_size() > 1:
            values = processes.collective("all_reduce", inputs, checked, **options)
            for tensor, value in zip(inputs, values, strict=True):
                tensor.copy_(value)
        if scale != 1.0:
            for tensor in inputs:
                tensor.mul_(scale)
    return None


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """The `value` of each process (of the group), concatenated along `dim` in the order of ranks.

    Args:
        value: of the same shape and dtype on all.
        dim: dimension that grows.
        groups: as `all_reduce`.
        output: a tensor to write the result to.
        pin_layout: torch_xla's option of that name.

    Raises:
        ValueError: no such dimension, or groups that do not hold each rank once.
    """
    checked = checked_groups("all_gather", groups)
    dim = _dimension("all_gather", "dim", value, dim)
    [result] = base.processes().collective("all_gather", [value], checked, dim=dim)
    return _into(output, result)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Reduces `input` over all processes, times `scale`; each process gets its part along `scatter_dim`.

    Args:
        reduce_type: one of `REDUCE_TYPES`.
        input: of the same shape and dtype on all.
        scale: factor of the result.
        scatter_dim: dimension that is split.
        shard_count: number of parts: the size of a group.
        groups: as `all_reduce`.
        output: a tensor to write the result to.
        pin_layout: torch_xla's option of that name.

    Raises:
        ValueError: an extent that does not divide, or a number of parts that is not the group size.
    """
    _reduce_type("reduce_scatter", reduce_type)
    checked = checked_groups("reduce_scatter", groups)
    if shard_count != group_size(checked):
        raise ValueError(
            f"reduce_scatter(shard_count={shard_count}): expected the number of processes that reduce among "
            f"themselves, {group_size(checked)}"
        )
    dim = _dimension("reduce_scatter", "scatter_dim", input, scatter_dim, shard_count)
    options = {"reduce_type": reduce_type, "dim": dim}
    [result] = base.processes().collective("reduce_scatter", [input], checked, **options)
    return _into(output, result if scale == 1.0 else result * scale)


def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Copies the root's values, bit by bit, to every process, in place.

    Args:
        tensors: of the same shapes and dtypes on all.
        root_ordinal: rank of the source.
        groups: as `all_reduce`; groups without the root get zeros.
        pin_layout: torch_xla's option of that name.

    Raises:
        ValueError: no such process.
    """
    processes, checked = base.processes(), checked_groups("collective_broadcast", groups)
    if not 0 <= root_ordinal < processes.world_size():
        raise ValueError(
            f"collective_broadcast(root_ordinal={root_ordinal}): expected a process from 0 to "
            f"{processes.world_size() - 1}"
        )
    if processes.world_size() > 1:
        values = processes.collective("collective_broadcast", list(tensors), checked, root=root_ordinal)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

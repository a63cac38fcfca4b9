"""Collectives between processes: those of ``torch_xla.core.xla_model``.

Each is recorded as an operation of the step: no process runs or waits before the step ends.  In a single process they
return copies.  None is differentiable, as in torch_xla: reduce gradients, not losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from xla_amp import events
from xla_amp.backends import base, devices, module_paths
from xla_amp.policy import Decision, default_name, gradient_sums, op_catalog
from xla_amp.pytorch.autocast import decision_events

REDUCE_TYPES = ("sum", "mul", "and", "or", "min", "max")
"""Reductions of `all_reduce`, also as REDUCE_SUM and so on, as in torch_xla."""
REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = REDUCE_TYPES

Groups = Sequence[Sequence[int]] | None
"""Groups of ranks that communicate, such as ``[[0, 1], [2, 3]]``; None is one group of all."""


def _checked_groups(call: str, groups: Groups) -> tuple[tuple[int, ...], ...] | None:
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


def _count(groups: tuple[tuple[int, ...], ...] | None) -> int:
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
    processes, checked = base.processes(), _checked_groups("all_reduce", groups)
    if isinstance(inputs, torch.Tensor):
        [reduced] = processes.all_reduce(reduce_type, [inputs], checked, pin_layout)
        return reduced if scale == 1.0 else reduced * scale
    if not isinstance(inputs, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        raise TypeError(f"all_reduce: expected a tensor or a list of tensors, got {inputs!r} ({type(inputs).__name__})")
    with torch.no_grad():
        if processes.world_size() > 1:
            values = processes.all_reduce(reduce_type, inputs, checked, pin_layout)
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
    checked = _checked_groups("all_gather", groups)
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
    checked = _checked_groups("reduce_scatter", groups)
    if shard_count != _count(checked):
        raise ValueError(
            f"reduce_scatter(shard_count={shard_count}): expected the number of processes that reduce among "
            f"themselves, {_count(checked)}"
        )
    dim = _dimension("reduce_scatter", "scatter_dim", input, scatter_dim, shard_count)
    options = {"reduce_type": reduce_type, "dim": dim}
    [result] = base.processes().collective("reduce_scatter", [input], checked, **options)
    return _into(output, result if scale == 1.0 else result * scale)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Splits `value` along one dimension, sends part i to process i, and joins the received parts along another.

    Args:
        value: of the same shape and dtype on all.
        split_dimension: the dimension to split.
        concat_dimension: the dimension to join along.
        split_count: number of parts: the size of a group.
        groups: as `all_reduce`.
        pin_layout: torch_xla's option of that name.

    Raises:
        ValueError: an extent that does not divide, or a number of parts that is not the group size.
    """
    checked = _checked_groups("all_to_all", groups)
    if split_count != _count(checked):
        raise ValueError(f"all_to_all(split_count={split_count}): expected the number of processes, {_count(checked)}")
    split = _dimension("all_to_all", "split_dimension", value, split_dimension, split_count)
    concat = _dimension("all_to_all", "concat_dimension", value, concat_dimension)
    [result] = base.processes().collective("all_to_all", [value], checked, split=split, concat=concat)
    return result


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Sends `value` from process to process; a process that receives nothing gets zeros.

    Args:
        value: of the same shape and dtype on all.
        pairs: (from, to), each process at most once on either side.

    Raises:
        ValueError: a process that does not exist, or is named twice on a side.
    """
    world = base.processes().world_size()
    found = tuple((int(source), int(target)) for source, target in pairs)
    for side in zip(*found, strict=True):
        if len(set(side)) < len(side) or not set(side) <= set(range(world)):
            raise ValueError(
                f"collective_permute(pairs={list(map(list, found))}): expected numbers from 0 to {world - 1}, each at "
                "most once as a source and once as a target"
            )
    if world == 1:
        return value.clone() if found else torch.zeros_like(value)
    [result] = base.processes().collective("collective_permute", [value], None, pairs=found)
    return result


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
    processes, checked = base.processes(), _checked_groups("collective_broadcast", groups)
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


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Copies the first process's parameters and buffers to all others, and ends the step."""
    collective_broadcast([*model.parameters(), *model.buffers()], pin_layout=False)
    devices.engine().sync()


def reduce_gradients(
    optimizer: torch.optim.Optimizer,
    groups: Groups = None,
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
        dtype: the dtype in which floating gradients are sent and added; None is what the rule for
            ``reduce_gradients`` says in the policy of the open or the last region, without a rule float32, and float64
            for those of float64.  ``torch.bfloat16`` halves the traffic.  A sum that overflows in it is inf, even if
            each process's part is finite, and the step is skipped on all.

    Raises:
        TypeError: `dtype` is not a floating dtype of 16 bits or more.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(
            f"reduce_gradients(dtype={dtype!r}): expected a floating dtype of 16 bits or more, e.g. torch.bfloat16 (a "
            "sum in 8 bits keeps 2 or 3 digits of each part, and XLA has no scale for it)"
        )
    average([p for group in optimizer.param_groups for p in group["params"]], groups, pin_layout, dtype=dtype)


def average(
    parameters: Sequence[torch.Tensor],
    groups: Groups = None,
    pin_layout: bool = True,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """`reduce_gradients` of the gradients of these parameters, as far as they have one."""
    checked = _checked_groups("reduce_gradients", groups)
    count = _count(checked)
    found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if count == 1 or not found:
        return
    pairs = [(gradient, wanted) for (_, gradient), wanted in zip(found, _dtypes(found, dtype), strict=True)]

    def mean(total: torch.Tensor) -> torch.Tensor:
        low = total.is_floating_point() and total.dtype.itemsize < 4
        # Before a division XLA:GPU does not put all gradients into one collective.
        return (total.float() if low else total) * (1.0 / count)

    dense = [(gradient, wanted) for gradient, wanted in pairs if not gradient.is_sparse]
    with torch.no_grad():
        # One collective for all gradients.
        reduced = base.processes().all_reduce(REDUCE_SUM, [g.to(wanted) for g, wanted in dense], checked, pin_layout)
        for (gradient, _), value in zip(dense, reduced, strict=True):
            gradient.copy_(mean(value))
        for gradient, wanted in pairs:
            if gradient.is_sparse:  # a sum of sparse tensors is all their entries
                values = all_gather(gradient._values().to(wanted), 0, groups, None, pin_layout)
                indices = all_gather(gradient._indices(), 1, groups, None, pin_layout)
                joined = torch.sparse_coo_tensor(
                    indices, mean(values).to(gradient.dtype), gradient.shape, check_invariants=False
                )
                gradient.copy_(joined)


def _dtypes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], asked: torch.dtype | None) -> list[torch.dtype]:
    """The dtype in which the gradient of each (parameter, gradient) is sent and added; `asked` wins over rules."""
    device_type = pairs[0][0].device.type
    sums = gradient_sums.after_region(device_type, default_name(devices.engine().platform()))
    paths = {id(each): path for each, path in module_paths.parameters(device_type)} if sums.by_module else {}
    found = []
    for parameter, gradient in pairs:
        path, wanted = paths.get(id(parameter)), gradient.dtype
        if wanted.is_floating_point:
            wanted = asked or getattr(torch, sums.dtype(str(wanted).removeprefix("torch."), path))
            if events.sinks:
                _emit(sums, gradient, wanted, path, asked is not None)
        found.append(wanted)
    return found


def _emit(sums: gradient_sums.Sums, gradient: torch.Tensor, wanted: torch.dtype, path: str | None, asked: bool) -> None:
    decision = sums.decide(path)
    told = "" if decision.rule else "no rule: gradients are added in float32"
    if asked or decision.rule is None:
        low = wanted.itemsize < 4
        decision = Decision(op_catalog.GRADIENT_SUM, "low" if low else "fp32", "builtin", None)
        told = f"dtype={wanted} was passed" if asked else told
    given, shapes = decision_events.dtypes([gradient]), decision_events.shapes_of([gradient])
    used = (str(wanted).removeprefix("torch."),)
    decision_events.emit(decision, sums.policy, given, used, shapes, gradient, path, told)


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that `optimizer` would apply, as the tensors themselves."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

"""Collectives between processes, as operations of the step.

A row of `COLLECTIVES` has the `jax.lax` collective and the shape of its result.  It works over the axis
`xla_amp.lazy.programs.mesh.AXIS`.  The names and meanings are torch_xla's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_amp.errors import DeviceError
from xla_amp.lazy.graph.trace import Instruction, Numbers, Spec, instruction_cache, record, spec, trace
from xla_amp.lazy.processes import cluster
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.tensors import tensor_io

Groups = tuple[tuple[int, ...], ...] | None
Reduce = Callable[[tuple[jax.Array, ...], Any], Sequence[jax.Array]]


def _gathered(function: Callable[..., jax.Array]) -> Reduce:
    return lambda xs, groups: [
        function(lax.all_gather(x, mesh.AXIS, axis_index_groups=groups), axis=0).astype(x.dtype) for x in xs
    ]


REDUCTIONS: Mapping[str, Reduce] = MappingProxyType(
    {
        "sum": lambda xs, groups: lax.psum(xs, mesh.AXIS, axis_index_groups=groups),
        "max": lambda xs, groups: lax.pmax(xs, mesh.AXIS, axis_index_groups=groups),
        "min": lambda xs, groups: lax.pmin(xs, mesh.AXIS, axis_index_groups=groups),
        "mul": _gathered(jnp.prod),
        "and": _gathered(jnp.bitwise_and.reduce),
        "or": _gathered(jnp.bitwise_or.reduce),
    }
)
"""XLA has no collective for the last three: each process gathers all values and reduces them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One row of the table."""

    emit: Callable[[Sequence[jax.Array], Any, int, dict[str, Any]], Sequence[jax.Array]]
    """The operation: of the operands, the groups, the group size and the options."""
    shape: Callable[[Numbers, int, dict[str, Any]], Numbers] = lambda shape, count, options: shape
    """Shape of the result: of the operand's shape, the group size and the options."""


def _each(function: Callable[[jax.Array, Any, int, dict[str, Any]], jax.Array]) -> Any:
    return lambda xs, groups, count, options: [function(x, groups, count, options) for x in xs]


def _with(shape: Numbers, dim: int, extent: int) -> Numbers:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _scattered(x: jax.Array, groups: Any, count: int, options: dict[str, Any]) -> jax.Array:
    dim = options["dim"]
    if options["reduce_type"] == "sum":
        part: jax.Array = lax.psum_scatter(x, mesh.AXIS, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
        return part
    [whole] = REDUCTIONS[options["reduce_type"]]((x,), groups)
    extent = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(whole, _rank_in_group(groups, count) * extent, extent, axis=dim)


def _rank_in_group(groups: Any, count: int) -> jax.Array:
    index = lax.axis_index(mesh.AXIS)
    if groups is None:
        return index
    ranks = [group.index(rank) for rank in range(count * len(groups)) for group in groups if rank in group]
    return jnp.array(ranks, jnp.int32)[index]


def _broadcast(x: jax.Array, groups: Any, count: int, options: dict[str, Any]) -> jax.Array:
    """The root's value, bit by bit: the others add zeros to its bits, not to its numbers (-0.0 + 0.0 is 0.0)."""
    if jnp.iscomplexobj(x):
        return lax.complex(*(_broadcast(part, groups, count, options) for part in (jnp.real(x), jnp.imag(x))))
    is_bool = x.dtype == jnp.bool_
    bits = x.astype(jnp.uint32) if is_bool else lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    wide = bits.astype(jnp.uint32) if bits.dtype.itemsize < 4 else bits  # XLA:CPU adds few types of less than 4 bytes
    mine = jnp.isin(lax.axis_index(mesh.AXIS), jnp.array(options["root"]))
    sent = lax.psum(jnp.where(mine, wide, jnp.zeros_like(wide)), mesh.AXIS, axis_index_groups=groups)
    return sent != 0 if is_bool else lax.bitcast_convert_type(sent.astype(bits.dtype), x.dtype)


COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        "all_gather": Collective(
            shape=lambda shape, count, options: _with(shape, options["dim"], shape[options["dim"]] * count),
            emit=_each(
                lambda x, groups, count, options: lax.all_gather(
                    x, mesh.AXIS, axis=options["dim"], axis_index_groups=groups, tiled=True
                )
            ),
        ),
        "all_reduce": Collective(
            emit=lambda xs, groups, count, options: REDUCTIONS[options["reduce_type"]](tuple(xs), groups)
        ),
        "all_to_all": Collective(
            emit=_each(
                lambda x, groups, count, options: lax.all_to_all(
                    x, mesh.AXIS, 0, 0, axis_index_groups=groups, tiled=True
                )
            )
        ),
        "collective_broadcast": Collective(emit=_each(_broadcast)),
        "reduce_scatter": Collective(
            shape=lambda shape, count, options: _with(shape, options["dim"], shape[options["dim"]] // count),
            emit=_each(_scattered),
        ),
    }
)
_instructions = instruction_cache()


def collective(name: str, tensors: Sequence[torch.Tensor], groups: Groups, **options: Any) -> list[torch.Tensor]:
    """New tensors: the collective `name` of each, over all processes (of the group), as one operation of the step."""
    if cluster.world_size() == 1:
        return [tensor.clone() for tensor in tensors]
    if mesh.is_partitioned():
        raise DeviceError(
            f"{name}: these processes train on one mesh, {mesh.describe(mesh.active)}, where a tensor is the same "  # type: ignore[arg-type]
            "to all of them and gradients are those of the whole batch: leave it out (optimizer.step() in place of "
            "xm.optimizer_step())"
        )
    with trace.lock:
        values = [tensor_io.read(tensor) for tensor in tensors]
        specs = tuple(value_spec for _, value_spec in values)
        key = (name, tuple(sorted(options.items())), specs, groups)
        if key not in _instructions:
            _instructions[key] = _instruction(name, specs, groups, options)
        first = record(_instructions[key], *(number for number, _ in values))
        outs: Any = _instructions[key].outs
        return [tensor_io.new_tensor(value_spec, first + index) for index, value_spec in enumerate(outs)]


def _instruction(name: str, specs: tuple[Spec, ...], groups: Groups, options: dict[str, Any]) -> Instruction:
    row, lists = COLLECTIVES[name], None if groups is None else [list(group) for group in groups]
    count = cluster.world_size() if groups is None else len(groups[0])
    outs = tuple(spec(row.shape(each.shape, count, options), each.dtype) for each in specs)

    def emit(context: Any, inputs: Any, *_: Any) -> list[Any]:
        return list(row.emit(inputs, lists, count, options))

    constants = {} if lists is None else {"groups": lists}
    label = f"{name}.{options['reduce_type']}" if "reduce_type" in options else name
    return Instruction(label, emit, outs, len(specs), collective=True, constants=constants)

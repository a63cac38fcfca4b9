"""How arrays lie in the device's memory, where a lowering says that it matters (``minor`` of `xla_amp.lowering`).

JAX takes and gives arrays in the order that XLA has for their shape.  Where an operation wants another, XLA copies:
a weight into that order and back, and the optimizer's state with it, in every step.  So a program takes such arrays,
and gives them, as the operation wants them; what comes in another order is put right once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Format, Layout

from xla_amp.lazy import private_api
from xla_amp.lazy.graph.trace import Instruction, Numbers, Spec
from xla_amp.lazy.runtime import pjrt


class InputFormat(NamedTuple):
    """An input of a program that has an order of its own."""

    parameter: int
    position: int
    """Among the inputs of the call, those handed over first."""
    format: Format


def orders(operations: Iterable[tuple[Instruction, Any, Sequence[int]]], platform: str) -> dict[Spec, Numbers]:
    """Dimensions from the outermost in memory to the innermost, for parameters of which an operation prefers an order.

    By spec: a weight's gradient and its optimizer's state are read and written together with it.

    Args:
        operations: of a trace, as `program.steps` gives them.
        platform: XLA's.
    """
    specs: list[Spec | None] = []
    origins: dict[int, Spec] = {}  # of a parameter, and of what is made of its elements one by one: a cast
    found: dict[Spec, Numbers] = {}
    for instruction, _, inputs in operations:
        number = len(specs)
        specs.extend(instruction.outs)
        if instruction.emit is None:
            origins[number] = instruction.outs[0]  # type: ignore[assignment]
        elif len(inputs) == 1 and inputs[0] in origins and _alike(instruction.outs, specs[inputs[0]]):
            origins[number] = origins[inputs[0]]
        for position, minor in instruction.minor.get(platform, {}).items():
            if (parameter := origins.get(inputs[position])) is not None:
                outer = (dim for dim in range(len(parameter.shape)) if dim not in minor)
                found[parameter] = (*outer, *minor)
    return found


def _alike(outs: Sequence[Spec | None], source: Spec | None) -> bool:
    return len(outs) == 1 and outs[0] is not None and source is not None and outs[0].shape == source.shape


def shardings(specs: Iterable[Spec | None], found: dict[Spec, Numbers]) -> Iterator[Any]:
    """``in_shardings`` of ``jax.jit`` for arrays of `specs`: the device, and the order where one is wanted."""
    home = jax.sharding.SingleDeviceSharding(pjrt.jax_device())
    for spec in specs:
        yield home if spec not in found else Format(Layout(found[spec]), home)  # type: ignore[index]


def copy(array: jax.Array) -> jax.Array:
    """A copy in the same order, which JAX's own is not."""
    return put(array.copy(), array.format)


def put(array: jax.Array, wanted: Format) -> jax.Array:
    """`array` in the order of `wanted`."""
    layout = array.format.layout
    if layout is not None and layout.major_to_minor == wanted.layout.major_to_minor:  # type: ignore[union-attr]
        return array
    with private_api.x64():
        return jax.device_put(array, wanted)

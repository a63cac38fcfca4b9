"""Memory layouts of program inputs and outputs that a lowering prefers (``minor`` of `xla_amp.lowering.register`).

JAX passes arrays in XLA's default layout for their shape.  If an operation prefers another layout, XLA copies a weight
and its optimizer state to that layout and back in every step.  So the program accepts and returns such arrays in the
preferred layout; an array in another layout is copied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.graph.trace import Numbers, Spec
from xla_amp.lazy.programs import pjrt


def orders(tape: Tape, platform: str) -> dict[Spec, Numbers]:
    """Major-to-minor dimensions of the parameters for which an operation prefers a layout.

    The key is the spec, because a weight's gradient and optimizer state are read and written together with it.

    Args:
        tape: of the program.
        platform: XLA platform.
    """
    specs = tape.specs()
    origins: dict[int, Spec] = {}  # of a parameter, and of elementwise results such as a cast
    found: dict[Spec, Numbers] = {}
    for node in tape:
        instruction, inputs = node.instruction, node.inputs
        if node.is_parameter:
            origins[node.first] = instruction.outs[0]  # type: ignore[assignment]
        elif len(inputs) == 1 and inputs[0] in origins and _alike(instruction.outs, specs[inputs[0]]):
            origins[node.first] = origins[inputs[0]]
        for position, minor in instruction.minor.get(platform, {}).items():
            if (parameter := origins.get(inputs[position])) is not None:
                outer = (dim for dim in range(len(parameter.shape)) if dim not in minor)
                found[parameter] = (*outer, *minor)
    return found


def _alike(outs: Sequence[Spec | None], source: Spec | None) -> bool:
    return len(outs) == 1 and outs[0] is not None and source is not None and outs[0].shape == source.shape


def shardings(specs: Iterable[Spec | None], found: dict[Spec, Numbers]) -> Iterator[Any]:
    """``in_shardings`` of ``jax.jit`` for arrays of `specs`: the device, and the layout if one is preferred."""
    home = jax.sharding.SingleDeviceSharding(pjrt.jax_device())
    for spec in specs:
        yield home if spec not in found else Format(Layout(found[spec]), home)


def copy(array: jax.Array) -> jax.Array:
    """A copy in the same layout; `jax.Array.copy` uses the default layout."""
    return put(array.copy(), array.format)  # type: ignore[attr-defined]


def put(array: jax.Array, wanted: Format) -> jax.Array:
    """`array` in the layout of `wanted`."""
    layout = array.format.layout  # type: ignore[attr-defined]
    if layout is not None and layout.major_to_minor == wanted.layout.major_to_minor:  # type: ignore[union-attr]
        return array
    with private_api.x64():
        moved: jax.Array = jax.device_put(array, wanted)
        return moved

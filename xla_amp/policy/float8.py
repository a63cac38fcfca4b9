"""Which products the cast ``fp8`` makes of 8-bit floats, and what they cost.

The cast is for the product of a weight, a matrix, with other values.  The product itself and its gradient with regard
to the other operand read 8-bit copies; the gradient of the weight reads the 16-bit operands.  Where a product cannot be
made so, or would be slower, it runs in the region's low dtype, and reports say why.  A rule of the user's decides
against the estimate, but not against what the hardware can do.

``tables/float8.toml`` has the shapes and costs, ``hardware.toml`` the rates, with their sources.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from xla_amp import hardware
from xla_amp.errors import PolicyError
from xla_amp.policy.op_catalog import read_table

DEFAULT_TARGET: Final = "h100"
"""What is assumed where the device is none of the table: of its GPUs the one with the slowest memory, which gains the
least."""


LEFT_OUT: Final = "not in 8 bits"
"""How each reason begins why a product under the cast stays in 16 bits."""


class Device(NamedTuple):
    """Where a program is to run."""

    platform: str
    """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
    kind: str
    """The name that its driver gives it."""
    capability: tuple[int, int] | None
    """Compute capability of an NVIDIA GPU; None for other devices."""


class Estimate(NamedTuple):
    """Seconds of one product and its gradient with regard to the data: a roofline, no measurement."""

    low: float
    float8: float
    """Scaling included."""
    scaling: float

    @property
    def gain(self) -> float:
        """How many times faster 8 bits are; below 1 they lose."""
        return self.low / self.float8 if self.float8 else 1.0


@functools.cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads(read_table("float8"))


def unavailable(device: Device) -> str:
    """Why a device has no products of 8-bit floats, so that they run in 16 bits; empty if it has or rehearses them."""
    needed = tuple(_data()["shapes"]["capability"])
    if device.platform != "gpu" or (device.capability is not None and device.capability >= needed):
        return ""
    name = device.kind or device.platform
    return f"{LEFT_OUT}: {name} has no such products, which need a GPU of compute capability {needed[0]}.{needed[1]}"


def targets() -> tuple[str, ...]:
    """Names of the GPUs with an estimate."""
    return tuple(name for name in hardware.names() if "float8" in hardware.specification(name))


def target_of(device: str) -> str:
    """The target for a device by the name that its driver gives it; `DEFAULT_TARGET` for others.

    Example:
        >>> target_of("NVIDIA H200"), target_of("cpu")
        ('h200', 'h100')
    """
    return next((name for name in targets() if name in device.lower()), DEFAULT_TARGET)


def estimate(rows: int, depth: int, columns: int, target: str = DEFAULT_TARGET) -> Estimate:
    """The cost of ``(rows, depth) @ (depth, columns)`` and of its gradient with regard to the left operand.

    Args:
        rows: of the data.
        depth: summed dimension.
        columns: of the weight.
        target: a name of `targets`.

    Raises:
        PolicyError: an unknown target.

    Example:
        >>> estimate(16384, 4096, 4096).gain > 1 > estimate(256, 256, 256).gain
        True
    """
    if target not in targets():
        raise PolicyError(f"float8 for target {target!r}: expected one of {', '.join(targets())}")
    row, costs = hardware.specification(target), _data()["costs"]
    bandwidth = row["bandwidth"] * costs["memory_share"]

    def product(rate: float, width: int) -> float:
        operations = 4 * rows * depth * columns / (rate * costs["compute_share"])
        elements = 2 * rows * depth + 2 * rows * columns + 2 * depth * columns
        results = rows * columns + rows * depth
        moved = width * (elements - results) + 2 * results
        return float(max(operations, moved / bandwidth) + 2 * costs["seconds_per_kernel"])

    operands = rows * depth + depth * columns + rows * columns  # data, weight and the gradient of the result
    scaling = costs["bytes_scaled"] * operands / bandwidth + 6 * costs["seconds_per_kernel"]
    return Estimate(product(row["matrix"]["bfloat16"], 2), product(row["float8"], 1) + scaling, scaling)


def left_out(rows: int, depth: int, columns: int, *, asked: bool, target: str = DEFAULT_TARGET) -> str:
    """Why a product with a weight stays in 16 bits; empty if it does not.

    Args:
        rows: of the data.
        depth: summed dimension.
        columns: of the weight.
        asked: whether a rule of the user's decides: the estimate then does not count.
        target: a name of `targets`.
    """
    multiple, multiple_why = _data()["shapes"]["multiple"], _data()["shapes"]["multiple_why"]
    for what, size in (("sums over", depth), ("writes columns of", columns)):
        if size % multiple or size == 0:
            return f"{LEFT_OUT}: it {what} {size}, no multiple of {multiple}: {multiple_why}"
    if rows == 0:
        return f"{LEFT_OUT}: it has no rows"
    if asked:
        return ""
    found = estimate(rows, depth, columns, target)
    if found.gain > 1:
        return ""
    return (
        f"{LEFT_OUT}: on {target} it would take {found.float8 * 1e6:.0f} us, {found.scaling * 1e6:.0f} of them for "
        f"scaling, against {found.low * 1e6:.0f} us in bfloat16 (estimates, with its gradient)"
    )


def weight_of(
    shapes: tuple[Sequence[Any], Sequence[Any]],
    outside: tuple[bool, bool],
    summed: tuple[Sequence[int], Sequence[int]],
    *,
    asked: bool,
    target: str = DEFAULT_TARGET,
) -> tuple[int | None, str]:
    """Which operand of a product is the weight, of whose product the cast makes one in 8 bits, and what a report says.

    Args:
        shapes: of the left and of the right operand; a size that is no integer of 0 or more is not known.
        outside: whether an operand comes from outside of the program: an argument, or a constant.
        summed: the axes of each operand that are summed.
        asked: as of `left_out`.
        target: a name of `targets`.

    Returns:
        0 or 1, or None where the product stays in 16 bits, and the reason.

    Example:
        >>> weight_of(((16384, 4096), (4096, 4096)), (False, True), ((1,), (0,)), asked=False)[0]
        1
    """
    found = sizes_of(shapes, outside, summed)
    if isinstance(found, str):
        return None, found
    if why := left_out(found.rows, found.depth, found.columns, asked=asked, target=target):
        return None, why
    return found.weight, explained(found.rows, found.depth, found.columns, target)


class Sizes(NamedTuple):
    """A product with a weight, as ``(rows, depth) @ (depth, columns)``."""

    weight: int
    """Which operand is the weight: 0 or 1."""
    rows: int
    depth: int
    columns: int


def sizes_of(
    shapes: tuple[Sequence[Any], Sequence[Any]], outside: tuple[bool, bool], summed: tuple[Sequence[int], Sequence[int]]
) -> Sizes | str:
    """The sizes of a product with a weight, or why it is none; arguments as of `weight_of`."""
    weight = next((index for index in (1, 0) if outside[index] and len(shapes[index]) == 2), None)
    if weight is None:
        return f"{LEFT_OUT}: neither operand is a matrix that comes from outside of the program, a weight"
    if len(summed[weight]) != 1:
        return f"{LEFT_OUT}: it does not sum over one dimension of the weight"
    if any(not isinstance(size, int) or size < 0 for shape in shapes for size in shape):
        return f"{LEFT_OUT}: a size is not known"
    depth, columns = shapes[weight][summed[weight][0]], shapes[weight][1 - summed[weight][0]]
    return Sizes(weight, math.prod(shapes[1 - weight]) // max(1, depth), depth, columns)


def explained(rows: int, depth: int, columns: int, target: str = DEFAULT_TARGET) -> str:
    """What a report says of a product in 8 bits."""
    found = estimate(rows, depth, columns, target)
    return (
        f"8 bits, scaled by their largest magnitude: estimated {found.float8 * 1e6:.0f} us on {target}, "
        f"{found.scaling * 1e6:.0f} of them for scaling, against {found.low * 1e6:.0f} us in bfloat16"
    )


def refused(front: str, instead: str) -> PolicyError:
    """The error of a front without 8-bit products."""
    return PolicyError(f"the cast 'fp8' is not supported {front}; {instead}")

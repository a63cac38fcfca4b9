"""Name, shapes, floating-point operations, bytes and the source line of one StableHLO operation, for reports."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from xla_amp.analysis.products import Contraction
from xla_amp.common import compiling, units
from xla_amp.stablehlo import ir


def short_name(operation: Any) -> str:
    """``stablehlo.dot_general`` -> ``dot_general``."""
    return str(operation.name).removeprefix("stablehlo.")


class Ends(NamedTuple):
    """Operands and results of an operation that are tensors."""

    given: tuple[tuple[int, ...], ...] = ()
    """Shapes; -1 for a dynamic size."""
    made: tuple[tuple[int, ...], ...] = ()
    bytes: int = 0
    """Of all; a dynamic dimension counts as 1."""


def ends(operation: Any) -> Ends:
    """The operands and results of an operation that are tensors."""
    given, made = _types(operation.operands), _types(operation.results)
    return Ends(tuple(map(_SHAPE, given)), tuple(map(_SHAPE, made)), sum(map(size_of, given + made)))


def _types(values: Iterable[Any]) -> list[ir.TensorType]:
    return [kind for value in values if (kind := ir.tensor_type(value.type)) is not None]


_SHAPE: Final = operator.attrgetter("shape")


def contraction(operation: Any) -> Contraction | None:
    """A product or a convolution as all fronts ask of it; None for other operations."""
    name, (left, right, *_) = short_name(operation), [*map(shape_of, operation.operands), (), ()]
    if name in ("convolution", "dynamic_conv"):
        numbers = ir.dialect().ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        axes = zip(numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, strict=True)
        features = numbers.kernel_output_feature_dimension, numbers.output_feature_dimension
        return Contraction.convolution(left, right, numbers.kernel_input_feature_dimension, axes, features)
    if name == "dot":
        return Contraction.product(left, right, [len(left) - 1], [])
    if name != "dot_general":
        return None
    numbers = ir.dialect().DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    contracted, batch = list(numbers.lhs_contracting_dimensions), list(numbers.lhs_batching_dimensions)
    return Contraction.product(left, right, contracted, batch)


def flops(operation: Any) -> int | None:
    """Multiplications and additions of a product or convolution; None for others, and where a size is dynamic."""
    found = contraction(operation)
    return None if found is None else found.flops(shape_of(operation.results[0]))


def quick_options(module: ir.MlirModule) -> dict[str, bool | int]:
    """Options of XLA:CPU for a module that runs a few times only; loops and functions count once for its work."""
    work = math.fsum(flops(each) or 0 for each in ir.operations(module.operation))
    return compiling.quick_options("cpu", work)


def size_of(kind: ir.TensorType | None) -> int:
    """Bytes of a tensor of this type, 0 for None; a dynamic dimension counts as 1."""
    return 0 if kind is None else abs(math.prod(kind.shape)) * units.bits(kind.element) // 8


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, -1 for a dynamic size; empty for other values."""
    kind = ir.tensor_type(value.type)
    return kind.shape if kind else ()

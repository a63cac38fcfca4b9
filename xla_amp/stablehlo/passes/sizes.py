"""Name, shapes, floating-point operations, bytes and the source line of one StableHLO operation, for reports."""

from __future__ import annotations

import math
from typing import Any, Final

from xla_amp.common import compiling, costs, units
from xla_amp.stablehlo import ir

_PRECISION: Final = ("algorithm", "precision_config")


def short_name(operation: Any) -> str:
    """``stablehlo.dot_general`` -> ``dot_general``."""
    return str(operation.name).removeprefix("stablehlo.")


def written(operation: Any) -> str:
    """Name and attributes of an operation without its precision."""
    attributes = operation.attributes
    names = sorted(name for name in attributes if name not in _PRECISION and "." not in name)
    return " ".join([short_name(operation), *(f"{name}={attributes[name]}" for name in names)])


def shapes(operation: Any) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Shapes of operands and results; -1 for a dynamic size."""
    given, made = (tuple(map(_sizes, ends)) for ends in _ends(operation))
    return given, made


def flops(operation: Any) -> int | None:
    """Multiplications and additions of a product or convolution; None for others, and where a size is dynamic."""
    name = short_name(operation)
    if name not in ("dot", "dot_general", "convolution"):
        return None
    (left, right), (result,) = ([_sizes(each) for each in ends] for ends in _ends(operation))
    if name == "convolution":
        numbers = ir.dialect().ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        return costs.convolution(right, result, numbers.kernel_output_feature_dimension)
    if name == "dot":
        return costs.product(left, result, [-1])
    numbers = ir.dialect().DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    return costs.product(left, result, list(numbers.lhs_contracting_dimensions))


def quick_options(module: ir.MlirModule) -> dict[str, bool | int]:
    """Options of XLA:CPU for a module that runs a few times only; loops and functions count once for its work."""
    work = math.fsum(flops(each) or 0 for each in ir.operations(module.operation))
    return compiling.quick_options("cpu", work)


def bytes_moved(operation: Any) -> int:
    """Bytes of operands and results; a dynamic dimension counts as 1."""
    return sum(map(size, (value.type for ends in _ends(operation) for value in ends)))


def size(value_type: Any) -> int:
    """Bytes of a value; 0 for other types than tensors. A dynamic dimension counts as 1."""
    return size_of(ir.tensor_type(value_type))


def size_of(kind: ir.TensorType | None) -> int:
    """Bytes of a tensor of this type, as `size`."""
    return 0 if kind is None else ir.elements_of(kind) * units.bits(kind.element) // 8


def _ends(operation: Any) -> tuple[list[Any], list[Any]]:
    """Operands and results that are tensors."""
    given, made = ([v for v in ends if ir.tensor_type(v.type)] for ends in (operation.operands, operation.results))
    return given, made


def _sizes(value: Any) -> tuple[int, ...]:
    kind = ir.tensor_type(value.type)
    return tuple(-1 if each is None else each for each in kind.shape) if kind else ()

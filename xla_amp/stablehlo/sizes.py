"""Name, shapes, floating-point operations, bytes and the source line of one StableHLO operation, for reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from xla_amp.analysis.products import Contraction
from xla_amp.common import compiling, units
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


class Ends(NamedTuple):
    """Operands and results of an operation that are tensors."""

    given: tuple[ir.TensorType, ...] = ()
    made: tuple[ir.TensorType, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all; a dynamic dimension counts as 1."""
        return sum(map(size_of, self.given + self.made))


def ends(operation: Any) -> Ends:
    """The operands and results of an operation that are tensors."""
    return Ends(_types(operation.operands), _types(operation.results))


def _types(values: Iterable[Any]) -> tuple[ir.TensorType, ...]:
    found = []
    for value in values:
        if (kind := ir.tensor_type(value.type)) is not None:
            found.append(kind)
    return tuple(found)


def shapes(kinds: Iterable[ir.TensorType]) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors; -1 for a dynamic size."""
    return tuple(map(_shape, kinds))


def contraction(operation: Any) -> Contraction | None:
    """A product or a convolution as all fronts ask of it; None for other operations."""
    name, (left, right, *_) = short_name(operation), [*map(_sizes, operation.operands), (), ()]
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
    return None if found is None else found.flops(_sizes(operation.results[0]))


def quick_options(module: ir.MlirModule) -> dict[str, bool | int]:
    """Options of XLA:CPU for a module that runs a few times only; loops and functions count once for its work."""
    work = math.fsum(flops(each) or 0 for each in ir.operations(module.operation))
    return compiling.quick_options("cpu", work)


def size(value_type: Any) -> int:
    """Bytes of a value; 0 for other types than tensors. A dynamic dimension counts as 1."""
    return size_of(ir.tensor_type(value_type))


def size_of(kind: ir.TensorType | None) -> int:
    """Bytes of a tensor of this type, as `size`."""
    return 0 if kind is None else ir.elements_of(kind) * units.bits(kind.element) // 8


def _sizes(value: Any) -> tuple[int, ...]:
    kind = ir.tensor_type(value.type)
    return _shape(kind) if kind else ()


def _shape(kind: ir.TensorType) -> tuple[int, ...]:
    return tuple(-1 if each is None else each for each in kind.shape) if None in kind.shape else kind.shape  # type: ignore[return-value]

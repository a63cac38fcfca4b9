"""What an operation with a low operand may round of its others: numbers, bounds that stay apart from 1, biases.

A float32 array beside a low value makes the result float32.  A *bias* does not: a weight that is added to a product and
varies along the product's feature axes only.  The fronts find where a value comes from; these functions decide.

``axes`` of a weight that was given: the axes that it varies along, ``(frozenset,)``.  Of a product, or of a sum with
one: those that its left and its right weight gave it, or the feature axis of a convolution.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from xla_amp.common.types import LowDtype

Axes: TypeAlias = tuple[frozenset[int], ...]
Shape: TypeAlias = Sequence[Any]
"""Sizes, of which some may be symbolic or unknown."""


class LowNumbers(NamedTuple):
    """The numbers of a low dtype."""

    exponent_bits: int
    mantissa_bits: int

    @property
    def smallest(self) -> float:
        """The smallest number that is not subnormal."""
        return float(2.0 ** (2 - (1 << (self.exponent_bits - 1))))

    def in_range(self, magnitude: float) -> bool:
        """Whether a magnitude neither overflows nor becomes subnormal, which several devices flush to zero."""
        largest = 2.0 ** (1 << (self.exponent_bits - 1)) * (1 - 2.0 ** (-self.mantissa_bits - 1))
        return magnitude == 0 or self.smallest <= magnitude <= largest

    def leaves_room(self, magnitude: float) -> bool:
        """Whether a number takes at most half of the range, 2**-7 to 255 in float16, so that low values meet it."""
        return self.in_range(magnitude * magnitude)

    def scales(self, magnitude: float) -> bool:
        """Whether a product with a number rounds nothing: a power of two that leaves room."""
        return magnitude != 0 and self.leaves_room(magnitude) and math.frexp(magnitude)[0] == 0.5

    def rounded(self, number: float) -> float:
        """The nearest number of the dtype, for one in range."""
        fraction, exponent = math.frexp(number)
        return math.ldexp(round(fraction * 2 ** (self.mantissa_bits + 1)), exponent - self.mantissa_bits - 1)

    def holds(self, number: float) -> bool:
        """Whether the dtype has exactly this number."""
        return self.rounded(number) == number

    def stays_apart(self, magnitude: float) -> bool:
        """Whether rounding changes a magnitude by no more than an ulp of its distance to 1.

        With `holds` in its place, a mask of -1e9 would make the scores of an attention float32, which are saved.
        """
        return abs(self.rounded(magnitude) - magnitude) <= 2.0**-self.mantissa_bits * abs(magnitude - 1)


LOW_NUMBERS: Final[Mapping[LowDtype, LowNumbers]] = MappingProxyType(
    {"bfloat16": LowNumbers(8, 7), "float16": LowNumbers(5, 10)}
)


def is_bias(axes: Axes, shape: Shape, product_axes: Axes, product_shape: Shape) -> bool:
    """Whether a given weight varies along the same axes as one weight of a product, the last among them.

    Both have as many axes as the sum; `axes` and `product_axes` are empty for what is no given weight, or no product.
    """
    if not (axes and axes[0] and product_axes):
        return False
    varies = {axis for axis in axes[0] if shape[axis] != 1}
    return any(
        each
        and varies == {axis for axis in each if product_shape[axis] != 1}
        and (len(product_shape) - 1 in each or len(product_axes) == 1)
        for each in product_axes
    )


def axes_of_sum(terms: Sequence[Axes]) -> Axes:
    """`Axes` of a sum whose terms that are products have `terms`: it is a product to the next bias."""
    return tuple(map(operator.and_, terms[0], terms[-1])) if terms else ()


def axes_after(
    axes: Axes,
    before: Shape,
    after: Shape,
    *,
    order: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
    weight: bool,
) -> Axes:
    """`Axes` of what data movement makes of a value.

    Args:
        axes: of the value, which has the shape `before`; the result has the shape `after`.
        order: for each axis of the result the axis of the value, of a transpose.
        places: for each axis of the value the axis of the result, of a broadcast.
        weight: whether the value is a given weight.
    """
    if order is not None:
        moved = {old: new for new, old in enumerate(order)}
    elif places is not None:
        moved = {old: new for old, new in enumerate(places) if before[old] == after[new]}
    elif len(before) == len(after):
        return axes
    else:
        old, new = ([axis for axis, size in enumerate(shape) if size != 1] for shape in (before, after))
        if [before[axis] for axis in old] != [after[axis] for axis in new]:
            return (frozenset(range(len(after))),) if weight else ()
        moved = dict(zip(old, new, strict=True))
    return tuple(frozenset(map(moved.__getitem__, each & moved.keys())) for each in axes)

"""What the fronts ask of a product or a convolution: its name in torch, what it sums, where a bias varies, its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from xla_amp.analysis import costs
from xla_amp.analysis.beside_low import Axes, Shape

_FEW: Final = 4
"""Terms of a sum for which matrix units gain nothing: rotations, cameras, grids of coordinates, colour matrices."""


class Contraction(NamedTuple):
    """A product or a convolution, by the shapes of its operands and its dimension numbers."""

    left: Shape
    right: Shape
    summed: Sequence[Any]
    """Sizes; an element of the result sums at most as many products as these have elements."""
    contracted: Sequence[int] = ()
    """Axes of a product's left operand."""
    batch: Sequence[int] = ()
    """Axes of a product's left operand."""
    features: tuple[int, int] | None = None
    """Of a convolution: the axes of its output features, in the window and in the result."""
    ragged: bool = False
    """Whether it is a product of groups of rows, each with another right operand."""

    @classmethod
    def product(
        cls, left: Shape, right: Shape, contracted: Sequence[int], batch: Sequence[int], *, ragged: bool = False
    ) -> Contraction:
        """A matrix product; the axes are those of the left operand."""
        return cls(left, right, [left[axis] for axis in contracted], contracted, batch, ragged=ragged)

    @classmethod
    def convolution(
        cls, image: Shape, window: Shape, inputs: int, axes: Iterable[tuple[int, int]], features: tuple[int, int]
    ) -> Contraction:
        """A convolution.

        Args:
            image: shape of the left operand; `window` of the right one.
            inputs: axis of the window with the features of one group of the image.
            axes: pairs of an axis of the image and one of the window.
            features: axes of the output features, in the window and in the result.
        """
        # The window slides, so an element sums over at most the smaller of image and window.
        summed = [window[inputs], *(1 if image[one] == 1 else window[other] for one, other in axes)]
        return cls(image, window, summed, features=features)

    @property
    def sums_few(self) -> bool:
        """Whether an element of the result sums at most four products: a low dtype would only round the operands.

        A size that is not known is many.

        Example:
            >>> Contraction.product((64, 3), (3, 3), [1], []).sums_few
            True
        """
        known = all(isinstance(size, int) and size >= 0 for size in self.summed)
        return 0 in self.summed or (known and math.prod(self.summed) <= _FEW)

    @property
    def aten(self) -> str:
        """ATen name of a product without a contracted axis, without a free one, or with a batch axis; empty for others.

        Example:
            >>> Contraction.product((2, 8), (2, 8), [1], [0]).aten
            'dot'
        """
        if self.features or self.ragged:
            return ""
        if not self.contracted:
            return "outer"
        if len(self.left) == len(self.right) == len(self.contracted) + len(self.batch):
            return "dot"
        return "bmm" if self.batch else ""

    def axes(self, weights: tuple[bool, bool]) -> Axes:
        """The axes of the result along which a bias varies (`xla_amp.analysis.beside_low`).

        `weights`: which of the operands are weights.
        """
        if self.features:
            return (frozenset({self.features[1]}),)
        if self.ragged or not any(weights):
            return ()
        lead, middle = range(len(self.batch)), len(self.left) - len(self.contracted)
        end = middle + len(self.right) - len(self.contracted) - len(lead)
        left, right = (*lead, *range(len(lead), middle)), (*lead, *range(middle, end))
        return frozenset(left if weights[0] else ()), frozenset(right if weights[1] else ())

    def flops(self, result: Shape) -> int | None:
        """Multiplications and additions, for the shape of the result; None where sizes are not known."""
        if self.features:
            return costs.convolution(self.right, result, self.features[0])
        return None if self.ragged else costs.product(self.left, result, self.contracted)

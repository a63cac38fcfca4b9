"""Dispatch modes that `find_overflow` runs a step under: they see every ATen operation, forward and backward.

`NonfiniteResults` finds the operations with an inf or NaN in their results, `OperandStatistics` examines their
operands, `FiniteResults` finds where an inf or NaN ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from xla_amp.backends.places import LocatingMode, Place
from xla_amp.backends.step_state import written_tensors
from xla_amp.backends.trees import tree_leaves
from xla_amp.tools.overflow.report import Producer, ProducerOperand, produced

UNINITIALIZED: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations whose results are uninitialized memory."""


class NonfiniteResults(LocatingMode):
    """Finds operations with an inf or NaN in their results, without waiting for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[tuple[int, Place, torch.Tensor]] = []
        self._paused = False

    def magnitude(self, tensor: torch.Tensor) -> torch.Tensor:
        """`magnitude` of a tensor, which is no operation of the step."""
        self._paused = True
        try:
            return magnitude(tensor)
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        number, place = self.count, self.locate(func)
        result = func(*args, **kwargs)
        if _computes(func):
            tensors = (*tree_leaves(result), *written_tensors(func, args, kwargs))
            self._pending += [(number, place, magnitude(tensor)) for tensor in tensors if is_floating(tensor)]
        return result

    def read(self, more: Sequence[torch.Tensor]) -> tuple[list[tuple[int, tuple[Place, float]]], list[float]]:
        """Waits for the device, once.

        Args:
            more: further magnitudes to read.

        Returns:
            (number of the operation, (its place, inf or NaN)) in their order; and the values of `more`.
        """
        values = _to_host([*(each for _, _, each in self._pending), *more])
        found: dict[int, tuple[Place, float]] = {}
        for (number, place, _), value in zip(self._pending, values, strict=False):
            if value - value != 0:
                before = found.get(number, (place, 0.0))[1]
                found[number] = place, (before if before != before else value)
        return sorted(found.items()), values[len(self._pending) :]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Suspect:
    place: Place
    value: float
    tensors: list[tuple[str, str, tuple[int, ...], torch.Tensor]]
    """For each operand: its name, dtype and shape, and its `_statistics`."""
    written: str
    """``inf`` or ``nan`` if a number among its arguments is."""
    result: str


class OperandStatistics(LocatingMode):
    """Records the operands of operations with nonfinite results, to find those that produced an inf or NaN.

    Waits for the device only in `producers`.
    """

    def __init__(self, nonfinite: Mapping[int, tuple[Place, float]]) -> None:
        super().__init__()
        self.diverged = False
        """Whether an operation differs from that of the run before; the run is not usable then."""
        self._nonfinite = nonfinite
        self._suspects: list[_Suspect] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, place = self.count, self.locate(func)
        wanted = self._nonfinite.get(number)
        if wanted is None or wanted[0].operation != place.operation:
            self.diverged |= wanted is not None
            return func(*args, **kwargs)
        tensors = [
            (name, _dtype(tensor), tuple(tensor.shape), _statistics(tensor))
            for name, tensor in _named_operands(func, args, kwargs)
        ]
        result = func(*args, **kwargs)
        results = (*tree_leaves(result), *written_tensors(func, args, kwargs))
        dtype = next((_dtype(tensor) for tensor in results if is_floating(tensor)), "")
        self._suspects.append(
            _Suspect(place=wanted[0], value=wanted[1], tensors=tensors, written=_written(args, kwargs), result=dtype)
        )
        return result

    def producers(self) -> tuple[list[Producer], list[Producer]]:
        """The operations that produced an inf or NaN from operands without it, and those that passed on one."""
        values = iter(_to_host([numbers for suspect in self._suspects for *_, numbers in suspect.tensors]))
        found: list[Producer] = []
        passed_on: list[Producer] = []
        for suspect in self._suspects:
            operands = tuple(_operand(name, dtype, shape, *next(values)) for name, dtype, shape, _ in suspect.tensors)
            made = "nan" if suspect.value != suspect.value else "inf"
            own = produced(made, operands, written=suspect.written)
            (found if own else passed_on).append(
                Producer(place=suspect.place, made=made, inputs=operands, result=suspect.result)
            )
        return found, passed_on


class FiniteResults(LocatingMode):
    """Finds the first operation that reads an inf or NaN and has finite results.

    Args:
        first: the operation that made the first inf or NaN; those after it are looked at.
    """

    def __init__(self, first: Place) -> None:
        super().__init__()
        self._first: Place | None = first
        self._read: list[tuple[Place, torch.Tensor]] = []
        """For each operation: 0, or NaN if an operand is not finite."""
        self._made: list[torch.Tensor] = []
        """The same of its results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self.locate(func)
        if self._first is not None or not _computes(func) or _ignores_values(func.overloadpacket.__name__):
            self._first = None if place == self._first else self._first
            return func(*args, **kwargs)
        operands = [magnitude(tensor) for _, tensor in _named_operands(func, args, kwargs)]
        result = func(*args, **kwargs)
        results = filter(is_floating, (*tree_leaves(result), *written_tensors(func, args, kwargs)))
        made = [magnitude(tensor) for tensor in results]
        if operands and made:
            self._read.append((place, _zero_if_finite(operands)))
            self._made.append(_zero_if_finite(made))
        return result

    def found(self) -> Place | None:
        """Waits for the device; None where no operation did so."""
        values = _to_host([*(each for _, each in self._read), *self._made])
        pairs = zip(self._read, values[: len(self._read)], values[len(self._read) :], strict=True)
        return next((place for (place, _), given, made in pairs if given != 0 and made == 0), None)


def _computes(func: Any) -> bool:
    """Whether the results are computed values, neither views nor uninitialized memory."""
    if func._schema.name.removeprefix("aten::") in UNINITIALIZED:
        return False
    return not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def is_floating(value: Any) -> bool:
    """Whether a value is a dense tensor of floating-point or complex numbers with elements."""
    return (
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and not value.is_sparse
        and value.numel() > 0
    )


@torch.no_grad()
def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, in the tensor's dtype; NaN if there is one."""
    # By dimension: torch_xla's maximum without one reduces nothing.
    found: torch.Tensor = torch.linalg.vector_norm(tensor, math.inf, list(range(tensor.dim())))
    return found


def _ignores_values(name: str) -> bool:
    """Whether an operation takes the shape of its first operand, or its memory, and not its values."""
    overwriting = ("copy_", "fill_", "normal_", "uniform_", "zero_")
    return name.endswith("_like") or name.startswith("new_") or name in overwriting


def _zero_if_finite(magnitudes: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double() * 0 for each in magnitudes]).sum()


def _to_host(values: Sequence[torch.Tensor]) -> list[Any]:
    """Values of tensors of one shape, with one transfer and one program for each device."""
    found: list[Any] = [None] * len(values)
    places: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        places.setdefault(value.device, []).append(index)
    for indices in places.values():
        numbers = torch.stack([values[index].double() for index in indices]).tolist()
        for index, value in zip(indices, numbers, strict=True):
            found[index] = value
    return found


def _named_operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for index, tensor in enumerate(tree_leaves(value)):
            if is_floating(tensor):
                yield f"{argument.name}[{index}]" if isinstance(value, list | tuple) else argument.name, tensor


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def _statistics(tensor: torch.Tensor) -> torch.Tensor:
    """float64 (6): magnitudes, values, counts.

    Smallest nonzero magnitude (inf: none) and largest one of the finite values; their least and greatest value (0 for
    complex ones); number of inf, number of NaN.
    """
    size = tensor.detach().abs().reshape(-1)
    signed = torch.zeros_like(size) if tensor.is_complex() else tensor.detach().reshape(-1)
    finite = torch.isfinite(size)
    limit = torch.full_like(size, float("inf"))
    return torch.stack(
        [
            torch.where(finite & (size > 0), size, limit).amin(0).double(),
            torch.where(finite, size, torch.zeros_like(size)).amax(0).double(),
            torch.where(finite, signed, limit).amin(0).double(),
            torch.where(finite, signed, -limit).amax(0).double(),
            torch.isinf(size).sum().double(),
            torch.isnan(size).sum().double(),
        ]
    )


def _operand(
    name: str, dtype: str, shape: tuple[int, ...], smallest: float, largest: float, least: float, greatest: float,
    infinities: float, nans: float,
) -> ProducerOperand:  # fmt: skip
    return ProducerOperand(
        name=name,
        dtype=dtype,
        shape=shape,
        smallest=0.0 if smallest == float("inf") else smallest,
        largest=largest,
        least=least if math.isfinite(least) else 0.0,
        greatest=greatest if math.isfinite(greatest) else 0.0,
        infinities=int(infinities),
        nans=int(nans),
    )


def _written(args: Any, kwargs: Any) -> str:
    """``nan`` or ``inf`` if a number among the arguments is; otherwise empty."""
    numbers = [value for value in tree_leaves((args, kwargs)) if isinstance(value, float) and value - value != 0]
    return ("nan" if any(value != value for value in numbers) else "inf") if numbers else ""

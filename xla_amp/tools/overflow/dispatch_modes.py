"""Dispatch modes that `find_overflow` runs a step under: they see every ATen operation, forward and backward.

`Magnitudes` finds what each operation read and made, `Operands` examines the operands of some.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.common.events import DecisionRecord
from xla_amp.tools.overflow.report import Producer, ProducerOperand, produced
from xla_amp.torch_common.places import LocatingMode, Place
from xla_amp.torch_common.trees import tree_leaves
from xla_amp.training.step_state import written_tensors

UNINITIALIZED: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations whose results are uninitialized memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """An operation that ran, and what of its operands and results is not finite: ``nan``, ``inf`` or empty."""

    number: int
    func: Any
    """Its overload of ATen."""
    place: Place
    written: str
    """What is not finite of the numbers among its arguments."""
    read: str = ""
    made: str = ""

    @property
    def produced(self) -> bool:
        """Whether it made an inf or NaN itself."""
        return bool(self.made) and produced(self.made, given=self.read, written=self.written)


class Magnitudes(LocatingMode):
    """Finds what the operands and results of each operation have, without waiting for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._computed: list[Computed] = []
        self._magnitudes: list[torch.Tensor] = []
        """Two for each: of the operands, and of the results."""
        self._decided = 0
        """How many operations had run when autocast had done the last one."""
        self._paused = False

    def magnitude(self, tensor: torch.Tensor) -> torch.Tensor:
        """`magnitude` of a tensor, which is no operation of the step."""
        self._paused = True
        try:
            return magnitude([tensor])
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        number, place = self.count, self.locate(func)
        if not _computes(func):
            return func(*args, **kwargs)
        read = [tensor for _, tensor in _named_operands(func, args, kwargs)]
        given = [magnitude(read)] if read else []
        result = func(*args, **kwargs)
        if made := [*filter(is_floating, (*tree_leaves(result), *written_tensors(func, args, kwargs)))]:
            results = magnitude(made)
            self._computed.append(Computed(number, func, place, _written(args, kwargs)))
            self._magnitudes += [*(given or [torch.zeros_like(results)]), results]
        return result

    def name_casts(self, record: DecisionRecord) -> None:
        """Names the casts that autocast has put around an operation as that, which is what the user wrote."""
        since, self._decided = self._decided, len(self._computed)
        for index, each in enumerate(self._computed[since:], since):
            place = each.place
            if (place.operation, place.location) == ("_to_copy", record.location) and place.phase != "backward":
                named = dataclasses.replace(place, operation=record.operation)
                self._computed[index] = dataclasses.replace(each, place=named)

    def read(self, more: Sequence[torch.Tensor]) -> tuple[list[Computed], list[bool]]:
        """The operations in their order, and whether the magnitudes `more` are not finite; waits once."""
        kinds = iter([_kind(value) for value in _to_host([*self._magnitudes, *more])])
        found = [dataclasses.replace(each, read=next(kinds), made=next(kinds)) for each in self._computed]
        return found, list(map(bool, kinds))


class Operands(TorchDispatchMode):
    """Keeps the operands of operations of the run before; waits for the device only in `producers`."""

    def __init__(self, wanted: Sequence[Computed]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._wanted = {each.number: each for each in wanted}
        self._found: list[tuple[Computed, str, dict[str, torch.Tensor]]] = []
        """Each with the dtype of its result, and copies of its operands by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, wanted = kwargs or {}, self._wanted.get(self.count)
        self.count += 1
        if wanted is None or wanted.func is not func:
            return func(*args, **kwargs)
        operands = {name: tensor.detach().clone() for name, tensor in _named_operands(func, args, kwargs)}
        result = func(*args, **kwargs)
        results = (*tree_leaves(result), *written_tensors(func, args, kwargs))
        dtype = next((_dtype(tensor) for tensor in results if is_floating(tensor)), "")
        self._found.append((wanted, dtype, operands))
        return result

    def producers(self) -> tuple[Producer, ...]:
        """The operations with their operands; fewer than in the run before if the two differ."""
        return tuple(
            Producer(
                place=each.place,
                made=each.made,
                inputs=tuple(_operand(name, tensor) for name, tensor in operands.items()),
                result=dtype,
            )
            for each, dtype, operands in self._found
        )


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
def magnitude(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude, in float64 unless it is that of one tensor; NaN if there is one."""
    # By dimension: torch_xla's maximum without one reduces nothing.
    found = [torch.linalg.vector_norm(each, math.inf, list(range(each.dim()))) for each in tensors]
    return found[0] if len(found) == 1 else torch.stack([each.double() for each in found]).amax(0)


def _kind(value: float) -> str:
    return "" if value - value == 0 else "inf" if value == value else "nan"


def _to_host(values: Sequence[torch.Tensor]) -> list[Any]:
    """Values of tensors of one shape, with one transfer and one program: those on the CPU go to the device."""
    if not values:
        return []
    device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
    found: list[Any] = torch.stack([value.double().to(device) for value in values]).tolist()
    return found


def _named_operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for index, tensor in enumerate(tree_leaves(value)):
            if is_floating(tensor):
                yield f"{argument.name}[{index}]" if isinstance(value, list | tuple) else argument.name, tensor


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _operand(name: str, tensor: torch.Tensor) -> ProducerOperand:
    wide = tensor.cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return ProducerOperand.of(name, _dtype(tensor), tensor.shape, wide.numpy())


def _written(args: Any, kwargs: Any) -> str:
    """``nan`` or ``inf`` if a number among the arguments is; otherwise empty."""
    return max((_kind(value) for value in tree_leaves((args, kwargs)) if isinstance(value, float)), default="")

"""Dispatch modes that `find_overflow` runs a step under: they see every ATen operation, forward and backward.

`NonfiniteResults` finds the operations with an inf or NaN in their results, `OperandStatistics` examines their
operands, `SkipHalfCasts` runs the step in float32.  `GradientRecorder` records gradients with hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from xla_amp.backends.places import LocatingMode, Place
from xla_amp.backends.step_state import written_tensors
from xla_amp.backends.trees import tree_leaves
from xla_amp.tools.overflow.report import Producer, ProducerOperand, produced

UNINITIALIZED: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations whose results are uninitialized memory."""

_CHUNK = 512
"""Magnitudes read at a time; on the lazy device this bounds the size of one program."""


class NonfiniteResults(LocatingMode):
    """Finds operations with an inf or NaN in their results, without waiting for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.nonfinite: dict[int, tuple[Place, float]] = {}
        """Number of the operation -> its place, and inf or NaN."""
        self._pending: list[tuple[int, Place, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, place = self.count, self.locate(func)
        self.count += 1
        result = func(*args, **kwargs)
        if not _computes(func):
            return result
        for tensor in (*tree_leaves(result), *written_tensors(func, args, kwargs)):
            if _is_floating(tensor):
                self._pending.append((number, place, _magnitude(tensor)))
        if len(self._pending) >= _CHUNK:
            self.read()
        return result

    def read(self) -> None:
        """Updates `nonfinite` from the pending device values."""
        pending, self._pending = self._pending, []
        for (number, place, _), value in zip(pending, _to_host([m for _, _, m in pending]), strict=True):
            if value - value != 0:
                before = self.nonfinite.get(number, (place, 0.0))[1]
                self.nonfinite[number] = place, (before if before != before else value)
        self.nonfinite = dict(sorted(self.nonfinite.items()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Suspect:
    number: int
    place: Place
    value: float
    tensors: list[tuple[str, torch.Tensor, torch.Tensor]]
    """For each operand: its name, a meta tensor, and its `_statistics`."""
    written: str
    """``inf`` or ``nan`` if a number among its arguments is."""
    result: str


class OperandStatistics(LocatingMode):
    """Records the operands of operations with nonfinite results, to find those that produced an inf or NaN.

    Waits for the device only in `producers`.
    """

    def __init__(self, nonfinite: Mapping[int, tuple[Place, float]]) -> None:
        super().__init__()
        self.diverged: Place | None = None
        """The first operation that differs from the run before; the run is not usable then."""
        self._nonfinite = nonfinite
        self._suspects: list[_Suspect] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, place = self.count, self.locate(func)
        self.count += 1
        wanted = self._nonfinite.get(number)
        if wanted is None:
            return func(*args, **kwargs)
        if wanted[0].operation != place.operation:
            self.diverged = self.diverged or place
            return func(*args, **kwargs)
        tensors = [(name, _meta(tensor), _statistics(tensor)) for name, tensor in _named_operands(func, args, kwargs)]
        result = func(*args, **kwargs)
        results = (*tree_leaves(result), *written_tensors(func, args, kwargs))
        dtype = next((str(tensor.dtype) for tensor in results if _is_floating(tensor)), "")
        self._suspects.append(
            _Suspect(
                number=number,
                place=wanted[0],
                value=wanted[1],
                tensors=tensors,
                written=_written(args, kwargs),
                result=dtype.removeprefix("torch."),
            )
        )
        return result

    def producers(self) -> tuple[list[Producer], list[Producer]]:
        """The operations that produced an inf or NaN from operands without it, and those that passed on one."""
        values = iter(_to_host([numbers for suspect in self._suspects for _, _, numbers in suspect.tensors]))
        found: list[Producer] = []
        passed_on: list[Producer] = []
        for suspect in self._suspects:
            operands = tuple(_operand(name, tensor, next(values)) for name, tensor, _ in suspect.tensors)
            made = "nan" if suspect.value != suspect.value else "inf"
            own = produced(made, operands, written=suspect.written)
            (found if own else passed_on).append(
                Producer(place=suspect.place, made=made, inputs=operands, result=suspect.result, step=suspect.number)
            )
        return found, passed_on


class SkipHalfCasts(TorchDispatchMode):
    """Skips casts to float16 and bfloat16, so that a step under autocast runs in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            source = args[0].dtype
            if source in (torch.float32, torch.float64):
                kwargs = {**kwargs, "dtype": source}
        return func(*args, **kwargs)


class GradientRecorder:
    """Statistics of parameters' gradients in one run, recorded after each accumulation."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.zero: dict[str, torch.Tensor] = {}
        self.nonzero: dict[str, torch.Tensor] = {}
        """bool: the gradient is finite and not zero."""
        self.nonfinite: dict[str, torch.Tensor] = {}
        """int64 (): number of values that are not finite."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records while the block runs."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def record(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                return
            with _disable_current_modes(), torch.no_grad():
                finite = torch.isfinite(gradient)
                self.zero[name] = gradient == 0
                self.nonzero[name] = finite & (gradient != 0)
                self.nonfinite[name] = (~finite).sum()

        return record


def _computes(func: Any) -> bool:
    """Whether the results are computed values, neither views nor uninitialized memory."""
    if func._schema.name.removeprefix("aten::") in UNINITIALIZED:
        return False
    return not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _is_floating(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and not value.is_sparse
        and value.numel() > 0
    )


def nonfinite(values: Any) -> list[bool]:
    """Whether each floating-point tensor or number of a pytree has an inf or NaN."""
    leaves = [torch.as_tensor(leaf) if isinstance(leaf, float) else leaf for leaf in tree_leaves(values)]
    return [value - value != 0 for value in _to_host([_magnitude(leaf) for leaf in leaves if _is_floating(leaf)])]


@torch.no_grad()
def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """float64 (): the largest magnitude; NaN if there is one."""
    # By dimension: torch_xla's amax() without one reduces nothing.
    return tensor.detach().abs().reshape(-1).amax(0).to(torch.float64)


def _to_host(values: Sequence[torch.Tensor]) -> list[Any]:
    """Values of tensors of one shape, with one transfer per device."""
    found: list[Any] = [None] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    for indices in by_device.values():
        for index, value in zip(indices, torch.stack([values[i] for i in indices]).tolist(), strict=True):
            found[index] = value
    return found


def _named_operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for index, tensor in enumerate(tree_leaves(value)):
            if _is_floating(tensor):
                yield f"{argument.name}[{index}]" if isinstance(value, list | tuple) else argument.name, tensor


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def _statistics(tensor: torch.Tensor) -> torch.Tensor:
    """float64 (4): smallest nonzero magnitude (inf: none), largest finite one, number of inf, number of NaN."""
    size = tensor.detach().abs().reshape(-1)
    finite = torch.isfinite(size)
    return torch.stack(
        [
            torch.where(finite & (size > 0), size, torch.full_like(size, float("inf"))).amin(0).double(),
            torch.where(finite, size, torch.zeros_like(size)).amax(0).double(),
            torch.isinf(size).sum().double(),
            torch.isnan(size).sum().double(),
        ]
    )


def _operand(name: str, tensor: torch.Tensor, numbers: Sequence[float]) -> ProducerOperand:
    smallest, largest, infinities, nans = numbers
    return ProducerOperand(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        smallest=0.0 if smallest == float("inf") else smallest,
        largest=largest,
        infinities=int(infinities),
        nans=int(nans),
    )


def _written(args: Any, kwargs: Any) -> str:
    """``nan`` or ``inf`` if a number among the arguments is; otherwise empty."""
    numbers = [value for value in tree_leaves((args, kwargs)) if isinstance(value, float) and value - value != 0]
    return ("nan" if any(value != value for value in numbers) else "inf") if numbers else ""

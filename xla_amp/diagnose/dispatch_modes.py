"""Watching the operations of a step, forward and backward, below autograd and autocast.

Each kind of watcher is for one run of the step: `Magnitudes` notes the largest magnitude of every result, without
waiting for the device; `Inputs` looks closely at a few operations; `Widened` has casts to half precision not done.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from xla_amp import events
from xla_amp.diagnose.state_restore import written
from xla_amp.pytorch.autocast import module_paths

UNINITIALIZED: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations whose results hold whatever was in memory."""

_CHUNK = 512
"""Magnitudes read at a time: what waits to be read is part of one program."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an operation ran."""

    operation: str
    """ATen name, with an overload that is not the default."""
    phase: str
    """``forward``, ``backward`` or ``update``."""
    module: str
    """Path of the module, of the forward operation for a backward one; empty for the model itself and outside."""
    location: str
    """The user's ``file:line``, of the forward operation for a backward one."""
    gradient_of: str = ""
    """The forward operation whose gradient it was computing."""


class _Watcher(TorchDispatchMode):
    """Counts operations and knows where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._forward: dict[int, Place] = {}
        """By autograd's sequence number of the node that an operation made."""
        self._backward_seen = False

    def _place(self, func: Any) -> Place:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        module, location = module_paths.current(), events.user_location()
        if torch._C._current_graph_task_id() != -1 and module is None:
            self._backward_seen = True
            node = torch._C._current_autograd_node()
            made_by = self._forward.get(node._sequence_nr()) if node is not None else None
            if made_by is None:
                return Place(operation=name, phase="backward", module="", location=location)
            return Place(
                operation=name,
                phase="backward",
                module=made_by.module,
                location=made_by.location,
                gradient_of=made_by.operation,
            )
        phase = "update" if self._backward_seen and not torch.is_grad_enabled() and module is None else "forward"
        place = Place(operation=name, phase=phase, module=module or "", location=location)
        # An autograd node is made, and numbered, before the operation comes here.
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place


class Magnitudes(_Watcher):
    """Which operations had a result with an inf or a NaN in it."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: dict[int, tuple[Place, float]] = {}
        """By number of the operation: where it was, and inf or NaN."""
        self._pending: list[tuple[int, Place, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, place = self.count, self._place(func)
        self.count += 1
        result = func(*args, **kwargs)
        if not _computes(func):
            return result
        for tensor in (*tree_leaves(result), *written(func, args, kwargs)):
            if _is_floating(tensor):
                self._pending.append((number, place, _magnitude(tensor)))
        if len(self._pending) >= _CHUNK:
            self.read()
        return result

    def read(self) -> None:
        """Brings `bad` up to date."""
        pending, self._pending = self._pending, []
        for (number, place, _), value in zip(pending, _read([m for _, _, m in pending]), strict=True):
            if value - value != 0:
                before = self.bad.get(number, (place, 0.0))[1]
                self.bad[number] = place, (before if before != before else value)
        self.bad = dict(sorted(self.bad.items()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One tensor that an operation was given, as it was before the operation."""

    name: str
    """The argument's name in the operation's schema, with a number for a list's."""
    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """Least magnitude of its finite values that are not zero; 0 if there is none."""
    largest: float
    """Largest magnitude of its finite values."""
    infinities: int
    nans: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Producer:
    """An operation that made an inf or a NaN of values without it."""

    place: Place
    made: str
    """``inf`` or ``nan``."""
    inputs: tuple[Operand, ...]
    result: str
    """dtype of the result."""
    step: int
    """Which operation of the step it was, from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Suspect:
    number: int
    place: Place
    value: float
    tensors: list[tuple[str, torch.Tensor, torch.Tensor]]
    """Of each operand: its name, the tensor without its values, and its `_numbers`."""
    meant: bool
    result: str


class Inputs(_Watcher):
    """Looks at the inputs of operations whose results were not finite, to find those that made it so.

    Like `Magnitudes` it waits for the device only in the end (`producers`).
    """

    def __init__(self, bad: Mapping[int, tuple[Place, float]]) -> None:
        super().__init__()
        self.diverged: Place | None = None
        """The first operation that was another one than in the run before, so that nothing can be said."""
        self._bad = bad
        self._suspects: list[_Suspect] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, place = self.count, self._place(func)
        self.count += 1
        wanted = self._bad.get(number)
        if wanted is None:
            return func(*args, **kwargs)
        if wanted[0].operation != place.operation:
            self.diverged = self.diverged or place
            return func(*args, **kwargs)
        tensors = [(name, _shape_of(tensor), _numbers(tensor)) for name, tensor in _named(func, args, kwargs)]
        result = func(*args, **kwargs)
        results = (*tree_leaves(result), *written(func, args, kwargs))
        dtype = next((str(tensor.dtype) for tensor in results if _is_floating(tensor)), "")
        self._suspects.append(
            _Suspect(
                number=number,
                place=wanted[0],
                value=wanted[1],
                tensors=tensors,
                meant=_has_infinite_number(args, kwargs),
                result=dtype.removeprefix("torch."),
            )
        )
        return result

    def producers(self) -> list[Producer]:
        """Those of the operations that made an inf or a NaN themselves."""
        values = iter(_read([numbers for suspect in self._suspects for _, _, numbers in suspect.tensors]))
        found = []
        for suspect in self._suspects:
            operands = [_operand(name, tensor, next(values)) for name, tensor, _ in suspect.tensors]
            made = _made(suspect.value, operands, suspect.meant)
            if made:
                place, result, step = suspect.place, suspect.result, suspect.number
                found.append(Producer(place=place, made=made, inputs=tuple(operands), result=result, step=step))
        return found


class Widened(TorchDispatchMode):
    """Leaves out casts to float16 and bfloat16, so that a step under autocast runs in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            source = args[0].dtype
            if source in (torch.float32, torch.float64):
                kwargs = {**kwargs, "dtype": source}
        return func(*args, **kwargs)


class Gradients:
    """What came to the gradients of some parameters in one run: taken when a backward pass has added to them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.zero: dict[str, torch.Tensor] = {}
        self.nonzero: dict[str, torch.Tensor] = {}
        """bool: where the gradient is finite and not zero."""
        self.bad: dict[str, torch.Tensor] = {}
        """int64 (): how many values are not finite."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Takes note while the block runs."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._taker(name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _taker(self, name: str) -> Any:
        def take(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                return
            with _disable_current_modes(), torch.no_grad():
                finite = torch.isfinite(gradient)
                self.zero[name] = gradient == 0
                self.nonzero[name] = finite & (gradient != 0)
                self.bad[name] = (~finite).sum()

        return take


def _computes(func: Any) -> bool:
    """Whether results are new values, neither views nor uninitialized memory."""
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


@torch.no_grad()
def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """float64 (): the largest magnitude; NaN if there is one."""
    # By dimension: torch_xla's amax() without one reduces nothing.
    return tensor.detach().abs().reshape(-1).amax(0).to(torch.float64)


def _read(values: Sequence[torch.Tensor]) -> list[Any]:
    """Values of tensors of one shape, with one wait for each device."""
    found: list[Any] = [None] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    for indices in by_device.values():
        for index, value in zip(indices, torch.stack([values[i] for i in indices]).tolist(), strict=True):
            found[index] = value
    return found


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for index, tensor in enumerate(tree_leaves(value)):
            if _is_floating(tensor):
                yield f"{argument.name}[{index}]" if isinstance(value, list | tuple) else argument.name, tensor


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """float64 (4): least magnitude that is not zero (inf: none), largest finite one, how many inf, how many NaN."""
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


def _operand(name: str, tensor: torch.Tensor, numbers: Sequence[float]) -> Operand:
    smallest, largest, infinities, nans = numbers
    return Operand(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        smallest=0.0 if smallest == float("inf") else smallest,
        largest=largest,
        infinities=int(infinities),
        nans=int(nans),
    )


def _made(value: float, operands: Sequence[Operand], meant: bool) -> str:
    """What of inf and NaN the result has and no operand had; an infinity that the call says itself is meant."""
    if value != value:
        return "" if any(operand.nans for operand in operands) else "nan"
    return "" if meant or any(operand.nans or operand.infinities for operand in operands) else "inf"


def _has_infinite_number(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, float) and value - value != 0 for value in tree_leaves((args, kwargs)))

"""Save the state of a training step, and restore it.

`StepState` saves Python objects: what modules, optimizers, schedulers and scalers hold, `.grad`, and the states of
random generators.  Values of tensors need a copy before each write: `restored` makes it, on any device, for
`xla_amp.find_overflow` and `xla_amp.search`.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.backends import base, held
from xla_amp.backends.trees import tree_leaves


def reachable(step: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Modules, optimizers, schedulers and scalers that `step` reaches: arguments, closure, globals, its bound object.

    Objects that hold them (a trainer) are searched one attribute level deep.
    """
    plain = inspect.unwrap(step)
    while hasattr(plain, "func"):  # functools.partial
        arguments = [*arguments, *plain.args, *plain.keywords.values()]
        plain = plain.func
    values = [*tree_leaves(list(arguments))]
    owner = getattr(plain, "__self__", None)
    if owner is None and not inspect.isfunction(plain):
        owner = plain  # a callable object
    function = getattr(plain, "__func__", plain)
    if not inspect.isfunction(function):
        function = vars(type(plain)).get("__call__")
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        values += [*variables.nonlocals.values(), *variables.globals.values()]
    if owner is not None:
        values.append(owner)
    found: dict[int, Any] = {}
    for value in values:
        inner = vars(value).values() if hasattr(value, "__dict__") and not inspect.isroutine(value) else ()
        if inspect.ismodule(value) or isinstance(value, type):
            inner = ()
        for candidate in (value, *tree_leaves(list(inner))):
            if isinstance(candidate, held.STATEFUL):
                found[id(candidate)] = candidate
    return list(found.values())


class StepState:
    """What a training step changes in Python, as it is now.

    Args:
        objects: modules, optimizers, schedulers and scalers.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        owners = list(objects)
        self._saved = held.Saved(owners, _attributes)
        modules = [each for each in owners if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in owners if isinstance(each, Optimizer)]
        parameters = [
            *(each for module in modules for each in module.parameters()),
            *(each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]),
        ]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._random_state = random_state()

    def restore(self) -> None:
        """Restores all of it."""
        self._saved.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        set_random_state(self._random_state)


def _attributes(value: Any) -> dict[str, Any] | None:
    return vars(value) if isinstance(value, held.STATEFUL) else held.attributes(value)


def random_state() -> dict[str, Any]:
    """States of the random generators of Python, of torch's CPU, and of the devices in use."""
    engine: Any = base.select()
    found: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if engine.is_started():
        found["xla"] = engine.get_rng_state()
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state` returned; states of devices that are not in use are left out."""
    engine: Any = base.select()
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "xla" in state and engine.is_started():
        engine.set_rng_state(state["xla"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def restored(objects: Iterable[Any]) -> Iterator[None]:
    """On exit, restores the values of tensors, `objects` (as for `StepState`) and random generators."""
    state, written = StepState(objects), _Written()
    try:
        with written:
            yield
    finally:
        state.restore()
        written.restore()


class _Written(TorchDispatchMode):
    """Copies tensors before operations write to them, except tensors that the step created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._created: dict[int, Any] = {}
        self._saved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            key = _storage(tensor)
            if key not in self._created:
                # Keep a detached alias: `copy_` into a parameter itself is an error.
                view = (key, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
                if view not in self._saved:
                    self._saved[view] = tensor.detach(), tensor.detach().clone()
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_sparse}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and _storage(tensor) not in known:
                # A weak reference prevents reuse of the address without keeping the memory.
                self._created[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result

    @torch.no_grad()
    def restore(self) -> None:
        """Writes the copies back."""
        # In reverse order: an earlier copy may overlap a later one and has the older values.
        for tensor, value in reversed(self._saved.values()):
            tensor.copy_(value)


UNDECLARED = frozenset({"running_mean", "running_var"})
"""Arguments that batch normalization updates in place although its schema does not declare it."""


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The dense tensors that an ATen operation writes to, by its schema and by `UNDECLARED`."""
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if not declared and argument.name not in UNDECLARED:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse:
                yield tensor


def _storage(tensor: torch.Tensor) -> int:
    return held.storage_id(tensor.untyped_storage())

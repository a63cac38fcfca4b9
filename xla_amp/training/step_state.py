"""Run a training step and restore what it changed, on any device, for `xla_amp.find_overflow` and `xla_amp.search`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.engines import base
from xla_amp.torch_common.trees import tree_leaves
from xla_amp.training import held, reader


@contextlib.contextmanager
def restored(objects: Iterable[Any]) -> Iterator[None]:
    """On exit, restores values of tensors, what `objects` hold in Python, `.grad`, and random generators.

    Args:
        objects: modules, optimizers, schedulers and scalers.
    """
    owners = list(objects)
    parameters = [
        *(each for owner in owners if isinstance(owner, torch.nn.Module) for each in owner.parameters()),
        *(
            p
            for owner in owners
            if isinstance(owner, Optimizer)
            for group in owner.param_groups
            for p in group["params"]
        ),
    ]
    gradients, saved, written = [(each, each.grad) for each in parameters], held.Saved(owners, _attributes), _Written()
    generators: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    engine = base.select()
    if engine.is_started():
        generators.append((engine.get_rng_state, engine.set_rng_state))
    if torch.cuda.is_initialized():
        generators.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    states = [read() for read, _ in generators]
    try:
        with written:
            yield
    finally:
        saved.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for (_, restore), state in zip(generators, states, strict=True):
            restore(state)
        written.restore()


def _attributes(value: Any) -> dict[str, Any] | None:
    return vars(value) if isinstance(value, reader.STATEFUL) else reader.attributes(value)


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

"""Guards of a captured step: what must be unchanged for a replay, when it is compared, and what happens then.

1. Each call compares its arguments (shape, dtype, strides, aliasing, mesh layout; the value of what is no tensor), the
   modes of the thread (grad mode, default dtype, autocast region and policy) and which parameters have or require a
   gradient, as the cache key (`compiled_step`), and the Python values that the step can see (`Guards`, below).  If they
   differ from those of all cache entries, another entry is made, at most `limit`.
2. A replay compares the options of optimizers and the growth parameters of scalers (`optimizer_steps`), whether the
   step still has the storages that the captured call left (`Guards.storages`), and whether each tensor of the state is
   still alive and written (`replay`).  If they differ, the entry drops its capture and captures again.
3. A replay reads the float hyperparameters of optimizers, and the numbers computed from them go into the program
   (`symbolic_scalars`).  If a comparison of them in Python has another outcome now, the entry captures again.
4. Two recorded calls in a row are compared: operations, numbers, values from the host, random draws, returned Python
   values (`cache_entry`, `replay`).  If they agree, the entry captures.  After 4 calls that did not, one warning gives
   the reason and the step stays recorded.
5. After 8, 64, 512, ... replays a call is recorded and compared with the capture.  If it differs: `CaptureError`.

A recorded call also fails its capture if the step itself changes one of the Python values, since a replay would not.

`Guards` compares what `reach.Reach` lists, with types: every Python value that the step's code can reach by a name.  A
step that can see a value that cannot be compared (an iterator, an open file), or too many values, is not captured.  A
large model has hundreds of modules: their plain attributes, which parameters and submodules each has, and its hooks are
compared by identity first, all at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch

from xla_amp.lazy.capture.reach import Reach, Values, changed, hooks_of, identity, is_frozen
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

_MEMBERS = ("_parameters", "_modules")
"""Tables of a module whose items are compared by identity; a buffer may be replaced."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Guards:
    """What of the state of Python `function` can see: modules, parameters, optimizers, scalers, values.

    Raises:
        NotReplayableError: it can see a value that cannot be compared, or too many.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._reach = Reach(function)
        self.optimizers, self.scalers = self._reach.optimizers, self._reach.scalers
        self._modules = [(label, module.__dict__) for label, module in self._reach.modules]
        spaces = [space for _, space in self._modules]
        self._buffers = [space["_buffers"] for space in spaces]
        self._objects = [
            table for space in spaces for table in (space, *(space[name] for name in (*_MEMBERS, *_HOOKS)))
        ]
        self._tables = [*self._objects, *self._buffers]
        self._read: tuple[list[int], list[Any]] = [], []
        """Sizes, names and objects of the tables when `_module_values` was read."""
        self._module_values: list[tuple[str, Any]] = []
        of_modules = [parameter for space in spaces for parameter in space["_parameters"].values()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        of_optimizers = [parameter for group in groups for parameter in group["params"]]
        found = dict.fromkeys((*of_modules, *of_optimizers, *self._reach.leaves))
        self.parameters: list[torch.Tensor] = [parameter for parameter in found if parameter is not None]
        self._on_device = [parameter for parameter in self.parameters if _is_here(parameter)]

    # -- comparing -----------------------------------------------------------------------------------------------

    def values(self) -> Values:
        """The current values, to compare with earlier ones by ``==``.

        Raises:
            NotReplayableError: a value cannot be compared, or there are too many.
        """
        found = self._reach.values()
        sizes = list(map(len, self._tables))
        objects = [*chain.from_iterable(self._tables), *chain.from_iterable(map(dict.values, self._objects))]
        old_sizes, old_objects = self._read
        if sizes != old_sizes or not all(map(is_, objects, old_objects)):
            self._read, self._module_values = (sizes, objects), self._read_modules()
        found.modules = self._module_values
        return found

    def forget(self) -> None:
        """Keeps no object of modules alive, which a recorded call may replace."""
        self._read = [], []

    def _read_modules(self) -> list[tuple[str, Any]]:
        values: list[tuple[str, Any]] = []
        for label, space in self._modules:
            values.append((f"the number of attributes of {label}", (int, len(space))))
            for name, value in space.items():
                if is_frozen(value):
                    values.append((f"{label}.{name}", (type(value), value if value else repr(value))))
            for name in _MEMBERS:
                for key, item in space[name].items():
                    values.append((f"which object {key} of {label} is", identity(item)))
            for name in ("_buffers", *_HOOKS):
                words = name.strip("_").replace("_", " ")
                values.append((f"the {words} of {label}", (dict, tuple(space[name]))))
        return values

    def storages(self, values: Values) -> list[int]:
        """Which storages the tensors of the state have: those in `values`, of modules and of optimizers.

        A replay needs those that the captured call left.
        """
        slots = chain.from_iterable(optimizer.state.values() for optimizer in self.optimizers)
        tables = chain(self._buffers, slots)
        state = [tensor for table in tables for tensor in table.values() if _is_here(tensor)]
        return [*values.storages, *(id(tensor_io.buffer_of(tensor)) for tensor in (*self._on_device, *state))]

    def gradient_states(self) -> tuple[tuple[bool, bool, int], ...]:
        """For each parameter: whether it has no gradient now, whether it requires one, and how many hooks it has."""
        return tuple([(p.grad is None, p.requires_grad, len(hooks_of(p))) for p in self.parameters])

    def gradients(self) -> list[weakref.ref[Buffer] | None]:
        """The storages of the parameters' gradients, kept alive by nothing here; None where there is none."""
        grads = [parameter.grad for parameter in self.parameters]
        return [
            weakref.ref(tensor_io.buffer_of(grad)) if grad is not None and _is_here(grad) else None for grad in grads
        ]

    def difference(self, before: Values, after: Values) -> str | None:
        """A description of the first value that differs between two results of `values`."""
        if before.found != after.found:
            return self._reach.difference(before, after)
        old, new = dict(before.modules), dict(after.modules)
        for label in old | new:
            if old.get(label) != new.get(label):
                return label if label not in old or label not in new else changed(label, old[label], new[label])
        return None


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE and value.layout is torch.strided

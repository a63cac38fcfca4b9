"""Guards of a captured step: what must be unchanged for a replay, when it is compared, and what happens then.

1. Each call compares its tensor arguments (shape, dtype, strides, aliasing, mesh layout), the modes of the thread (grad
   mode, default dtype, autocast region and policy), which parameters have or require a gradient (`compiled_step`), and
   the Python values that the step can see, other arguments included (`Guards`, below).  If they differ from those of
   all cache entries, another entry is made, at most `limit`.
2. A replay compares the options of optimizers and the growth parameters of scalers (`numbers`), whether the
   step still has the storages that the captured call left (`Guards.storages`), and whether each tensor of the state is
   still alive and written (`replay`).  If they differ, the entry drops its capture and captures again.
3. A replay reads the float hyperparameters of optimizers, and the numbers computed from them go into the program
   (`numbers`).  If a comparison of them in Python has another outcome now, the entry captures again.
4. Two recorded calls in a row are compared: operations, numbers, values from the host, random draws, returned Python
   values (`cache_entry`, `replay`).  If they agree, the entry captures.  After 4 calls that did not, one warning gives
   the reason and the step stays recorded.
5. After 8, 64, 512, ... replays a call is recorded and compared with the capture.  If it differs: `CaptureError`.

A recorded call also fails its capture if the step itself changes one of the Python values, since a replay would not.

`Guards` compares what `reach.Walk` lists, with types: every Python value that the step's code can reach by a name.  A
step that can see a value that cannot be compared (an iterator, an open file), or too many values, is not captured.  A
large model has hundreds of modules: what each has is compared by identity first, all at once, and read again only if an
object was replaced (`module_tree`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import torch

from xla_amp.lazy.capture.module_tree import ModuleTree, hooks_of
from xla_amp.lazy.capture.reach import ALWAYS, Values, Walk
from xla_amp.lazy.graph.buffer import Buffer
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE

EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


class Guards:
    """What of the state of Python a call can see: modules, parameters, optimizers, scalers, values.

    Args:
        function: the step.
        arguments: those that are no tensors, with their names for messages.

    Raises:
        NotReplayableError: it can see a value that cannot be compared, or too many.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any] = EMPTY) -> None:
        self._function = function
        self._names, known = set(ALWAYS), 0
        while known < len(self._names):  # the code that the last walk found names more
            known, self._trees = len(self._names), dict[int, ModuleTree]()
            walk = self._walk(arguments)
        self.optimizers, self.scalers = walk.optimizers, walk.scalers
        spaces = [vars(module) for tree in walk.trees for module in tree.modules]
        self._buffers = [space["_buffers"] for space in spaces]
        of_modules = [parameter for space in spaces for parameter in space["_parameters"].values()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        of_optimizers = [parameter for group in groups for parameter in group["params"]]
        found = dict.fromkeys((*of_modules, *of_optimizers, *walk.leaves))
        self.parameters: list[torch.Tensor] = [parameter for parameter in found if parameter is not None]
        self._objects = walk.values.objects
        self._on_device = [parameter for parameter in self.parameters if _is_here(parameter)]

    # -- comparing -----------------------------------------------------------------------------------------------

    def _walk(self, arguments: Mapping[str, Any]) -> Walk:
        return Walk({**arguments, "the step": self._function}, self._names, self._trees)

    def values(self, arguments: Mapping[str, Any] = EMPTY) -> Values:
        """The current values, to compare with earlier ones by ``==``.

        Args:
            arguments: as above.

        Raises:
            NotReplayableError: a value cannot be compared, or there are too many.
        """
        return self._walk(arguments).values

    def hold(self, values: Values) -> bool:
        """Whether these guards have the modules, parameters, optimizers and scalers that the step can see now."""
        return values.objects == self._objects

    def forget(self) -> None:
        """Keeps no object of modules alive, which a recorded call may replace."""
        for tree in self._trees.values():
            tree.forget()

    def storages(self, values: Values) -> list[int]:
        """Which storages the tensors of the state have: those in `values`, of modules and of optimizers.

        A replay needs those that the captured call left.
        """
        slots = chain.from_iterable(optimizer.state.values() for optimizer in self.optimizers)
        tables = chain(self._buffers, slots)
        state = [each for table in tables for each in table.values() if isinstance(each, torch.Tensor)]
        dense = [tensor for tensor in state if tensor.layout is torch.strided]
        storages = map(torch.Tensor.untyped_storage, chain(self._on_device, dense))
        return [*values.storages, *map(id, map(attrgetter("_xla_amp"), storages))]

    def gradient_states(self) -> tuple[tuple[bool, bool, int], ...]:
        """For each parameter: whether it has no gradient now, whether it requires one, and how many hooks it has."""
        return tuple([(p.grad is None, p.requires_grad, len(hooks_of(p))) for p in self.parameters])

    def gradients(self) -> list[weakref.ref[Buffer] | None]:
        """The storages of the parameters' gradients, kept alive by nothing here; None where there is none."""
        grads = [parameter.grad for parameter in self.parameters]
        return [
            weakref.ref(tensor_io.buffer_of(grad)) if grad is not None and _is_here(grad) else None for grad in grads
        ]


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE and value.layout is torch.strided

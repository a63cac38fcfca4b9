"""`export`: the program of one call on the lazy device as StableHLO, with its casts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_amp.common import arguments
from xla_amp.engines import base
from xla_amp.errors import CaptureError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.trace import Buffer
from xla_amp.lazy.interop.locations import Locations
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.programs.observed import function_of, observed
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import is_lazy
from xla_amp.torch_common import trees
from xla_amp.training.reader import bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedValue:
    """One input or output of an exported program."""

    name: str
    """``x`` or ``batch['ids']`` for an argument, ``fc.weight`` or ``model.fc.weight`` for a parameter or buffer,
    ``output`` or ``output[0]`` for what the call returned, ``new fc.weight`` for a value that it changed.  Of a view
    the program takes all memory: ``storage of x``, with its own shape and dtype (``x.clone()`` is no view)."""
    shape: tuple[int, ...]
    dtype: str
    initial: np.ndarray[Any, Any] | None = dataclasses.field(default=None, repr=False, compare=False)
    """Of an input: its value before the call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported program; `xla_amp.stablehlo` reads it, and any PJRT client runs it."""

    inputs: tuple[ExportedValue, ...]
    """Tensor arguments in their order, then parameters, buffers and other values that it reads."""
    outputs: tuple[ExportedValue, ...]
    """Returned tensors in their order, then new values of the inputs that it changes."""
    exported: jax.export.Exported

    @property
    def mlir_text(self) -> str:
        """The program as MLIR text."""
        return str(self.exported.mlir_module())

    @property
    def mlir_module_serialized(self) -> bytes:
        """The program as a portable artifact."""
        return bytes(self.exported.mlir_module_serialized)

    def serialize(self) -> bytes:
        """Bytes that ``jax.export.deserialize`` and `xla_amp.stablehlo.load` read."""
        return bytes(self.exported.serialize())

    def call(self, *values: Any) -> list[jax.Array]:
        """Runs the program on one array for each of `inputs`; without arrays, on the values before the call."""
        given = values or tuple(each.initial for each in self.inputs)
        if len(given) != len(self.inputs):
            names = ", ".join(each.name for each in self.inputs)
            raise TypeError(f"call() takes {len(self.inputs)} arrays ({names}), got {len(given)}")
        with private_api.x64():
            return list(self.exported.call(*given))


def export(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Exported:
    """The StableHLO program of one call of a step or module on the lazy device.

    The call runs: a training step changes its parameters.  Call a step once before, so that optimizers have created
    their state.  Python numbers, learning rates and the random seed of this call become constants of the program.

    Args:
        step: a module, or a function.  Modules, optimizers and tensors in the function's closure and globals become
            inputs.  Values without a name are constants, unless the call changes them.
        *args: arguments of the call; tensors on the lazy device become inputs.
        **kwargs: the same, by name.

    Raises:
        CaptureError: the call runs more than one program, or none: it reads a value on the host, or syncs inside.
        EngineError: the process uses torch_xla.

    Example:
        >>> import torch, xla_amp
        >>> model = torch.nn.Linear(3, 2).to(xla_amp.xla_device())
        >>> with xla_amp.autocast(xla_amp.xla_device()):
        ...     program = export(model, torch.ones(4, 3, device=xla_amp.xla_device()))
        >>> [value.name for value in program.inputs], program.outputs[0].dtype
        (['input', 'weight', 'bias'], 'bfloat16')
    """
    base.require_lazy("export()")
    arguments.require_function("export(step)", step, "a module or a function of a step")
    execute.sync(wait=True)
    given = dict(_named_arguments(step, args, kwargs))
    named = dict(given)
    for name, tensor in _named_state(step):
        named.setdefault(name, tensor)
    names: dict[int, str] = {}
    holders: list[Buffer] = []  # keeps the buffers alive, so that their ids stay unique
    for name, tensor in named.items():
        buffer = tensor_io.buffer_of(tensor)
        names.setdefault(id(buffer), name if tensor_io.is_whole(tensor) else f"storage of {name}")
        holders.append(buffer)
    first = list(dict.fromkeys(names[id(tensor_io.buffer_of(tensor))] for tensor in given.values()))
    locations, reads = Locations(), metrics.host_syncs
    with observed(lambda parameter, _: np.array(parameter.array)) as runs:
        with locations:
            result = step(*args, **kwargs)
        is_read = bool(runs) and metrics.host_syncs > reads
        execute.sync()
    if not runs:
        raise CaptureError("export(): the call recorded nothing on the lazy device; are its tensors there?")
    if len(runs) > 1 or is_read:
        what = f"{len(runs)} programs" if len(runs) > 1 else "one program and read its values"
        raise CaptureError(
            f"export(): the call ran {what}; expected one, and no read. The first ended at {runs[0].where}. "
            "Take .item(), print, `if tensor:` and sync() out of it, or export its parts"
        )
    return _assemble(runs[0], locations, names, first, list(_leaves("output", result)))


def _assemble(
    run: execute.Run, locations: Locations, names: dict[int, str], arguments: list[str], returned: list[tuple[str, Any]]
) -> Exported:
    parameters = {id(parameter): index for index, parameter in enumerate(run.parameters)}
    changed = [index for index, target in enumerate(run.targets) if id(target) in parameters]
    label = {i: names.get(id(parameter)) for i, parameter in enumerate(run.parameters)}
    for index in (parameters[id(run.targets[each])] for each in changed):
        label[index] = label[index] or f"value {index}"
    ranks = {name: rank for rank, name in enumerate(arguments)}
    order = sorted((i for i in label if label[i] is not None), key=lambda i: ranks.get(str(label[i]), len(ranks)))
    inputs = tuple(
        ExportedValue(name=str(label[i]), shape=value.shape, dtype=value.dtype.name, initial=value)
        for i, value in ((i, run.inputs[i]) for i in order)
    )
    given = [(name, tensor, tensor_io.buffer_of(tensor)) for name, tensor in returned]
    function = function_of(run, [run.parameters[i] for i in order], locations.of(run.key.code))
    ints = np.array([*function.streams.reshape(-1), *function.ints], np.int64)

    def program_of_step(*values: jax.Array) -> list[jax.Array]:
        targets = function(values, jnp.asarray(function.floats), jnp.asarray(ints))
        by_buffer: dict[int, Any] = dict(zip(map(id, run.parameters), map(jnp.asarray, run.inputs), strict=True))
        by_buffer.update(zip((id(run.parameters[i]) for i in order), values, strict=True))
        by_buffer.update(zip(map(id, run.targets), targets, strict=True))
        returned_values = [tensor_io.view_of(by_buffer[id(buffer)], tensor) for _, tensor, buffer in given]
        return [*returned_values, *(targets[index] for index in changed)]

    known = {id(each) for each in (*run.parameters, *run.targets)}
    for name, _, buffer in given:
        if id(buffer) not in known:
            raise CaptureError(f"export(): {name} was not computed by the call; return what it computes")
    with private_api.x64():
        structs = [jax.ShapeDtypeStruct(each.shape, each.initial.dtype) for each in inputs]  # type: ignore[union-attr]
        platform = {"gpu": "cuda"}.get(pjrt.platform(), pjrt.platform())
        exported = jax.export.export(jax.jit(program_of_step, keep_unused=True), platforms=[platform])(*structs)
    new_values = [f"new {label[parameters[id(run.targets[index])]]}" for index in changed]
    outputs = tuple(
        ExportedValue(name=name, shape=tuple(aval.shape), dtype=aval.dtype.name)
        for name, aval in zip([name for name, _ in returned] + new_values, exported.out_avals, strict=True)
    )
    return Exported(inputs=inputs, outputs=outputs, exported=exported)


# Names.


def _named_arguments(step: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    called = step.forward if isinstance(step, torch.nn.Module) else step
    bound = inspect.signature(called).bind(*args, **kwargs).arguments
    for argument, value in bound.items():
        yield from _leaves(argument, value)


def _named_state(step: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(step, torch.nn.Module):
        yield from _state("", step)
        return
    for value, name, _ in bound(step).values:
        yield from _state(name, value)


def _state(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"{name}." if name else ""
    if is_lazy(value):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for own, tensor in (*value.named_parameters(), *value.named_buffers()):
            if is_lazy(tensor):
                yield prefix + own, tensor
    elif isinstance(value, torch.optim.Optimizer):
        for number, entries in enumerate(value.state.values()):
            for key, tensor in entries.items():
                if is_lazy(tensor):
                    yield f"{prefix}state[{number}].{key}", tensor
    elif isinstance(value, list | tuple | dict):
        yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the device in a container, each with its path behind `name`."""
    for path, leaf in trees.tree_flatten_with_path(value)[0]:
        if is_lazy(leaf):
            yield name + trees.keystr(path), leaf

"""`export`: the program of one call on the lazy device as StableHLO, with its casts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_amp.backends import base, trees
from xla_amp.common import arguments, events
from xla_amp.errors import CaptureError
from xla_amp.lazy import private_api
from xla_amp.lazy.graph.trace import Buffer, trace
from xla_amp.lazy.interop.locations import Locations
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lazy.programs.compile import XlaProgram, build
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.torch_integration import generator


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
    named = dict(_named_arguments(step, args, kwargs))
    for name, tensor in _named_state(step):
        named.setdefault(name, tensor)
    names: dict[int, str] = {}
    holders: list[Buffer] = []  # keeps the buffers alive, so that their ids stay unique
    for name, tensor in named.items():
        buffer = tensor_io.buffer_of(tensor)
        names.setdefault(id(buffer), name if tensor_io.is_whole(tensor) else f"storage of {name}")
        holders.append(buffer)
    recorder = _RunObserver()
    locations = Locations()
    with recorder:
        with locations:
            result = step(*args, **kwargs)
        execute.sync()
    run = recorder.only()
    program = _located(run, locations)
    returned = [
        ("output" + trees.keystr(path), leaf)
        for path, leaf in trees.tree_flatten_with_path(result)[0]
        if _is_lazy(leaf)
    ]
    given = [names[id(tensor_io.buffer_of(tensor))] for tensor in _tensors((args, kwargs))]
    return _assemble(run, program, names, list(dict.fromkeys(given)), returned)


@dataclasses.dataclass(kw_only=True)
class _ObservedRun:
    program: XlaProgram
    parameters: list[Buffer]
    initial: list[np.ndarray[Any, Any]]
    targets: list[Buffer]
    floats: list[float]
    ints: list[int]
    """(seed, offset) of each stream, then the lifted integers."""
    lifted: int
    """How many integers are lifted ones."""
    numbers: list[int]
    """Numbers of the parameters in the trace."""
    where: str
    """The user's ``file:line`` that ended it."""


class _RunObserver:
    """Observes the programs that run inside a block."""

    def __init__(self) -> None:
        self.runs: list[_ObservedRun] = []

    def __enter__(self) -> None:
        execute.flush_begins.subscribe(self.before)
        execute.flush_ends.subscribe(self.after)

    def __exit__(self, *_: Any) -> None:
        execute.flush_begins.unsubscribe(self.before)
        execute.flush_ends.unsubscribe(self.after)

    def before(self, parameters: list[Buffer], held: list[bool]) -> None:
        """Called before a program runs: copies its inputs, which it may overwrite."""
        self._initial = [np.array(parameter.array) for parameter in parameters]
        streams = list(trace.streams) or [generator.stream()]
        self._ints = [*(word for stream in streams for word in stream), *trace.ints]
        self._floats = list(trace.floats)

    def after(self, program: XlaProgram, code: tuple[int, ...], targets: list[Buffer]) -> None:
        """Called after `program` was dispatched."""
        parameters, targets = list(trace.parameters), list(targets)
        run = _ObservedRun(
            program=program,
            parameters=parameters,
            initial=self._initial,
            targets=targets,
            floats=self._floats,
            ints=self._ints,
            lifted=len(trace.ints),
            numbers=list(trace.parameter_numbers),
            where=events.user_location(),
        )
        self.runs.append(run)

    def only(self) -> _ObservedRun:
        """The one program that ran."""
        if len(self.runs) == 1:
            return self.runs[0]
        if not self.runs:
            raise CaptureError("export(): the call recorded nothing on the lazy device; are its tensors there?")
        raise CaptureError(
            f"export(): the call ran {len(self.runs)} programs; expected one. The first ended at {self.runs[0].where}. "
            "Take .item(), print, `if tensor:` and sync() out of it, or export its parts"
        )


def _located(run: _ObservedRun, locations: Locations) -> XlaProgram:
    """The program that ran, with modules and lines as locations; it is traced only, and kept in no cache."""
    specs = [parameter.spec for parameter in run.parameters]
    streams = (len(run.ints) - run.lifted) // 2
    counts = len(run.floats), run.lifted
    places = locations.of(run.program.key.code)
    with private_api.x64():
        return build(run.program.key, run.numbers, specs, counts, streams, pjrt.platform(), places)


def _assemble(
    run: _ObservedRun, program: XlaProgram, names: dict[int, str], arguments: list[str], returned: list[tuple[str, Any]]
) -> Exported:
    changed = [
        index for index, target in enumerate(run.targets) if any(target is parameter for parameter in run.parameters)
    ]
    written = {id(run.targets[index]) for index in changed}
    label = {i: names.get(id(parameter)) for i, parameter in enumerate(run.parameters)}
    for index, parameter in enumerate(run.parameters):
        if label[index] is None and id(parameter) in written:
            label[index] = f"value {index}"
    order = sorted((i for i in label if label[i] is not None), key=lambda i: _rank(label[i], arguments))
    indices = {parameter: index for index, parameter in enumerate(order)}
    inputs = tuple(_value(str(label[i]), run.initial[i]) for i in order)
    floats, ints = np.array(run.floats, np.float64), np.array(run.ints, np.int64)
    given = [(name, tensor, tensor_io.buffer_of(tensor)) for name, tensor in returned]

    def program_of_step(*values: jax.Array) -> list[jax.Array]:
        parameters = [
            values[indices[i]] if i in indices else jnp.asarray(run.initial[i]) for i in range(len(run.parameters))
        ]
        results = program.nested(
            [parameters[i] for i in program.donated],
            [parameters[i] for i in program.kept],
            jnp.asarray(floats),
            jnp.asarray(ints),
        )
        targets = [results[index] if index >= 0 else parameters[~index] for index in program.outputs]
        by_buffer = {id(parameter): value for parameter, value in zip(run.parameters, parameters, strict=True)}
        by_buffer.update((id(target), value) for target, value in zip(run.targets, targets, strict=True))
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
    index_of = {id(parameter): i for i, parameter in enumerate(run.parameters)}
    new_values = [f"new {label[index_of[id(run.targets[index])]]}" for index in changed]
    outputs = tuple(
        ExportedValue(name=name, shape=tuple(aval.shape), dtype=aval.dtype.name)
        for name, aval in zip([name for name, _ in returned] + new_values, exported.out_avals, strict=True)
    )
    return Exported(inputs=inputs, outputs=outputs, exported=exported)


def _rank(name: str | None, arguments: list[str]) -> int:
    return arguments.index(name) if name in arguments else len(arguments)


def _value(name: str, initial: np.ndarray[Any, Any]) -> ExportedValue:
    return ExportedValue(name=name, shape=initial.shape, dtype=initial.dtype.name, initial=initial)


# Names.


def _is_lazy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == tensor_io.DEVICE_TYPE


def _tensors(tree: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if _is_lazy(leaf)]


def _named_arguments(step: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    called = step.forward if isinstance(step, torch.nn.Module) else step
    bound = inspect.signature(called).bind(*args, **kwargs).arguments
    for argument, value in bound.items():
        for path, leaf in trees.tree_flatten_with_path(value)[0]:
            if _is_lazy(leaf):
                yield argument + trees.keystr(path), leaf


def _named_state(step: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(step, torch.nn.Module):
        yield from _state("", step)
        return
    function = inspect.unwrap(step)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return
    variables = inspect.getclosurevars(function)
    for name, value in (*variables.nonlocals.items(), *variables.globals.items()):
        yield from _state(name, value)


def _state(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"{name}." if name else ""
    if _is_lazy(value):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for own, tensor in (*value.named_parameters(), *value.named_buffers()):
            if _is_lazy(tensor):
                yield prefix + own, tensor
    elif isinstance(value, torch.optim.Optimizer):
        for number, entries in enumerate(value.state.values()):
            for key, tensor in entries.items():
                if _is_lazy(tensor):
                    yield f"{prefix}state[{number}].{key}", tensor
    elif isinstance(value, list | tuple | dict):
        for path, leaf in trees.tree_flatten_with_path(value)[0]:
            if _is_lazy(leaf):
                yield name + trees.keystr(path), leaf

"""Compile a trace to one XLA executable: interpret it under `jax.jit`, pair donated inputs with outputs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common.events import Place
from xla_amp.errors import StepFailedError, XlaAmpError
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph.tape import Tape
from xla_amp.lazy.graph.trace import Buffer, Instruction, Spec, rounding_cast
from xla_amp.lazy.programs import memory_layout, mesh, pjrt, weight_gradients
from xla_amp.lowering.operand import Deferred, materialize


class Shardings(NamedTuple):
    """Shardings of a program's values over the mesh; empty without a mesh."""

    parameters: tuple[Any, ...] = ()
    """`jax.sharding.Sharding` of each parameter."""
    wanted: tuple[Any, ...] = ()
    """Sharding of each wanted value, None if XLA may choose."""


NO_SHARDINGS = Shardings()
alive: weakref.WeakSet[XlaProgram] = weakref.WeakSet()
"""All programs that exist: their instructions are in use."""


class Key(NamedTuple):
    """Cache key of a program: everything that shapes its executable."""

    code: tuple[int, ...]
    wanted: tuple[int, ...]
    """Numbers of the values to return, one for each live buffer."""
    spent: tuple[int, ...]
    """Parameters whose array can be donated."""
    shardings: Shardings = NO_SHARDINGS


@dataclasses.dataclass(kw_only=True, eq=False)
class XlaProgram:
    """The program of a trace; XLA compiles it on the first call."""

    key: Key

    jitted: Any
    """``jitted(donated, kept, floats, ints)`` returns the outputs.  Inside another program call `nested`."""
    nested: Any
    """`jitted` without compiler options and layouts, which `jax.jit` rejects when nested."""
    donated: tuple[int, ...]
    """Parameters whose memory the outputs reuse."""
    kept: tuple[int, ...]
    outputs: tuple[int, ...]
    """Per wanted value: its position among the outputs, or ``~parameter`` when it is a parameter unchanged."""
    operations: int
    abstract: tuple[Any, ...]
    """Arguments of `jitted`, as `jax.ShapeDtypeStruct`."""
    instructions: dict[int, Instruction]
    """The key's instructions by id, so that they live as long as the program (`trace.forget_unused`)."""
    input_formats: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Parameter -> its `jax.experimental.layout.Format`, where that is another one than JAX's default."""
    context: Context
    """What its operations know of the program."""
    buffers: weakref.WeakSet[Buffer] = dataclasses.field(default_factory=weakref.WeakSet)
    """What it reads and computes in its first run."""
    trains: bool = False
    """Whether that writes a buffer that it reads."""
    is_ready: bool = False
    """Whether it has its executable (`executables`)."""
    code_bytes: int = 0
    """Size of its machine code, 0 where XLA does not report it."""
    loaded: bool = False
    """Whether its executable was read from the disk."""
    size: int = 0
    """Bytes that it takes once compiled, as estimated (`program_cache`)."""
    used: int = 0
    """When it last ran, counted in runs of programs."""

    def result_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """What `jitted` returns, without running it."""
        with private_api.x64():
            return list(jax.eval_shape(self.jitted, *self.abstract))

    def lower(self) -> Any:
        """The program as `jax.stages.Lowered`, to read its text."""
        with private_api.x64():
            return self.jitted.lower(*self.abstract)

    def optimized_hlo(self) -> str:
        """The text of the program as XLA compiled it."""
        with private_api.x64():
            text: str = self.lower().compile().as_text()
            return text


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Properties of the program that an instruction's `emit` may use."""

    platform: str
    replicas: str | None = None
    """Name of the axis over the processes that train together."""
    wide: bool = False
    """Whether the operation gives a weight its gradient, of which each device of a mesh has a part."""


def build(
    key: Key,
    parameter_numbers: Sequence[int],
    parameter_specs: Sequence[Spec],
    numbers: tuple[int, int],
    streams: int,
    platform: str,
    places: Sequence[Place | None] = (),
) -> XlaProgram:
    """Builds the program of a trace; XLA compiles it on the first call.

    Args:
        key: of the trace.
        parameter_numbers, parameter_specs: of the trace's inputs, in the order of first use.
        numbers: count of lifted floats and of lifted ints.
        streams: count of (seed, offset) pairs, which precede the ints.
        platform: XLA platform, for platform-specific lowerings and compiler options.
        places: of the operations in the user's program, for programs that are read (`interop.locations`); without them
            an operation has the line that recorded it first.
    """
    parameter_of = {number: index for index, number in enumerate(parameter_numbers)}
    tape = Tape(key.code)
    specs = tape.specs()
    instructions = {node.instruction.id: node.instruction for node in tape}
    operations = sum(not node.is_parameter for node in tape)
    unchanged = {parameter_of[number] for number in key.wanted if number in parameter_of}
    computed = list(dict.fromkeys(number for number in key.wanted if number not in parameter_of))
    donated = _pair(
        [i for i in key.spent if i not in unchanged], parameter_specs, [specs[number] for number in computed]
    )
    position = {number: index for index, number in enumerate(computed)}
    kept = tuple(sorted(set(range(len(parameter_specs))).difference(donated)))
    gradients, joined = weight_gradients.find(tape)
    # XLA puts the sum over devices right after the product, in the dtype of its result.
    wide = gradients if any(layout.num_devices > 1 for layout in key.shardings.parameters) else frozenset[int]()
    once = joined if platform == "gpu" else frozenset[int]()
    context = Context(platform, mesh.AXIS if mesh.replicas else None)
    options: dict[str, Any] = {}
    if key.shardings.parameters:
        wish = dict(zip(reversed(key.wanted), reversed(key.shardings.wanted), strict=True))
        options["out_shardings"] = [wish[number] for number in computed]
    structs = [
        jax.ShapeDtypeStruct(spec.shape, spec.numpy_dtype, sharding=layout)
        for spec, layout in zip(parameter_specs, key.shardings.parameters or [None] * len(parameter_specs), strict=True)
    ]

    def lazy_step(
        taken: list[jax.Array], others: list[jax.Array], floats: jax.Array, ints: jax.Array
    ) -> list[jax.Array]:
        parameters: list[Any] = [None] * len(parameter_specs)
        for index, array in zip(donated, taken, strict=True):
            parameters[index] = array
        for index, array in zip(kept, others, strict=True):
            parameters[index] = array
        return _interpret(
            tape, parameters, floats, ints[2 * streams :], ints[: 2 * streams], computed, context, wide, once, places
        )

    step = replicated(lazy_step) if mesh.replicas else lazy_step
    nested = jax.jit(step, donate_argnums=0, **options)
    chosen = pjrt.compiler_options(platform)
    # Over several devices XLA chooses the layouts.
    orders = {} if options or mesh.replicas else memory_layout.orders(tape, platform)
    input_formats: dict[int, Any] = {}
    if orders:
        given = list(memory_layout.shardings(parameter_specs, orders))
        taken, others = ([given[index] for index in part] for part in (donated, kept))
        options["in_shardings"] = taken, others, None, None
        options["out_shardings"] = list(memory_layout.shardings((specs[number] for number in computed), orders))
        input_formats = {index: given[index] for index, spec in enumerate(parameter_specs) if spec in orders}
    jitted = nested
    if chosen or orders:
        jitted = jax.jit(step, donate_argnums=0, compiler_options=chosen or None, **options)
    program = XlaProgram(
        key=key,
        jitted=jitted,
        nested=nested,
        donated=tuple(donated),
        kept=kept,
        outputs=tuple(~parameter_of[number] if number in parameter_of else position[number] for number in key.wanted),
        operations=operations,
        context=context,
        abstract=(
            [structs[index] for index in donated],
            [structs[index] for index in kept],
            jax.ShapeDtypeStruct((numbers[0],), np.float64),
            jax.ShapeDtypeStruct((numbers[1] + 2 * streams,), np.int64),
        ),
        instructions=instructions,
        input_formats=input_formats,
    )
    alive.add(program)
    return program


def replicated(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` on the values of each process, without the check that replicated arrays are equal."""
    whole = jax.sharding.PartitionSpec()
    return jax.shard_map(step, mesh=mesh.active, in_specs=whole, out_specs=whole, check_vma=False)


def _pair(spent: Sequence[int], parameter_specs: Sequence[Spec], outputs: Sequence[Spec | None]) -> list[int]:
    """The spent parameters that have an output of the same spec: JAX warns about any other donation."""
    room = Counter(outputs)
    donated = []
    for index in spent:
        if room[parameter_specs[index]] > 0:
            room[parameter_specs[index]] -= 1
            donated.append(index)
    return donated


def _interpret(
    tape: Tape,
    parameters: Sequence[jax.Array],
    floats: jax.Array,
    ints: jax.Array,
    streams: jax.Array,
    wanted: Sequence[int],
    context: Context,
    wide: Set[int],
    made_once: Set[int],
    places: Sequence[Place | None],
) -> list[jax.Array]:
    values: list[Any] = []
    found = iter(places)
    in_wide = dataclasses.replace(context, wide=True)
    times = Counter(node.instruction.id for node in tape)
    for node in tape:
        instruction, place = node.instruction, next(found, None)
        if node.is_parameter:
            values.append(parameters[node.at.parameters])
            continue
        rng = None
        if node.draw:
            stream, index = node.draw
            key = jax.random.key(streams[2 * stream], impl="threefry2x32")
            rng = jax.random.fold_in(key, streams[2 * stream + 1] + index)
        arguments = (
            [values[number] if number >= 0 else None for number in node.inputs],
            [floats[node.at.floats + i] for i in range(instruction.floats)],
            [ints[node.at.ints + i] for i in range(instruction.ints)],
            rng,
        )
        once = place is None and times[instruction.id] > 1
        with _at(instruction, place):
            results = (_traced if once else emit)(instruction, in_wide if node.first in wide else context, *arguments)
        if node.first in made_once:
            results = jax.lax.optimization_barrier(results)
        values.extend(results)
    return [materialize(values[number]) for number in wanted]


def _at(instruction: Instruction, place: Place | None) -> Any:
    """The context that gives an operation its location in the program."""
    if place is None:
        return private_api.located(instruction.name, instruction.location)
    is_backward = place.phase == "backward"
    return private_api.located(instruction.name, place.location, place.module, backward=is_backward)


def _traced(instruction: Instruction, context: Context, *arguments: Any) -> list[Any]:
    """`emit`, whose lowering JAX traces once for an instruction that occurs more than once, and calls."""
    known = instruction.traced.get(context)
    if known is None:
        known = instruction.traced[context] = jax.jit(functools.partial(emit, instruction, context))
    results: list[Any] = known(*arguments)
    return results


def emit(instruction: Instruction, context: Context, inputs: Any, floats: Any, ints: Any, rng: Any) -> list[Any]:
    """The results of one operation: arrays, deferred values, None for a result that it does not have.

    Raises:
        StepFailedError: the lowering failed; names the line that recorded the operation.
    """
    try:
        inputs = [x if isinstance(x, instruction.takes) else materialize(x) for x in inputs]
        results = instruction.emit(context, inputs, floats, ints, rng)  # type: ignore[misc]
        return [
            None if spec is None else result if isinstance(result, Deferred) else _conform(result, spec, context.wide)
            for spec, result in zip(instruction.outs, results, strict=True)
        ]
    except XlaAmpError:
        raise
    except Exception as error:
        raise StepFailedError(_failure(instruction, inputs, error)) from error


def _failure(instruction: Instruction, inputs: Sequence[Any], error: Exception) -> str:
    """Describes an operation that failed, with the line that recorded it."""
    instruction.forget()  # the next call records its own line
    shapes = ", ".join("None" if x is None else f"{x.dtype}{list(x.shape)}" for x in inputs)
    where = f" (recorded at {instruction.location})" if instruction.location else ""
    return f"the lowering of {instruction.name} failed on ({shapes}): {type(error).__name__}: {error}{where}"


def _conform(result: Any, spec: Spec, rounds: bool) -> jax.Array:
    """A lowering's result in the dtype and shape of torch's meta kernel.

    None is a result that ``output_mask`` leaves out, as the input gradient of a model's first layer.  torch's meta
    kernels ignore the mask, so zeros that are never read stand for it.  With `rounds` XLA may not omit the rounding.
    """
    if result is None:
        return jnp.zeros(spec.shape, spec.numpy_dtype)
    array: jax.Array = jnp.asarray(result)
    if array.shape != spec.shape:
        if array.size != spec.size:
            raise ValueError(f"it gave shape {list(array.shape)} where torch expects {list(spec.shape)}")
        array = array.reshape(spec.shape)
    if array.dtype == spec.numpy_dtype:
        return array
    if rounds:
        return rounding_cast(array, spec.numpy_dtype)
    return array != 0 if spec.numpy_dtype == np.bool_ else array.astype(spec.numpy_dtype)

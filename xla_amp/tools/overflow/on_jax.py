"""`find_overflow` for JAX: evaluate a function operation by operation; find the one that makes the first inf or NaN.

The jaxpr of the function, and those of ``jit``, loops, branches, custom derivatives and sharded functions in it, are
evaluated equation by equation on concrete values, as `jax.core.eval_jaxpr` would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common import progress
from xla_amp.common.events import Place
from xla_amp.errors import StepError
from xla_amp.jax import compat, modules, rebind
from xla_amp.jax.low_primitives import original_call
from xla_amp.jax.primitives import info
from xla_amp.tools.overflow.report import MOST, OverflowReport, Producer, ProducerOperand, produced

_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
_NUMBERS: Final = (jax.Array, np.ndarray, np.generic, float, complex)
"""Leaves of arguments and results that can be an inf or NaN."""


def find_overflow(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> OverflowReport:
    """Finds the operation of a JAX function, or of a whole training step, that produces the first inf or NaN.

    Traces the function, runs one operation after the other, and looks at each result: in ``jit``, ``scan`` and
    ``while`` (names the iteration), ``cond``, ``remat``, custom derivatives and ``shard_map``, forward and backward.
    Under `autocast` it watches what autocast computes.  A compiled function may keep more bits between operations that
    XLA fuses, so a value that just overflows here may be finite there.  Donated arguments stay valid, and objects of
    `flax.nnx` among the arguments keep their state; callbacks of JAX run.

    An infinity among the operands, such as a mask of ``-inf``, is not reported; a NaN computed from it is.  What the
    program was given or wrote as a constant, such as the NaN that `jax.numpy.take` puts in place of what is out of
    bounds, is no overflow until it reaches a result.

    Args:
        function: any function of pytrees.  For gradients pass ``jax.grad(loss)`` or the step.
        *args: for `function`.
        **kwargs: for `function`.

    Returns:
        The report; `OverflowReport.not_watched` names what was not looked into, such as the inside of a kernel.

    Raises:
        StepError: the function runs no JAX operation that can be watched: it is a program that was compiled ahead of
            time, or computes in another library; it reads values of arrays, so JAX cannot trace it; or the call is
            inside of a function that JAX traces.
        TypeError: `function` is not callable.

    Example:
        >>> report = find_overflow(jax.jit(lambda x: jnp.sum(jnp.log(-x))), jnp.ones(3))
        >>> report.first.place.operation, report.first.made, report.first.inputs[0].largest
        ('log', 'nan', 1.0)
    """
    if not callable(function):
        raise TypeError(f"find_overflow() expects a function, got {function!r} ({type(function).__name__})")
    if isinstance(function, jax.stages.Compiled):
        raise StepError("find_overflow: a program that was compiled ahead of time has no operations; pass the function")
    if not compat.is_eager(compat.current_trace()):
        raise StepError("find_overflow: called inside of a function that JAX traces; call it with concrete values")
    arguments = _nonfinite(modules.leaves_by_path((args, kwargs), "args"))
    with progress.shown("find_overflow", first=3), modules.functionalized(function, args, kwargs) as lifted:
        jaxpr, tree = _traced(lifted)
        watch = _Watch()
        result = watch.run(jaxpr, ())
    jax.block_until_ready(result)
    if not watch.operations:
        raise StepError(
            "find_overflow: the function ran no JAX operation that can be watched. For a PyTorch step: "
            "xla_amp.find_overflow(step, ...)"
        )
    return watch.report(arguments, _nonfinite(lifted.leaves(jax.tree.unflatten(tree, result))))


def _traced(lifted: modules.Lifted) -> tuple[Any, Any]:
    """The jaxpr of a call, in which its arguments are constants, and the tree of its results that are numbers."""
    trees = []

    def call() -> list[Any]:
        args = jax.tree.map(lambda leaf: leaf, lifted.args)  # variables that belong to this trace
        result = lifted.function(*args, **lifted.kwargs)
        numbers = jax.tree.map(lambda leaf: leaf if isinstance(leaf, _NUMBERS) else None, result)
        trees.append(jax.tree.structure(numbers))
        return jax.tree.leaves(numbers)

    try:
        with compat.retraced(), modules.named():
            return jax.make_jaxpr(call)(), trees[0]
    except jax.errors.JAXTypeError as error:
        raise StepError(
            "find_overflow: the function reads values while it runs, so JAX cannot trace it; pass the step whose "
            "gradients or results are not finite, as you would pass it to jax.jit"
        ) from error


class _Watch:
    """Evaluates operations in the current trace, looks at the operands and results of each, and keeps what it finds."""

    def __init__(self) -> None:
        self.operations = 0
        self._producers: list[Producer] = []
        self._passed_on: Producer | None = None
        self._copies: dict[int, Any] = {}
        """Number of a producer that is a low copy -> its result."""
        self._loops: list[str] = []
        self._inside: dict[str, None] = {}
        """What is not watched."""
        self._eqns: list[Any] = []
        """Equations around the current operation, and its own."""

    @contextlib.contextmanager
    def iteration(self, number: int, loop: str) -> Iterator[None]:
        """Inside, operations are in an iteration of a loop."""
        self._loops.append(f"iteration {number} of {loop}")
        try:
            yield
        finally:
            self._loops.pop()

    def _look(self, primitive: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Looks at one operation that has run."""
        self.operations += 1
        progress.tell(f"{self.operations:,} operations, now {primitive.name}")
        self._name_copies(primitive, operands)
        parts = filter(None, map(self._parts, results))
        made, bad = next(((kind, str(each[0].dtype)) for each in parts if (kind := _made(each))), ("", ""))
        if not made or len(self._producers) >= MOST:
            return
        read = [(f"operand {index}", value, self._parts(value)) for index, value in enumerate(operands)]
        inputs = tuple(_operand(name, np.shape(value), parts) for name, value, parts in read if parts)
        # A gather fills with a number of the program what is out of bounds; it computes nothing.
        given = _made([part for *_, parts in read for part in parts])
        finds = produced(made, given=given, written=made if primitive.name == "gather" else "")
        if not finds and self._passed_on is not None:
            return
        producer = Producer(
            place=self._place(primitive),
            made=made,
            inputs=inputs,
            result=bad,
        )
        if finds:
            if primitive.name == "low_copy":
                self._copies[len(self._producers)] = results[0]
            self._producers.append(producer)
        else:
            self._passed_on = producer

    def _name_copies(self, primitive: Any, operands: Sequence[Any]) -> None:
        """Names a low copy that is not finite by the user's operation that reads it first."""
        for number, copy in [*self._copies.items()]:
            if any(each is copy for each in operands):
                producer = self._producers[number]
                named = dataclasses.replace(producer.place, operation=_operation(primitive))
                self._producers[number] = dataclasses.replace(producer, place=named)
                del self._copies[number]

    def report(self, arguments: tuple[str, ...], results: tuple[str, ...]) -> OverflowReport:
        """What was found; `arguments` and `results` are the names of those that are not finite."""
        return OverflowReport(
            producers=tuple(self._producers),
            passed_on=self._passed_on if results and not self._producers else None,
            arguments=arguments,
            results=results,
            operations=self.operations,
            not_watched=tuple(self._inside),
        )

    def _evaluate(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The results of an equation; looks into those that contain jaxprs."""
        self._eqns.append(eqn)
        try:
            row = info(eqn.primitive.name)
            if row.kind in rebind.KINDS:
                try:
                    return _INSIDE.get(row.kind, _call)(self, eqn.params, operands)
                except jax.errors.ConcretizationTypeError:
                    self._only_results(eqn.primitive, ": devices may take different ways in it")
                except NotImplementedError as error:
                    self._only_results(eqn.primitive, ": " + str(error).partition("\n")[0])
            elif row.opaque or (row.kind is None and compat.sub_jaxprs(eqn.params)):
                self._only_results(eqn.primitive, "")
            outs = rebind.bind_as_written(eqn, operands)
            self._look(eqn.primitive, operands, outs)
            return outs
        finally:
            self._eqns.pop()

    def run(self, inner: Any, values: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        return rebind.evaluate(inner, values, self._evaluate)

    def _location(self) -> str:
        """The user's ``file:line`` of the innermost equation that has one; empty if none has."""
        found = map(compat.location, reversed(self._eqns))
        return next((each for each in found if each and not each.startswith(_PACKAGE)), "")

    def _only_results(self, primitive: Any, why: str) -> None:
        self._inside[f"the inside of {primitive.name} ({self._location()}){why}"] = None

    def _parts(self, value: Any) -> list[np.ndarray[Any, Any]]:
        found, whole = _parts(value)
        if not whole:
            self._inside["the shards of arrays on devices of other processes"] = None
        return found

    def _place(self, primitive: Any) -> Place:
        return Place(
            operation=_operation(primitive),
            phase=compat.phase(),
            module=".".join(name for name in compat.scopes(None) if name != compat.REMATTED),
            location=self._location(),
            iteration=", ".join(self._loops),
        )


def _call(watch: _Watch, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    return watch.run(rebind.inner(params), operands)


def _cond(watch: _Watch, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    branches, (index, *rest) = params["branches"], operands
    return watch.run(branches[min(max(int(index), 0), len(branches) - 1)], rest)


def _scan(watch: _Watch, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    body, length = params["jaxpr"], params["length"]
    consts, carry, xs = rebind.scanned(params, operands)
    carried = len(carry)
    rows: list[list[Any]] = []
    for number in range(length)[:: -1 if params["reverse"] else 1]:
        slices = [jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False) for x in xs]
        with watch.iteration(number, "scan"):
            outs = watch.run(body, [*consts, *carry, *slices])
        carry = outs[:carried]
        rows.append(outs[carried:])
    if params["reverse"]:
        rows.reverse()
    if not length:
        return [*carry, *(jnp.empty((0, *aval.shape), aval.dtype) for aval in body.out_avals[carried:])]
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _shard_map(watch: _Watch, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    return rebind.sharded(params, operands, lambda *values: watch.run(rebind.inner(params), values))


def _while(watch: _Watch, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    condition, body, carry = rebind.looped(params, operands)
    for number in itertools.count():
        with watch.iteration(number, "while (its condition)"):
            (proceed,) = watch.run(params["cond_jaxpr"], [*condition, *carry])
        lanes = np.ndim(proceed)  # under `jax.vmap` each has its own condition
        if not (proceed.any() if lanes else proceed):
            break
        with watch.iteration(number, "while"):
            outs = watch.run(params["body_jaxpr"], [*body, *carry])
        carry = [_select(proceed, new, old) for new, old in zip(outs, carry, strict=True)] if lanes else outs
    return carry


def _select(lanes: Any, new: Any, old: Any) -> Any:
    select = jax.lax.select
    for _ in range(np.ndim(lanes)):
        select = jax.vmap(select)
    return select(lanes, new, old)


_INSIDE: Final[Mapping[str | None, Callable[[_Watch, Mapping[str, Any], Sequence[Any]], list[Any]]]] = MappingProxyType(
    {"cond": _cond, "scan": _scan, "shard_map": _shard_map, "while": _while}
)
"""Kind of primitive -> its results, jaxpr by jaxpr; the others run their one jaxpr."""


def _operation(primitive: Any) -> str:
    """The name of a primitive as the user wrote it: a low product is a product."""
    return str(original_call(primitive, (), {"masters": ()})[0].name)


def _made(parts: Sequence[np.ndarray[Any, Any]]) -> str:
    """``nan`` or ``inf`` if a value has one; otherwise empty."""
    if all(bool(np.isfinite(part).all()) for part in parts):
        return ""
    return "nan" if any(bool(np.isnan(part).any()) for part in parts) else "inf"


def _operand(name: str, shape: tuple[int, ...], parts: Sequence[np.ndarray[Any, Any]]) -> ProducerOperand:
    dtype = parts[0].dtype
    kind = np.complex128 if dtype.kind == "c" else np.float64
    wide = np.concatenate([part.astype(kind).reshape(-1) for part in parts])
    return ProducerOperand.of(name, str(dtype), shape, wide)


def _parts(value: Any) -> tuple[list[np.ndarray[Any, Any]], bool]:
    """The values of a floating-point array on the host, shard by shard if other processes have some; none otherwise."""
    # Inside of a `jax.shard_map` that runs eagerly, a tracer has the array of all devices' values.
    array = value if compat.is_concrete(value) else getattr(value, "val", value)
    array = array[...] if isinstance(array, jax.Ref) else array
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        array = np.asarray(value)
        dtype = array.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended) or not jnp.issubdtype(dtype, jnp.inexact) or not np.size(array):
        return [], True
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return [np.asarray(shard.data) for shard in array.addressable_shards], False
    return [np.asarray(array)], True


def _nonfinite(leaves: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    return tuple(
        path
        for path, leaf in leaves
        if isinstance(leaf, _NUMBERS) and not all(bool(np.isfinite(part).all()) for part in _parts(leaf)[0])
    )

"""The table of lowerings: ATen operation name -> pure JAX function.

A lowering is written once, for the functional variant of an operation.  It does not use torch, traces or devices::

    @register("lerp.Scalar", "lerp.Tensor")
    def lerp(start, end, weight, *, common): ...

The engine calls it while tracing under `jax.jit`, with the operation's arguments in the order of its ATen schema
(keyword-only ones by name), translated as follows:

======================  =========================================================================================
schema type             what the function receives
======================  =========================================================================================
``Tensor``              a JAX array; also the 0-d array of a Python number given in its place
``Tensor?``             a JAX array or ``None``
``Tensor[]``            a list of the above
``Scalar``              a 0-d ``float64``/``int64`` array (*lifted*: its value never forces a new executable), or a
                        Python number: the schema's default, a bool, a complex, or an argument named in `static`
``float``               a Python float, or a 0-d ``float64`` array for an argument named in `lifted` or `dynamic`
``int``, ``int[]``      a Python number, a list of them; or 0-d ``int64`` arrays for an argument named in `dynamic`
``float[]``             a list of Python numbers
``ScalarType``          a NumPy dtype, or ``None``
``Device``, ``Layout``, ``Generator``, ``MemoryFormat``, ``pin_memory``: dropped
======================  =========================================================================================

Keyword-only parameters with the names in `SUPPLIES` are filled in by the engine.  The function returns the
operation's new results in schema order, then the new values of the arguments in `mutates`; the engine converts each
to the dtype that torch promises, so a lowering may return a wider type than asked.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from xla_amp.common import events

_Function = TypeVar("_Function", bound=Callable[..., Any])

SUPPLIES: Mapping[str, str] = MappingProxyType(
    {
        "out": "jax.ShapeDtypeStruct of the first result",
        "outs": "tuple of jax.ShapeDtypeStruct (or None), one per result",
        "common": "NumPy dtype that torch's promotion gives for all tensor and number arguments together",
        "rng": "a JAX PRNG key for this call",
        "replicas": "name of the axis over the processes that train together (for `jax.lax.pmax`), None for one",
        "wide": "whether half sums are to be returned in float32: the devices of a mesh have parts of them",
        "partitioned": "whether XLA splits the program over the devices of a mesh (it cannot split a custom kernel)",
        "platform": "the XLA platform that the program is lowered for: 'cpu', 'gpu' or 'tpu'",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowering:
    """One row of the table."""

    name: str
    """ATen name with overload, ``"add.Tensor"``; the default overload has none, ``"mm"``.  Operators of other
    libraries carry their namespace, ``"mylib::myop"``."""
    function: Callable[..., Any]
    supplies: frozenset[str]
    """Names from `SUPPLIES` that `function` asks for."""
    static: frozenset[str]
    """Number arguments that are constants of the program (a new value recompiles), e.g. the exponent of ``pow``."""
    dynamic: frozenset[str]
    """Number arguments that are Python numbers at first, and 0-d arrays once their values have differed."""
    lifted: frozenset[str]
    """``float`` arguments that are data: a new value never recompiles, e.g. a fused optimizer's learning rate."""
    mutates: tuple[str, ...]
    """Arguments that the operation writes; a list argument stands for all its tensors."""
    takes: tuple[type, ...]
    """Deferred operands that the function accepts (`Permuted`, `OneHot`, `Biased`); others are materialized first."""
    minor: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Platform -> tensor argument -> its minor dimensions in memory, the most minor last."""


_table: dict[str, Lowering] = {}


@events.Point
def registered(lowering: Lowering) -> None:
    """After each new row of the table; a started engine installs a kernel for it."""


def register(
    *names: str,
    static: Iterable[str] = (),
    lifted: Iterable[str] = (),
    dynamic: Iterable[str] = (),
    mutates: Iterable[str] = (),
    takes: tuple[type, ...] = (),
    minor: Mapping[str, Mapping[str, tuple[int, ...]]] = MappingProxyType({}),
    override: bool = False,
) -> Callable[[_Function], _Function]:
    """Decorator that makes a JAX function the lowering of the operations `names`.

    The engine derives the in-place variant (``add_`` of ``add``) and the ``out=`` variant.

    Args:
        names: ATen names with overload (``"add.Tensor"``) or ``"library::name.overload"``.
        static: number arguments that the function needs as Python constants.
        lifted: ``float`` arguments that arrive as data (``Scalar`` arguments always do).
        dynamic: number arguments (also in lists) that the function accepts as Python numbers and as 0-d arrays: a
            shift, an index, a diagonal, a probability.  They may not shape the result.  The engine passes arrays where
            a new value would otherwise compile the same program again.
        mutates: arguments that the operation writes, in the order in which the function returns their new values.
        takes: deferred operands that the function can use better than arrays: `xla_amp.lowering.Permuted`,
            `xla_amp.lowering.OneHot`.
        minor: platform -> argument -> dimensions that should be minor in memory, the most minor last, for an argument
            that is kept between steps (a weight).  Without it XLA keeps the default layout and copies the argument
            into the operation's layout in each step.
        override: replace an existing lowering instead of raising.

    Raises:
        ValueError: a name is registered already, or no name was given.

    Example:
        >>> import jax.numpy as jnp
        >>> @register("mylib::softsign")
        ... def softsign(x):
        ...     return x / (1 + jnp.abs(x))
    """
    if not names:
        raise ValueError('register() expects at least one operation name, e.g. register("mylib::softsign")')

    def decorate(function: _Function) -> _Function:
        keyword_only = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        for name in names:
            if name in _table and not override:
                raise ValueError(
                    f"operation {name!r} already has a lowering ({_table[name].function.__module__}."
                    f"{_table[name].function.__qualname__}); pass override=True to replace it"
                )
            _table[name] = Lowering(
                name=name,
                function=function,
                supplies=frozenset(SUPPLIES).intersection(keyword_only),
                static=frozenset(static),
                lifted=frozenset(lifted),
                dynamic=frozenset(dynamic),
                mutates=tuple(mutates),
                takes=takes,
                minor=minor,
            )
            registered(_table[name])
        return function

    return decorate


def find(name: str) -> Lowering | None:
    """The lowering of the operation `name`, or ``None``."""
    return _table.get(name)


def table() -> Mapping[str, Lowering]:
    """All lowerings by name (read-only)."""
    return MappingProxyType(_table)

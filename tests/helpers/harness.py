"""Run a lowering as the engine does and compare it with PyTorch on the CPU.

``check("add.Tensor", x, y, alpha=2)`` calls ``torch.ops.aten.add.Tensor`` and the lowering with the same arguments,
translated by the operation's schema as `xla_amp.lowering.registry` documents, and compares every result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from xla_amp.lowering import Lowering, find, table
from xla_amp.lowering.operand import materialize

DTYPES: dict[torch.dtype, np.dtype] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
}

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-11,
    torch.float32: 4e-6,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.complex64: 4e-6,
    torch.complex128: 1e-11,
}
"""Relative and absolute: one unit in the last place of the half types (both sides round once), a few of float32.
A value computed in the half type itself, or a float64 value that went through float32, fails."""

_QUICK = {"xla_backend_optimization_level": 0}
"""Each program runs once on a few elements: without LLVM's optimization a test takes half the time."""

DROPPED = ("Device", "Layout", "Generator", "MemoryFormat")


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether torch is older than the pinned version."""
_LATER = frozenset(("_foreach_clone", "_grid_sampler_2d_cpu_fallback_backward"))
"""Operations that an older torch lacks, or composes of others."""


def is_here(name: str) -> bool:
    """Whether this version of torch has the operation `name`."""
    return not (OLD and name in _LATER)


def operator(name: str) -> Any:
    """The torch operator of an ATen name with overload, or of ``"library::name.overload"``."""
    library, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), packet), overload or "default")


def to_array(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor as a JAX array of the same dtype (inside `jax.enable_x64`)."""
    tensor = tensor.detach().resolve_conj().contiguous()
    if tensor.dtype is torch.bfloat16:
        return jnp.array(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jnp.array(tensor.numpy())


def to_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A JAX array as a CPU tensor of `dtype`, converted as the engine converts results."""
    array = np.asarray(jax.lax.convert_element_type(array, DTYPES[dtype]))
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _leaves(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def common_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """torch's promotion of all tensors and numbers among `values`.

    `torch.result_type` takes two operands: dimensioned tensors, 0-d tensors and numbers are each promoted first, as in
    ``at::native::result_type``.
    """
    tensors: list[torch.dtype] = []
    scalars: list[torch.dtype] = []
    numbers: list[Any] = []
    for value in _leaves(values):
        if isinstance(value, torch.Tensor):
            (tensors if value.dim() else scalars).append(value.dtype)
        elif isinstance(value, (bool, int, float, complex)):
            numbers.append(value)
    operands: list[Any] = []
    if tensors:
        operands.append(torch.empty(1, dtype=functools.reduce(torch.promote_types, tensors)))
    if scalars:
        operands.append(torch.empty((), dtype=functools.reduce(torch.promote_types, scalars)))
    if numbers:
        operands.append(max(numbers, key=lambda number: (bool, int, float, complex).index(type(number))))
    if not operands:
        return None
    result = operands[0]
    for operand in operands[1:]:
        dimensioned = isinstance(result, torch.Tensor) and result.dim() > 0
        result = torch.empty((1,) if dimensioned else (), dtype=torch.result_type(result, operand))
    return torch.result_type(result, result)


class Call:
    """One call of an operation: its arguments bound to the schema."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        lowering = find(name)
        assert lowering is not None, f"{name} has no lowering"
        self.name, self.lowering, self.operator = name, lowering, operator(name)
        self.schema = self.operator._schema
        self.values: dict[str, Any] = {}
        self.given: set[str] = set()
        rest = list(args)
        for argument in self.schema.arguments:
            if rest and not argument.kwarg_only:
                self.values[argument.name] = rest.pop(0)
                self.given.add(argument.name)
            elif argument.name in kwargs:
                self.values[argument.name] = kwargs[argument.name]
                self.given.add(argument.name)
            else:
                assert argument.has_default_value(), f"{name} needs {argument.name!r}"
                self.values[argument.name] = argument.default_value
        misplaced = [*rest, *set(kwargs).difference(self.values)]
        assert not misplaced, f"{name} has no place for {misplaced}: {self.schema}"

    def on_cpu(self, convert: Callable[[Any], Any] = lambda value: value) -> tuple[Any, ...]:
        """torch's new results, then the new values of the mutated arguments."""
        copies = {name: convert(_copied(self.values[name])) for name in self.given}
        positional = [copies[a.name] for a in self.schema.arguments if not a.kwarg_only and a.name in self.given]
        positional_names = [a.name for a in self.schema.arguments if not a.kwarg_only and a.name in self.given]
        names = [a.name for a in self.schema.arguments if not a.kwarg_only][: len(positional)]
        if positional_names != names:  # a gap: pass the rest by name
            positional, keywords = [], dict(copies)
        else:
            keywords = {name: value for name, value in copies.items() if name not in positional_names}
        returned = self.operator(*positional, **keywords)
        returned = returned if isinstance(returned, (tuple, list)) else (returned,)
        if len(self.schema.returns) == 1 and str(self.schema.returns[0].type).startswith("List["):
            new = list(returned)
        else:
            new = [v for v, r in zip(returned, self.schema.returns, strict=True) if r.alias_info is None]
        written = [t for name in self.lowering.mutates for t in _leaves([copies.get(name)]) if t is not None]
        return (*new, *written)

    def lowered(self, expected: Sequence[Any], *, platform: str = "cpu", seed: int = 0) -> list[torch.Tensor | None]:
        """The lowering's results, converted to the dtypes of `expected` (torch's)."""
        return execute([self], [expected], platform=platform, seed=seed)[0]

    def bind(
        self, expected: Sequence[Any], platform: str, seed: int
    ) -> tuple[list[jax.Array], Callable[[Sequence[Any]], list[Any]]]:
        """The arrays that the engine would pass, and the lowering as a function of only these."""
        arrays: list[jax.Array] = []
        args, kwargs = [], {}

        def place(array: Any) -> Callable[[Sequence[Any]], Any]:
            arrays.append(array)
            index = len(arrays) - 1
            return lambda inputs: inputs[index]

        for argument in self.schema.arguments:
            slot = self._slot(argument, place)
            if slot is None:
                continue
            if argument.kwarg_only:
                kwargs[argument.name] = slot
            else:
                args.append(slot)
        supplies = self._supplies(expected, platform)
        if "rng" in self.lowering.supplies:
            kwargs["rng"] = place(jax.random.key(seed))

        def function(inputs: Sequence[Any]) -> list[Any]:
            results = self.lowering.function(
                *[slot(inputs) for slot in args],
                **{name: slot(inputs) for name, slot in kwargs.items()},
                **supplies,
            )
            return [materialize(x) for x in (results if isinstance(results, (tuple, list)) else [results])]

        return arrays, function

    def _supplies(self, expected: Sequence[Any], platform: str) -> dict[str, Any]:
        outs = tuple(None if e is None else jax.ShapeDtypeStruct(tuple(e.shape), DTYPES[e.dtype]) for e in expected)
        common = common_dtype(self.values.values())
        available = {
            "out": outs[0] if outs else None,
            "outs": outs,
            "common": None if common is None else DTYPES[common],
            "platform": platform,
            "replicas": None,
        }
        return {name: value for name, value in available.items() if name in self.lowering.supplies}

    def _slot(self, argument: Any, place: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any] | None:
        text = str(argument.real_type)
        kind = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
        value = self.values[argument.name]
        if kind in DROPPED or argument.name == "pin_memory":
            return None
        if kind == "ScalarType":
            dtype = DTYPES[value] if isinstance(value, torch.dtype) else None
            return lambda inputs: dtype
        if value is None or (argument.name not in self.given and kind != "Tensor"):
            default = list(value) if isinstance(value, (list, tuple)) else value
            return lambda inputs: default
        lifted = kind == "number" and argument.name not in self.lowering.static
        lifted = lifted or (kind == "float" and argument.name in self.lowering.lifted)
        if kind == "Tensor" or lifted:
            return _operand(value, place)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]", "List[number]"):
            slots = [_operand(item, place) for item in value]
            return lambda inputs: [slot(inputs) for slot in slots]
        if kind.startswith("List["):
            items = list(value) if isinstance(value, (list, tuple)) else [value] * (argument.N or 1)
            return lambda inputs: items
        return lambda inputs: value


def execute(
    calls: Sequence[Call], expected: Sequence[Sequence[Any]], *, platform: str = "cpu", seed: int = 0
) -> list[list[torch.Tensor | None]]:
    """The lowerings' results, converted to the dtypes of `expected`; one program for all calls."""
    with jax.enable_x64(True):
        bound = [call.bind(promised, platform, seed) for call, promised in zip(calls, expected, strict=True)]

        def program(inputs: Sequence[Any]) -> list[list[Any]]:
            return [function(arrays) for (_, function), arrays in zip(bound, inputs, strict=True)]

        results = jax.jit(program, compiler_options=_QUICK)([arrays for arrays, _ in bound])
        tensors = []
        for call, got, promised in zip(calls, results, expected, strict=True):
            assert len(got) == len(promised), f"{call.name}: {len(got)} results, torch gives {len(promised)}"
            tensors.append(
                [None if e is None or r is None else to_tensor(r, e.dtype) for r, e in zip(got, promised, strict=True)]
            )
        return tensors


def _operand(value: Any, place: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    if isinstance(value, torch.Tensor):
        return place(to_array(value))
    if type(value) is float:
        return place(jnp.asarray(value, jnp.float64))
    if type(value) is int:
        return place(jnp.asarray(value, jnp.int64))
    return lambda inputs: value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def widened(value: Any) -> Any:
    """`value` with every floating-point tensor in float64, for a reference without intermediate rounding."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, (list, tuple)):
        return type(value)(widened(item) for item in value)
    return value


def run(name: str, *args: Any, like: Sequence[Any], platform: str = "cpu", seed: int = 0, **kwargs: Any) -> list[Any]:
    """The lowering's results as CPU tensors; `like` has the shapes and dtypes of torch's results."""
    return Call(name, args, kwargs).lowered(like, platform=platform, seed=seed)


def check(
    name: str,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    platform: str = "cpu",
    wide: bool = False,
    skip: Sequence[int] = (),
    **kwargs: Any,
) -> None:
    """Asserts that the lowering of `name` gives what torch gives on the CPU: shapes, dtypes and values.

    Args:
        rtol, atol: tolerances instead of `TOLERANCE` for the results' dtype.
        platform: the XLA platform that is passed to the lowering.
        wide: compare with torch's float64 results (for half inputs where torch rounds intermediate results); dtypes
            are still those of torch's results.
        skip: results whose values are not compared (unspecified by torch); their shapes are.
    """
    _check_calls([Call(name, args, kwargs)], rtol=rtol, atol=atol, platform=platform, wide=wide, skip=skip)


def _check_calls(
    calls: Sequence[Call],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    platform: str = "cpu",
    wide: bool = False,
    skip: Sequence[int] = (),
) -> None:
    promised = [call.on_cpu() for call in calls]
    actual = execute(calls, promised, platform=platform)
    for call, results, likes in zip(calls, actual, promised, strict=True):
        expected = call.on_cpu(widened) if wide else likes
        dtypes = [str(v.dtype).removeprefix("torch.") for v in _leaves(call.values.values()) if hasattr(v, "dtype")]
        for index, (got, want, like) in enumerate(zip(results, expected, likes, strict=True)):
            where = f"{call.name} of {', '.join(dtypes)}: result {index}"
            if like is None or got is None:
                assert got is like, f"{where}: {type(got).__name__}, torch gives {type(like).__name__}"
                continue
            assert got.shape == like.shape, f"{where}: shape {tuple(got.shape)}, torch gives {tuple(like.shape)}"
            if index not in skip:
                compare(got, want.to(like.dtype), rtol=rtol, atol=atol, where=where)


def compare(
    got: torch.Tensor, want: torch.Tensor, *, rtol: float | None = None, atol: float | None = None, where: str = ""
) -> None:
    """Asserts equality within `TOLERANCE` of the dtype (exactly for integers and booleans); NaN equals NaN."""
    assert got.dtype == want.dtype, f"{where}: dtype {got.dtype}, expected {want.dtype}"
    default = TOLERANCE.get(want.dtype, 0.0)
    torch.testing.assert_close(
        got,
        want,
        rtol=default if rtol is None else rtol,
        atol=default if atol is None else atol,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


_INTEGERS: dict[torch.dtype, tuple[int, int]] = {torch.uint8: (0, 10), torch.bool: (0, 2)}


def sample(*shape: int, dtype: torch.dtype = torch.float32, low: float = -3.0, high: float = 3.0, seed: int = 0) -> Any:
    """A reproducible tensor: uniform in [low, high) for floats, small integers of both signs, or booleans."""
    generator = torch.Generator().manual_seed(seed * 1009 + math.prod(shape) + len(shape))
    if dtype.is_complex:
        real = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        imaginary = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return torch.complex(real, imaginary).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)
    bottom, top = _INTEGERS.get(dtype, (-9, 10))
    return torch.randint(bottom, top, shape, generator=generator).to(dtype)


def lowering_of(name: str) -> Lowering:
    """The registered lowering (fails the test when there is none)."""
    found = find(name)
    assert found is not None, f"{name} has no lowering"
    return found


# -- rows of a test table ---------------------------------------------------------------------------------------------

KINDS: dict[str, torch.dtype] = {
    "f": torch.float32,
    "d": torch.float64,
    "b": torch.bfloat16,
    "h": torch.float16,
    "i": torch.int64,
    "u": torch.uint8,
    "t": torch.bool,
    "c": torch.complex64,
}
"""One letter per dtype, so that a row can name several: "fbi"."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One sample call of an operation, for several dtypes."""

    name: str
    kinds: str
    make: Callable[[torch.dtype], tuple[Any, ...]]
    """The positional arguments for a dtype."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to `check` in addition to the operation's arguments."""

    def check(self) -> None:
        """`check` for each dtype, compiled together."""
        calls = [Call(self.name, self.make(KINDS[kind]), dict(self.kwargs)) for kind in self.kinds]
        _check_calls(calls, **self.options)


_OPTIONS = ("rtol", "atol", "wide", "skip")


def row(name: str, kinds: str, make: Callable[[torch.dtype], tuple[Any, ...]], **kwargs: Any) -> Any:
    """A `Row` as a pytest parameter; keywords are options of `check` if they have such a name, otherwise arguments."""
    options = {key: kwargs.pop(key) for key in _OPTIONS if key in kwargs}
    return pytest.param(Row(name, kinds, make, kwargs, options), id=f"{name}-{kinds}")


def untested(modules: Sequence[str], rows: Iterable[Any], *, elsewhere: Iterable[str] = ()) -> list[str]:
    """Operations registered in `modules` (file names below ``lowering/``) that no row names."""
    named = {parameter.values[0].name for parameter in rows}.union(elsewhere)
    registered = {name: found.function.__module__.rpartition(".")[2] for name, found in table().items()}
    assert set(modules) <= set(registered.values()), f"no lowering is registered in one of {modules}"
    return sorted(name for name, module in registered.items() if module in modules and name not in named)

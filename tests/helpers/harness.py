"""Compare operations and programs on the lazy device with torch on the CPU.

``check("add.Tensor", x, y, alpha=2)`` calls ``torch.ops.aten.add.Tensor`` on both devices.  Nothing runs before the
test's end: `finish` (tests/lowering/conftest.py) compares all checks of a test, computed in one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

import xla_amp
from xla_amp import lazy as engine
from xla_amp.errors import XlaAmpError
from xla_amp.lazy.base.dtypes import TO_NUMPY, to_numpy, to_torch
from xla_amp.lowering import Lowering, find
from xla_amp.lowering.operand import materialize
from xla_amp.policy.op_catalog import catalogue

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

TORCH = Version(torch.__version__).base_version
OLD = Version(TORCH) < Version("2.13")
"""Whether torch is older than the pinned version."""
_LATER = frozenset(("_foreach_clone", "_grid_sampler_2d_cpu_fallback_backward"))
"""Operations that an older torch lacks, or composes of others."""


# -- programs ---------------------------------------------------------------------------------------------------------


def assert_same(program: Callable[[str], Any], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that ``program("jax")`` returns what ``program("cpu")`` returns, exactly unless told otherwise."""
    expected, actual = (tree_flatten_with_path(program(where))[0] for where in ("cpu", "jax"))
    assert [path for path, _ in actual] == [path for path, _ in expected]
    for (path, want), (_, got) in zip(expected, actual, strict=True):
        where = f"result {keystr(path)}"
        if isinstance(want, torch.Tensor):
            compare(_read(got), _read(want), rtol=rtol, atol=atol, where=where)
        else:
            assert got == want, f"{where}: {got!r}, torch gives {want!r}"


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def replaying(function: Callable[..., Any], *args: Any) -> Any:
    """`function` compiled and called until it replays."""
    step = xla_amp.compile(function, strict=True)
    while not step.replays:
        step(*args)
    return step


def array_behind(tensor: torch.Tensor) -> jax.Array | None:
    """The JAX array of the storage behind a tensor (``None`` while its value is only in the trace)."""
    return tensor.untyped_storage()._xla_amp.array


# -- operations -------------------------------------------------------------------------------------------------------


def is_here(name: str) -> bool:
    """Whether this version of torch has the operation `name`, by what the catalogue and `_LATER` say."""
    return not (OLD and name in _LATER) and TORCH in SpecifierSet(catalogue().torch.get(name, ""))


def operator(name: str) -> Any:
    """The torch operator of an ATen name with overload, or of ``"library::name.overload"``."""
    library, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), packet), overload or "default")


def lowering_of(name: str) -> Lowering:
    """The registered lowering (fails the test when there is none)."""
    found = find(name)
    assert found is not None, f"{name} has no lowering"
    return found


def _mutated(name: str) -> tuple[str, ...]:
    """The arguments that an operation writes; none of an operation that torch decomposes."""
    lowering = find(name)
    return lowering.mutates if lowering is not None else ()


def called(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | str) -> list[Any]:
    """The operation's new results on a device, then the new values of the arguments that its lowering writes."""
    operation = operator(name)
    arguments = operation._schema.arguments
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.detach().to(device, copy=True), (args, dict(kwargs)))
    if any(argument.name == "device" for argument in arguments):
        kwargs["device"] = device
    with torch.no_grad():
        returned = operation(*args, **kwargs)
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(operation._schema.returns) == len(returned):
        kinds = [r.alias_info for r in operation._schema.returns]
        returned = [x for x, alias in zip(returned, kinds, strict=True) if alias is None or not alias.is_write]
    names = [argument.name for argument in arguments if not argument.kwarg_only]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [tensor for key in _mutated(name) for tensor in tree_leaves(given.get(key))]
    return [*(returned if operation._schema.returns else ()), *(x for x in written if x is not None)]


def run(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """`called` on the lazy device, as CPU tensors."""
    engine.manual_seed(0)
    return tree_map_only(torch.Tensor, _read, called(name, args, kwargs, engine.device()))


def widened(value: Any) -> Any:
    """`value` with every floating-point tensor in float64, for a reference without intermediate rounding."""
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, value)


@dataclasses.dataclass(kw_only=True)
class _Check:
    """A call that was made on both devices."""

    where: str
    got: list[Any] | Lowered
    expected: list[Any]
    """Values on the CPU."""
    promised: list[Any]
    """Shapes and dtypes on the CPU."""
    tolerances: dict[str, float | None]
    skip: Sequence[int]

    def problem(self) -> str:
        """What differs, or the empty string."""
        try:
            assert len(self.got) == len(self.promised), (
                f"{self.where}: {len(self.got)} results, torch gives {len(self.promised)}"
            )
            for index, (got, want, like) in enumerate(zip(self.got, self.expected, self.promised, strict=True)):
                where = f"{self.where}: result {index}"
                if like is None or got is None:
                    assert got is like, f"{where}: {type(got).__name__}, torch gives {type(like).__name__}"
                elif index in self.skip:
                    assert got.shape == like.shape, f"{where}: {tuple(got.shape)}, torch gives {tuple(like.shape)}"
                elif isinstance(like, torch.Tensor):
                    compare(_read(got), want.to(like.dtype), **self.tolerances, where=where)
        except (AssertionError, XlaAmpError) as error:
            return str(error) if isinstance(error, AssertionError) else f"{self.where}: {error}"
        return ""


_checks: list[_Check] = []
_place = ""
"""What a failure of the checks that are made now is said to be of."""


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
    """Asserts, when the test ends, that the lazy device gives what torch gives on the CPU: shapes, dtypes and values.

    Args:
        rtol, atol: tolerances instead of `TOLERANCE` for the results' dtype.
        platform: the XLA platform that the lowering is told, if not this one.
        wide: compare with torch's float64 results (for half inputs where torch rounds intermediate results); dtypes
            are still those of torch's results.
        skip: results whose values are not compared (unspecified by torch); their shapes are.
    """
    promised = called(name, args, kwargs, "cpu")
    expected = promised
    if wide:  # of an update in place only the lists: flags and scales stay float32, as torch's kernels require
        lists = bool(_mutated(name)) and any(isinstance(x, list) for x in args)
        wider = [widened(x) if isinstance(x, list) or not lists else x for x in args]
        expected = called(name, wider, kwargs if lists else widened(dict(kwargs)), "cpu")
    here = platform == "cpu"
    got = called(name, args, kwargs, engine.device()) if here else Lowered(name, args, kwargs, promised, platform)
    dtypes = [str(x.dtype).removeprefix("torch.") for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    _checks.append(
        _Check(
            where=f"{_place}{name} of {', '.join(dtypes)}",
            got=got,
            expected=expected,
            promised=promised,
            tolerances={"rtol": rtol, "atol": atol},
            skip=skip,
        )
    )


def finish() -> None:
    """Computes the checks that were made since the last call, in one program, and asserts that none differs."""
    checks = list(_checks)
    _checks.clear()
    elsewhere = [each for each in checks if isinstance(each.got, Lowered)]
    for each, got in zip(elsewhere, computed([each.got for each in elsewhere]), strict=True):  # type: ignore[misc]
        each.got = got
    with contextlib.suppress(XlaAmpError):  # the values that it concerns raise it when they are read
        engine.sync()
    problems = [problem for each in checks if (problem := each.problem())]
    assert not problems, "\n".join(problems)


def forget() -> None:
    """Drops the checks that a failed test has left."""
    global _place
    _checks.clear()
    _place = ""


def together(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Any], Any]:
    """As ``pytest.mark.parametrize``, but in one test, whose checks are one program."""
    keys, rows = [names] if isinstance(names, str) else list(names), list(values)

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)

        def test(**fixtures: Any) -> None:
            global _place
            outer = _place
            for value in rows:
                given = dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
                _place = f"{outer}{given}: "
                function(**fixtures, **given)
            _place = outer

        functools.update_wrapper(test, function)
        del test.__wrapped__
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return test

    return decorate


def compare(
    got: torch.Tensor, want: torch.Tensor, *, rtol: float | None = None, atol: float | None = None, where: str = ""
) -> None:
    """Asserts equality within `TOLERANCE` of the dtype (exactly for integers and booleans); NaN equals NaN."""
    default = TOLERANCE.get(want.dtype, 0.0)
    torch.testing.assert_close(
        got,
        want,
        rtol=default if rtol is None else rtol,
        atol=default if atol is None else atol,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


# -- a lowering called as a function, for another platform ------------------------------------------------------------


def to_array(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor as a JAX array of the same dtype (inside `jax.enable_x64`)."""
    return jnp.array(to_numpy(tensor.detach().resolve_conj().contiguous()))


def to_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A JAX array as a CPU tensor of `dtype`, converted as the engine converts results."""
    return to_torch(np.array(jax.lax.convert_element_type(array, TO_NUMPY[dtype])))


class Lowered:
    """A call of a lowering that is told another platform; `like` has torch's results."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: Any, like: Sequence[Any], platform: str) -> None:
        self._lowering, self._kwargs, self.like = lowering_of(name), kwargs, like
        self._leaves, self._tree = tree_flatten(list(args))
        outs = tuple(None if x is None else jax.ShapeDtypeStruct(tuple(x.shape), TO_NUMPY[x.dtype]) for x in like)
        supplies = {"out": outs[0], "outs": outs, "platform": platform}
        self._supplies = {key: value for key, value in supplies.items() if key in self._lowering.supplies}
        self.tensors = {i: x for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor)}

    def __call__(self, arrays: Mapping[int, jax.Array]) -> list[Any]:
        args = tree_unflatten([arrays.get(i, x) for i, x in enumerate(self._leaves)], self._tree)
        results = self._lowering.function(*args, **self._kwargs, **self._supplies)
        return [materialize(x) for x in (results if isinstance(results, (tuple, list)) else [results])]


def computed(calls: Sequence[Lowered]) -> list[list[Any]]:
    """The results of calls, in one program."""
    if not calls:
        return []
    with jax.enable_x64(True):
        arrays = [{i: to_array(x) for i, x in call.tensors.items()} for call in calls]
        results = jax.jit(lambda inputs: [call(x) for call, x in zip(calls, inputs, strict=True)])(arrays)
        return [
            [None if x is None else to_tensor(r, x.dtype) for r, x in zip(found, call.like, strict=True)]
            for found, call in zip(results, calls, strict=True)
        ]


def lowered(name: str, *args: Any, like: Sequence[Any], platform: str, **kwargs: Any) -> list[Any]:
    """The results of a lowering that is told a platform; `like` has torch's results."""
    return computed([Lowered(name, args, kwargs, like, platform)])[0]


# -- rows of a test table ---------------------------------------------------------------------------------------------

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
    kwargs: Mapping[str, Any]
    """Options of `check`, and keyword arguments of the operation."""


NAMED: set[str] = set()
"""Operations that have a row in a file that was imported; tests/lazy/op_db tells which operation has none."""


def row(name: str, kinds: str, make: Callable[[torch.dtype], tuple[Any, ...]], **kwargs: Any) -> Row:
    """A `Row` that counts as a test of its operation."""
    NAMED.add(name)
    return Row(name, kinds, make, kwargs)


def check_rows(rows: Iterable[Row]) -> None:
    """`check` for each dtype of each row."""
    for each in rows:
        for kind in each.kinds:
            try:
                check(each.name, *each.make(KINDS[kind]), **each.kwargs)
            except Exception as error:
                error.add_note(f"{each.name} of {KINDS[kind]}")
                raise


def tables(**named: Iterable[Row]) -> pytest.MarkDecorator:
    """Parametrizes ``rows`` with tables: the checks of each are one program."""
    return pytest.mark.parametrize("rows", [pytest.param(list(rows), id=name) for name, rows in named.items()])

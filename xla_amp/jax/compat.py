"""Access to JAX's private API and to what differs between JAX versions; no other module uses private names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import pjit as private_pjit
from jax._src.interpreters import ad as private_ad
from jax.extend import core as extended
from jax.extend import linear_util as lu
from jax.extend import source_info_util
from jax.interpreters import ad, partial_eval

from xla_amp.policy import module_patterns

Literal = extended.Literal
ClosedJaxpr = extended.ClosedJaxpr
Jaxpr = extended.Jaxpr

REGION_SCOPE = "xla_amp_region"
"""Name scope of primitives that an inner region has already decided."""
_FRAME = re.compile(r"(.+?:\d+)(:\d+)? \(")
"""What JAX writes for the line of an equation."""
with source_info_util.transform_name_stack("jvp"):
    _Transform = type(source_info_util.current_name_stack().stack[-1])

REMATTED = "rematted_computation"
"""JAX's name scope around a forward pass that `jax.checkpoint` computes again."""


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those of the operands or results in a jaxpr that are no constants."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def trace(function: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: Any = None) -> ClosedJaxpr:
    """Traces `function`, flat arrays to flat arrays, to a jaxpr for arguments of these types."""
    if debug_info is None:
        debug_info = extended.DebugInfo("xla_amp", getattr(function, "__name__", "function"), None, None)
    else:
        debug_info = debug_info.with_unknown_names()
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(lu.wrap_init(function, debug_info=debug_info), list(avals))
    return ClosedJaxpr(jaxpr, consts)


def debug_info(function: Callable[..., Any]) -> Any:
    """Name and place of a traced function, for JAX's errors."""
    plain: Any = inspect.unwrap(getattr(function, "func", function))
    code = getattr(plain, "__code__", None)
    place = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
    return extended.DebugInfo("autocast", f"{getattr(plain, '__name__', 'function')}{place}", None, None)


def without_constants(closed: ClosedJaxpr, given: Iterable[Any] | None = None) -> Jaxpr:
    """The jaxpr with its constants as leading arguments; `given` are their variables and others that it ignores."""
    jaxpr = closed.jaxpr
    first = jaxpr.constvars if given is None else given
    replaced: Jaxpr = jaxpr.replace(
        constvars=(), invars=[*first, *jaxpr.invars], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return replaced


def with_dtype(aval: Any, dtype: Any) -> Any:
    """`aval` with another dtype, not weakly typed."""
    return aval.update(dtype=dtype, weak_type=False)


def cast_like(value: Any, aval: Any) -> Any:
    """`value` with the dtype and weak type of `aval`, if that is a real floating dtype."""
    if not jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        return value
    given = jax.typeof(value)
    if (given.dtype, given.weak_type) == (aval.dtype, aval.weak_type):
        return value
    with mesh_of(value):
        return jax.lax.convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def convert(value: Any, dtype: Any) -> Any:
    """`value` in `dtype`, also where the running code has another mesh."""
    with mesh_of(value):
        return jax.lax.convert_element_type(value, dtype)


def mesh_of(value: Any) -> Any:
    """A context with the mesh of the type of `value`, in which a primitive that reads it can be bound.

    `jax.sharding.auto_axes` and `explicit_axes` change the axis types of the mesh in the middle of a program.
    """
    mesh = getattr(getattr(jax.typeof(value), "sharding", None), "mesh", None)
    now = jax.sharding.get_abstract_mesh()
    # JAX takes values of one mesh in another if the compiler distributes both.
    if mesh is None or mesh.empty or now.empty or mesh == now or (mesh.are_all_axes_auto and now.are_all_axes_auto):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def mesh_of_equation(eqn: Any) -> Any:
    """A context with the mesh that an equation was traced with."""
    return jax.sharding.use_abstract_mesh(eqn.ctx.cur_abstract_mesh)


def is_partitioned() -> bool:
    """Whether the compiler distributes the running code over the mesh around, at least along some of its axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.are_all_axes_manual


def low_sums_crash(mesh: Any = None, manual: Iterable[str] = ()) -> bool:
    """Whether XLA:CPU ends the process at a low sum over devices: in a `jax.shard_map` that is manual over some axes.

    jaxlib 0.10.2: "Invalid binary instruction opcode copy" in ``AllReducePromotion``, also without autocast.

    `manual`: the axes of `mesh` that a `jax.shard_map` makes manual.  Without `mesh`: in the running code.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    split = {name for name, extent in mesh.shape.items() if extent > 1}
    inside = {*mesh.manual_axes, *manual}
    return bool(inside) and not split <= inside and jax.default_backend() == "cpu"


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a ``scan`` equation, its first operands."""
    if "ft_in" in params:  # JAX 0.11
        constants, carried, _ = params["ft_in"].unpack()
        return len(constants), len(carried)
    return params["num_consts"], params["num_carry"]


def scan_params(params: dict[str, Any], body: ClosedJaxpr, constants: int) -> dict[str, Any]:
    """The parameters of a ``scan`` equation with another body, which has `constants` constants."""
    if "ft_in" not in params:
        return {**params, "jaxpr": body, "num_consts": constants}
    from jax._src import flattree  # type: ignore[attr-defined, unused-ignore]  # JAX 0.11

    _, carried, steps = params["ft_in"].unpack()
    return {**params, "jaxpr": body, "ft_in": flattree.pack((flattree.nones(constants), carried, steps))}


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Gives primitives bound inside the name scopes, source line and context of `eqn`."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def name_stack(eqn: Any) -> tuple[Any, ...]:
    """Name scopes and transformations around an equation, outermost first."""
    return tuple(eqn.source_info.name_stack.stack)


def scopes(eqn: Any | None) -> tuple[str, ...]:
    """Name scopes around an equation, or around the running code if `eqn` is None, without transformations.

    A scope with slashes is several, as in the locations of the compiled program.
    """
    stack = (source_info_util.current_name_stack() if eqn is None else eqn.source_info.name_stack).stack
    written = (str(scope.name).split("/") for scope in stack if not isinstance(scope, _Transform))
    names = (name for parts in written for name in parts)
    return tuple(name for name in names if name and name != REGION_SCOPE and not module_patterns.is_no_place(name))


def frames(eqn: Any) -> tuple[tuple[str, str, int], ...]:
    """File, function and line of the calls that wrote an equation, innermost first."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ()
    return tuple((frame.file_name, frame.function_name, frame.line_num) for frame in traceback.frames)


def called(eqn: Any) -> str:
    """Name of the function that an equation calls: of ``jax.jit`` or with a custom derivative; otherwise empty."""
    closed = eqn.params.get("call_jaxpr")
    if eqn.primitive.name.startswith("custom_") and isinstance(closed, ClosedJaxpr):
        return str(closed.jaxpr.debug_info.func_name)
    return str(eqn.params.get("name", "")) if eqn.primitive.name in ("jit", "pjit") else ""


def is_region_scope(scope: Any) -> bool:
    """Whether a name scope marks primitives that an inner region has decided."""
    return bool(scope.name == REGION_SCOPE)


def is_transpose_scope(scope: Any) -> bool:
    """Whether a name scope marks part of a backward pass."""
    return isinstance(scope, _Transform) and scope.name == "transpose"


def is_derivative_scope(scope: Any) -> bool:
    """Whether a name scope marks part of a differentiated function, or of its backward pass."""
    return isinstance(scope, _Transform) and scope.name in ("jvp", "transpose")


def location(eqn: Any | None) -> str:
    """The user's ``file:line`` of an equation, or of the running code if it is None; not that of a library."""
    source = source_info_util.current() if eqn is None else eqn.source_info
    frame = _FRAME.match(source_info_util.summarize(source))
    innermost = frame[1] if frame is not None else ""
    if not innermost.startswith(_library_folders()) or source.traceback is None:
        return innermost
    ours = (*_library_folders("jax", "jaxlib", "xla_amp"), *_library_folders())
    for each in source.traceback.frames:
        file = each.file_name
        if not file.startswith(ours) and os.path.dirname(file) != _STANDARD_LIBRARY and os.path.isfile(file):
            return f"{file}:{each.line_num}"
    return innermost


_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def _library_folders(*names: str) -> tuple[str, ...]:
    """Folders of the packages `names` that are loaded; by default those whose layers a user's line calls."""
    found = (sys.modules.get(name) for name in names or ("equinox", "flax", "haiku", "optax"))
    files = (getattr(module, "__file__", None) for module in found)
    return tuple(os.path.join(os.path.dirname(file), "") for file in files if file)


def calls_numerical_function(eqn: Any) -> bool:
    """Whether an equation calls a function of `NUMERICAL`, or its derivative."""
    written = (jaxpr.debug_info for jaxpr in sub_jaxprs(eqn.params))
    return any(info.func_name in NUMERICAL and _JAX in info.func_src_info for info in written)


def in_lowering(eqn: Any) -> bool:
    """Whether a lowering of a torch operation wrote an equation."""
    return any(file.endswith(LOWERINGS) for file, _, _ in frames(eqn)[:_FRAMES_OF_PRODUCT])


NUMERICAL = frozenset({"qr", "pascal", "invpascal", "_multivariate_normal", "_owens_t_impl"})
"""Functions of JAX with products that need float32 and do not ask for it; the others have a ``precision``.  Each is a
function of `jax.jit`, or has its own derivative, so that programs call it by its name.

``tests/jax_front/test_jax_names.py`` fails if JAX renames one.
"""
_JAX = os.path.join("jax", "_src", "")
LOWERINGS = tuple(
    os.path.join(*path.split("/"))
    for path in (
        "xla_amp/lowering/linalg/contraction.py",
        "xla_amp/lowering/nn/convolution.py",
        "xla_amp/lazy/interop/functional.py",
    )
)
"""Files of the lowerings of torch operations, whose precision is torch's default."""
_FRAMES_OF_PRODUCT = 24
"""Innermost frames that are searched: more than lie between ``Primitive.bind`` and the caller of ``jnp.einsum``."""


def current_trace() -> Any:
    """The innermost trace."""
    with extended.take_current_trace() as innermost:
        return innermost


_retracing = jax.make_user_context(None)


def retraced() -> Any:
    """A context of this thread in which functions of `jax.jit` are traced again."""
    return _retracing(object())


def is_eager(trace: Any) -> bool:
    """Whether `trace` evaluates primitives immediately."""
    return isinstance(trace, _EvalTrace)


with jax.ensure_compile_time_eval():
    _EvalTrace = type(current_trace())


def is_concrete(value: Any) -> bool:
    """Whether `value` is not a tracer."""
    return not isinstance(value, jax.core.Tracer)


def runs_now(values: Sequence[Any]) -> bool:
    """Whether a primitive bound with `values` is computed immediately: nothing traces or differentiates it."""
    return is_eager(current_trace()) and all(map(is_concrete, values))


def def_linearization(primitive: Any, rule: Callable[..., tuple[Any, Any, Any, Callable[..., Any]]]) -> None:
    """Registers the linearization rule of `primitive`.

    Args:
        primitive: with one result.
        rule: ``rule(is_vjp, nonzero, *primals, **params)`` returns the result, whether its tangent is nonzero,
            residuals, and a function from residuals and tangents to the result's tangent.
    """

    def structured(*args: Any, **params: Any) -> tuple[Any, Any, Any, None, Callable[..., Any]]:
        out, nonzero, residuals, linear = rule(*args, **params)
        return out, nonzero, residuals, None, lambda residuals, _, *tangents: linear(residuals, *tangents)

    # Since 0.11.1 rules return structured residuals too.
    private_ad.primitive_linearizations[primitive] = structured if jax.__version_info__ >= (0, 11, 1) else rule


def bind(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds a primitive with the parameters of an equation; returns a list also for a single result."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")
"""Whether backward rules of ``custom_vjp`` also return a dict of logged values: JAX 0.11.2."""


class BackwardRule:
    """A flat backward rule of ``custom_vjp`` as a function that returns a list: cotangents, then logged values."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self._logs: Any = None

    def __call__(self, *values: Any) -> list[Any]:
        cotangents, logs = self._rule.call_wrapped(*values) if _LOGS else (self._rule.call_wrapped(*values), None)
        logged, self._logs = jax.tree.flatten(logs)
        return [*cotangents, *logged]

    def result(self, outs: Sequence[Any]) -> Any:
        """The result of a flat backward rule, of a list like the last call's result."""
        count = len(outs) - self._logs.num_leaves
        return (list(outs[:count]), jax.tree.unflatten(self._logs, outs[count:])) if _LOGS else list(outs)


def is_zero(cotangent: Any) -> bool:
    """Whether `cotangent` is JAX's symbolic zero."""
    return isinstance(cotangent, ad.Zero) or type(cotangent).__name__ in ("Zero", "SymbolicZero")


@functools.cache
def _unspecified() -> Any:
    """What `jax.jit` passes on for a sharding that was not given."""
    return jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params["in_shardings"][0]


def with_entries(params: dict[str, Any], before: int, after: int, results: int) -> dict[str, Any]:
    """The parameters of ``jit`` that have an entry for each operand or result, with entries for added ones.

    `before` and `after`: how many operands are added there; `results`: how many results.
    """
    operands = {"donated_invars": False, "in_layouts": None, "in_shardings": _unspecified()}
    added = {name: (entry, before, after) for name, entry in operands.items()}
    added |= {"out_layouts": (None, 0, results), "out_shardings": (_unspecified(), 0, results)}
    return {
        name: (*[entry] * first, *params[name], *[entry] * last)
        for name, (entry, first, last) in added.items()
        if name in params
    }


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def is_jit(function: Any) -> bool:
    """Whether `jax.jit` returned `function`."""
    return isinstance(function, _JIT)


_JIT = type(jax.jit(lambda: None))


def jit_like(function: Any, inner: Callable[..., Any]) -> Any:
    """`jax.jit` of `inner` with the arguments of `jax.jit` (donated, static, shardings) that made `function`.

    JAX keeps these for itself, so there is no public way.
    """
    return private_pjit._cpp_pjit(inner, function._jit_info)


def phase() -> str:
    """``backward`` or ``forward`` for running code of a differentiated function, otherwise empty."""
    stack = source_info_util.current_name_stack().stack
    if any(map(is_transpose_scope, stack)):
        return "backward"
    return "forward" if any(map(is_derivative_scope, stack)) else ""


_ANY_SIZE = 1 << 20


def size(value: Any) -> int:
    """The number of elements of an array or a type, to be compared; a symbolic size counts as a large one."""
    return math.prod(each if isinstance(each, int) else _ANY_SIZE for each in np.shape(value))

"""Contractions in low precision with the right backward pass: JAX primitives that stand for ``dot_general`` and so on.

For a contraction primitive of JAX there is one of ours that reads its two operands in the low dtype, whatever dtype
they have, accumulates in float32, and returns the dtype that is asked for:

==================  ========================================================================================
forward             low x low, result low
gradient of data    low x low, result low: the operand was low
gradient of weight  low x low, result float32 straight from the accumulator: the operand is a float32 master
==================  ========================================================================================

A master travels beside its rounded copy: the copy is read, the gradient goes to the master.  So a copy that was made
outside of a loop is used inside while gradients still add up in float32.

The platform's form is chosen when the program is lowered, not when it is traced, so that compiling for another machine
is right as well.  Transposing and batching are JAX's own: its rule for the primitive is traced once per shape and
replayed in these dtypes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_amp.jax import compat
from xla_amp.jax.primitives import TREATMENTS
from xla_amp.lowering.linalg.contraction import contract

_FREE = {"precision": None, "preferred_element_type": None}
"""Parameters that the form decides."""


def contract_low(
    primitive: Any,
    operands: Sequence[Any],
    masters: tuple[Any, Any],
    params: dict[str, Any],
    *,
    low: Any,
    out: Any,
) -> Any:
    """One contraction.

    Args:
        primitive: JAX's own.
        operands: its operands; the first two in the low dtype, or float32 to be rounded.
        masters: for each of the two, the float32 value that gets its gradient, or None for the operand itself.
        params: its parameters.
        low: dtype that the operands are read in.
        out: dtype of the result.
    """
    given = tuple(master is not None for master in masters)
    extra = [master for master in masters if master is not None]
    return form(primitive).bind(
        *operands, *extra, **{**params, **_free(params)}, low=jnp.dtype(low), out=jnp.dtype(out), masters=given
    )


def low_copy(value: Any, low: Any) -> Any:
    """`value` in the low dtype; no gradient passes: it goes to the master that the copy is of."""
    return value if value.dtype == low else _copy().bind(value, low=jnp.dtype(low))


@functools.cache
def _copy() -> Primitive:
    def emit(value: Any, *, low: Any) -> Any:
        return lax.convert_element_type(value, low)

    def zero(value: Any, low: Any) -> Any:
        return ad.Zero(compat.typeof_tangent(compat.with_dtype(compat.typeof(value), low)))

    def linearize(is_vjp: bool, nonzero: Sequence[bool], value: Any, *, low: Any) -> tuple[Any, bool, tuple[()], Any]:
        return copy.bind(value, low=low), False, (), lambda residuals, *tangents: zero(value, low)

    copy = Primitive("low_copy")
    copy.def_impl(emit)
    copy.def_abstract_eval(lambda aval, *, low: compat.with_dtype(aval, low))
    ad.primitive_jvps[copy] = lambda primals, tangents, *, low: (copy.bind(*primals, low=low), zero(primals[0], low))
    ad.primitive_transposes[copy] = lambda cotangent, value, *, low: [ad.Zero(value.aval)]
    compat.def_linearization(copy, linearize)
    batching.defvectorized(copy)
    mlir.register_lowering(copy, mlir.lower_fun(emit, multiple_results=False))
    return copy


def base(primitive: Any) -> Any:
    """JAX's primitive that one of ours stands for; any other primitive is itself."""
    return _BASES.get(primitive, primitive)


def base_call(
    primitive: Any, avals: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """A primitive, operand types and parameters as a checkpoint policy expects them: those of JAX's own."""
    if primitive not in _BASES:
        return primitive, avals, params
    rest = {key: value for key, value in params.items() if key not in ("low", "out", "masters")}
    return _BASES[primitive], avals[: len(avals) - sum(params["masters"])], rest


_BASES: dict[Any, Any] = {}


def _free(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _FREE.items() if key in params}


@functools.cache
def form(primitive: Any) -> Primitive:
    """Our primitive for a contraction primitive of JAX."""
    ours = Primitive(f"low_{primitive.name}")
    _BASES[ours] = primitive
    ours.def_impl(functools.partial(_run, ours))
    ours.def_effectful_abstract_eval(functools.partial(_abstract, primitive))
    ad.primitive_jvps[ours] = functools.partial(_jvp, primitive)
    compat.def_linearization(ours, functools.partial(_linearize, primitive))
    ad.primitive_transposes[ours] = functools.partial(_transpose, primitive)
    batching.primitive_batchers[ours] = functools.partial(_batch, primitive)
    for platform in ("cpu", None):
        rule = mlir.lower_fun(functools.partial(_emit, primitive, platform), multiple_results=False)
        mlir.register_lowering(ours, rule, platform=platform)
    return ours


@functools.lru_cache(maxsize=1024)
def _compiled(ours: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(ours.bind, **dict(params)))


def _run(ours: Primitive, *operands: Any, **params: Any) -> Any:
    return _compiled(ours, tuple(params.items()))(*operands)


def _as(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


def _abstract(primitive: Any, *avals: Any, low: Any, out: Any, masters: Any, **params: Any) -> Any:
    left, right, *rest = avals[: len(avals) - sum(masters)]
    if "preferred_element_type" in params:
        params = {**params, "preferred_element_type": out}
    low_avals = (compat.with_dtype(left, low), compat.with_dtype(right, low))
    return primitive.abstract_eval(*low_avals, *rest, **params)


def _emit(primitive: Any, platform: str | None, *operands: Any, low: Any, out: Any, masters: Any, **params: Any) -> Any:
    left, right, *rest = operands[: len(operands) - sum(masters)]
    left, right = _as(left, low), _as(right, low)
    accumulator = jnp.dtype(jnp.float32)
    if platform == "cpu" and primitive is lax.dot_general_p and not params.get("out_sharding"):
        # XLA:CPU folds a transpose before the left operand or behind a float32 result into a form that it cannot run
        # (jaxlib 0.10.2: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"); barriers are in its way.
        result = _cpu_dot(lax.optimization_barrier(left), right, params["dimension_numbers"])
        return _as(lax.optimization_barrier(result), out)
    if "preferred_element_type" in params:
        params = {**params, "preferred_element_type": accumulator if platform == "cpu" else out}
    return _as(primitive.bind(left, right, *rest, **params), out)


def _cpu_dot(left: jax.Array, right: jax.Array, dimension_numbers: Any) -> jax.Array:
    """`lax.dot_general` through `xla_amp.lowering`'s form for XLA:CPU, which is one of matrices; float32."""
    (left_contracted, right_contracted), (left_batch, right_batch) = dimension_numbers
    left, left_axes, left_free = _matrix(left, left_contracted, left_batch)
    right, right_axes, right_free = _matrix(right, right_contracted, right_batch)
    lead = tuple(range(len(left_batch)))
    result = contract(left, right, (left_axes, right_axes), (lead, lead), platform="cpu")
    return result.reshape(*left.shape[: len(lead)], *left_free, *right_free)


def _matrix(x: jax.Array, contracted: Sequence[int], batch: Sequence[int]) -> tuple[jax.Array, Any, tuple[int, ...]]:
    """`x` with its batch axes first and its free and contracted axes as one each; the latter, and the free extents."""
    free = [axis for axis in range(x.ndim) if axis not in contracted and axis not in batch]
    extents = tuple(x.shape[axis] for axis in free)
    first, second = (free, contracted) if not contracted or (free and free[0] < min(contracted)) else (contracted, free)
    moved = lax.transpose(x, (*batch, *first, *second))
    sizes = [math.prod(x.shape[axis] for axis in group) for group in (first, second)]
    place = len(batch) + (1 if second is contracted else 0)
    return moved.reshape(*(x.shape[axis] for axis in batch), *sizes), (place,), extents


def _jvp(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = form(primitive).bind(*primals, **params)
    return out, _tangent(primitive, primals, tangents, params, compat.typeof(out))


def _linearize(primitive: Any, is_vjp: bool, nonzero: Sequence[bool], *primals: Any, **params: Any) -> Any:
    # What JAX would derive from `_jvp`, without tracing it.
    out = form(primitive).bind(*primals, **params)
    aval = compat.typeof(out)
    count = len(primals) - sum(params["masters"])

    def linear(residuals: Sequence[Any], *tangents: Any) -> Any:
        return _tangent(primitive, residuals, tangents, params, aval)

    return out, True, primals[:count], linear


def _tangent(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any], aval: Any) -> Any:
    count = len(tangents) - sum(params["masters"])
    operands, masters = list(primals[:count]), [place for place, given in enumerate(params["masters"]) if given]
    sources = [(0, tangents[0]), (1, tangents[1]), *zip(masters, tangents[count:], strict=True)]
    plain = {**params, "masters": (False, False)}
    terms = []
    for place, tangent in sources:
        if not isinstance(tangent, ad.Zero):
            terms.append(form(primitive).bind(*operands[:place], tangent, *operands[place + 1 :], **plain))
    return functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(compat.typeof_tangent(aval))


def _transpose(primitive: Any, cotangent: Any, *operands: Any, low: Any, masters: Any, out: Any, **params: Any) -> Any:
    count = len(operands) - sum(masters)
    result: list[Any] = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    # The last one: where a copy and its master are both unknown, the master gets the gradient.
    target = max(index for index, operand in enumerate(operands) if ad.is_undefined_primal(operand))
    copies = [index for index, given in enumerate(masters) if given]
    place = target if target < count else copies[target - count]
    if isinstance(cotangent, ad.Zero):
        return result
    unknown = operands[target].aval
    known = [operand for index, operand in enumerate(operands[:count]) if index != place]
    nominal = _transposed(primitive, place, unknown, tuple(map(compat.typeof, known)), tuple(params.items()))
    values = [(value, None) for value in (cotangent, *known)]
    result[target] = _replay(primitive, nominal, values, low, unknown.dtype)
    return result


def _wide(aval: Any) -> Any:
    return compat.with_dtype(aval, jnp.float32) if jnp.issubdtype(aval.dtype, jnp.floating) else aval


@functools.lru_cache(maxsize=4096)
def _transposed(primitive: Any, place: int, unknown: Any, known: tuple[Any, ...], params: Any) -> compat.ClosedJaxpr:
    """JAX's transposition of the primitive for the operand at `place`: cotangent and other operands to cotangent."""
    settings = {**dict(params), **_free(dict(params))}
    if "preferred_element_type" in settings:
        settings["preferred_element_type"] = jnp.dtype(jnp.float32)

    def transposed(cotangent: Any, *others: Any) -> list[Any]:
        def linear(x: Any) -> Any:
            return primitive.bind(*others[:place], x, *others[place:], **settings)

        (result,) = jax.linear_transpose(linear, _wide(unknown))(cotangent)
        return [result]

    known = tuple(map(_wide, known))
    operands = (*known[:place], _wide(unknown), *known[place:])
    out, _ = primitive.abstract_eval(*operands, **settings)
    return _turned(primitive, compat.trace(transposed, (out, *known)))


def _turned(primitive: Any, closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """A product whose result is transposed, as the product of its operands the other way round."""
    if primitive is not lax.dot_general_p or len(closed.jaxpr.eqns) != 2 or closed.consts:
        return closed
    product, after = closed.jaxpr.eqns
    (summed_left, summed_right), (batch, _) = product.params["dimension_numbers"]
    left, right = (atom.aval.ndim - len(summed_left) for atom in product.invars[:2])
    exchanged = (*range(left, left + right), *range(left))
    if batch or after.params.get("permutation") != exchanged or product.params.get("out_sharding") is not None:
        return closed
    numbers = ((summed_right, summed_left), ((), ()))
    order = [closed.jaxpr.invars.index(atom) for atom in reversed(product.invars[:2])]

    def turned(*values: Any) -> list[Any]:
        operands = [values[place] for place in order]
        return [primitive.bind(*operands, **{**product.params, "dimension_numbers": numbers})]

    return compat.trace(turned, closed.in_avals)


def _batch(primitive: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    masters, low, out = params.pop("masters"), params.pop("low"), params.pop("out")
    count = len(operands) - sum(masters)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    extra = iter(zip(operands[count:], dims[count:], strict=True))
    pairs: list[tuple[Any, Any]] = []
    axes: list[int | None] = []
    for place, (operand, dim) in enumerate(zip(operands[:count], dims[:count], strict=True)):
        master, master_dim = next(extra) if place < 2 and masters[place] else (None, dim)
        if master_dim != dim:
            operand, master = (batching.bdim_at_front(x, d, size) for x, d in ((operand, dim), (master, master_dim)))
            dim = 0
        pairs.append((operand, master))
        axes.append(dim)
    avals = tuple(compat.typeof(operand) for operand, _ in pairs)
    nominal = _batched(primitive, avals, tuple(axes), tuple(params.items()))
    return _replay(primitive, nominal, pairs, low, out), 0


@functools.lru_cache(maxsize=4096)
def _batched(primitive: Any, avals: tuple[Any, ...], axes: tuple[int | None, ...], params: Any) -> compat.ClosedJaxpr:
    """JAX's batching of the primitive, with the batch axis of the result in front."""
    settings = {**dict(params), **_free(dict(params))}

    def batched(*operands: Any) -> list[Any]:
        return [jax.vmap(functools.partial(primitive.bind, **settings), in_axes=axes)(*operands)]

    return compat.trace(batched, tuple(map(_wide, avals)))


def _replay(primitive: Any, nominal: compat.ClosedJaxpr, values: list[tuple[Any, Any]], low: Any, out: Any) -> Any:
    """Runs a jaxpr around one contraction with low operands, and masters where there are some."""
    environment: dict[Any, tuple[Any, Any]] = dict(zip(nominal.jaxpr.invars, values, strict=True))
    environment.update(zip(nominal.jaxpr.constvars, ((const, None) for const in nominal.consts), strict=True))

    def read(atom: Any) -> tuple[Any, Any]:
        return (atom.val, None) if isinstance(atom, compat.Literal) else environment[atom]

    for eqn in nominal.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive is primitive:
            (left, left_master), (right, right_master), *rest = operands
            arrays = [left, right, *(value for value, _ in rest)]
            result = contract_low(primitive, arrays, (left_master, right_master), eqn.params, low=low, out=out)
            outs = [(result, None)]
        elif len(operands) == 1 or TREATMENTS.get(eqn.primitive.name) is not None:
            plain = compat.bind(eqn.primitive, [value for value, _ in operands], eqn.params)
            masters = [None] * len(plain)
            if operands and operands[0][1] is not None:
                masters = compat.bind(eqn.primitive, [operands[0][1], *(v for v, _ in operands[1:])], eqn.params)
            outs = list(zip(plain, masters, strict=True))
        else:
            outs = [(value, None) for value in _bind_like(eqn, [value for value, _ in operands])]
        environment.update(zip(eqn.outvars, outs, strict=True))
    (result, _) = read(nominal.jaxpr.outvars[0])
    return _as(result, out)


def _bind_like(eqn: Any, values: list[Any]) -> list[Any]:
    """Binds with all floating operands in the dtype of the first array among them."""
    floats = [v for v in values if isinstance(v, jax.Array) and jnp.issubdtype(v.dtype, jnp.floating)]
    if floats:
        dtype = floats[0].dtype
        values = [jnp.asarray(v, dtype) if jnp.issubdtype(jnp.result_type(v), jnp.floating) else v for v in values]
    return compat.bind(eqn.primitive, values, eqn.params)

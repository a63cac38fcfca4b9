"""Low-precision contraction primitives (``dot_general``, convolutions, ``ragged_dot_general``) and their derivatives.

Each contraction primitive of JAX has a counterpart here.  It reads its two operands in the low dtype, whatever dtype
they have, accumulates in float32, and returns the requested dtype:

==================  ========================================================================================
forward             low x low, result low
gradient of data    low x low, result low: the operand was low
gradient of weight  low x low, result float32 straight from the accumulator: the operand is a float32 master
==================  ========================================================================================

A float32 master is passed beside its rounded copy: the contraction reads the copy, the gradient goes to the master.  So
a loop can read a copy that was made outside of it, while gradients accumulate in float32.

The form is chosen for the platform at lowering, not at tracing, so cross-compilation is correct.  Transposing and
batching follow JAX's rule for the original primitive: it is traced once per shape and replayed in these dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xla_amp.analysis.products import Contraction
from xla_amp.jax import compat, rebind
from xla_amp.jax.decisions import F32
from xla_amp.jax.primitives import info
from xla_amp.lowering.linalg.contraction import contract

_OWN_PARAMS = {"precision": None, "preferred_element_type": None}
"""Parameters that the low-precision primitive sets itself."""


def contract_low(
    primitive: Any,
    operands: Sequence[Any],
    masters: tuple[Any, Any],
    params: dict[str, Any],
    *,
    low: Any,
    out: Any,
) -> Any:
    """Binds the low-precision counterpart of a contraction.

    Args:
        primitive: JAX's contraction primitive.
        operands: its operands; the first two in the low dtype, or float32 to be rounded.
        masters: for each of the first two, the float32 value that gets its gradient, or None for the operand itself.
        params: its parameters.
        low: dtype that the operands are read in.
        out: dtype of the result.
    """
    given = (masters[0] is not None, masters[1] is not None)
    extra = [master for master in masters if master is not None]
    own = {"low": jnp.dtype(low), "out": jnp.dtype(out), "masters": given}
    return low_primitive(primitive).bind(*operands, *extra, **{**params, **_own_params(params)}, **own)


def low_copy(value: Any, low: Any) -> Any:
    """`value` in the low dtype, without a gradient: contractions send it to the master instead."""
    if value.dtype == low:
        return value
    with compat.mesh_of(value):
        return _copy().bind(value, low=jnp.dtype(low))


@functools.cache
def _copy() -> Primitive:
    def emit(value: Any, *, low: Any) -> Any:
        return lax.convert_element_type(value, low)

    def zero(value: Any, low: Any) -> Any:
        return ad.Zero(compat.with_dtype(jax.typeof(value), low).to_tangent_aval())

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


def with_stored_gradient(value: Any) -> Any:
    """`value`, whose gradient is written to memory in its dtype before anything reads it, on a GPU.

    XLA:GPU computes what follows a rounding, such as the sum that is the gradient of a bias, from the float32 number
    before it.  If a product reads the rounded one, both are written.
    """
    return _stored().bind(value, gradient=False)


@functools.cache
def _stored() -> Primitive:
    def transpose(cotangent: Any, value: Any, *, gradient: bool) -> list[Any]:
        return [cotangent if isinstance(cotangent, ad.Zero) else stored.bind(cotangent, gradient=True)]

    def emit(value: Any, *, gradient: bool, on_gpu: bool = False) -> Any:
        return lax.optimization_barrier(value) if gradient and on_gpu else value

    stored = Primitive("stored")
    stored.def_impl(emit)
    stored.def_abstract_eval(lambda aval, *, gradient: aval)
    ad.deflinear2(stored, transpose)
    batching.defvectorized(stored)
    mlir.register_lowering(stored, mlir.lower_fun(emit, multiple_results=False))
    on_gpu = functools.partial(emit, on_gpu=True)
    mlir.register_lowering(stored, mlir.lower_fun(on_gpu, multiple_results=False), platform="gpu")
    return stored


@functools.cache
def _with_gradient() -> Primitive:
    """(copy, master) -> the copy, which has the master's gradient, rounded."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out, (_, tangent) = linked.bind(*primals), tangents
        aval = jax.typeof(out).to_tangent_aval()
        return out, ad.Zero(aval) if isinstance(tangent, ad.Zero) else _cast(tangent, out.dtype)

    def batch(operands: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        moved = [batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
        return linked.bind(*moved), 0

    linked = Primitive("low_copy_with_gradient")
    linked.def_impl(lambda copy, master: copy)
    linked.def_abstract_eval(lambda copy, master: copy)
    ad.primitive_jvps[linked] = jvp
    batching.primitive_batchers[linked] = batch
    mlir.register_lowering(linked, mlir.lower_fun(lambda copy, master: copy, multiple_results=False))
    return linked


def original_call(
    primitive: Any, avals: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Primitive, operand types and parameters for a checkpoint policy: our primitive is replaced with JAX's."""
    if primitive not in _originals:
        return primitive, avals, params
    rest = {key: value for key, value in params.items() if key not in ("low", "out", "masters")}
    return _originals[primitive], avals[: len(avals) - sum(params["masters"])], rest


_originals: dict[Any, Any] = {}
"""Our primitive -> JAX's."""


def described(primitive: Any, params: Mapping[str, Any], left: Any, right: Any) -> Contraction:
    """A contraction of JAX as all fronts ask of it; `left` and `right` are its operands, or their types."""
    numbers: Any = params.get("dimension_numbers")
    if primitive is lax.conv_general_dilated_p:
        outputs, inputs, *window = numbers.rhs_spec
        axes = zip(numbers.lhs_spec[2:], window, strict=True)
        return Contraction.convolution(left.shape, right.shape, inputs, axes, (outputs, numbers.out_spec[1]))
    (contracted, _), (batch, _) = numbers or params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return Contraction.product(left.shape, right.shape, contracted, batch, ragged=numbers is None)


def _own_params(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _OWN_PARAMS.items() if key in params}


@functools.cache
def low_primitive(primitive: Any) -> Primitive:
    """The low-precision counterpart of a contraction primitive of JAX."""
    ours = Primitive(f"low_{primitive.name}")
    _originals[ours] = primitive
    ours.def_impl(functools.partial(_impl, ours))
    ours.def_effectful_abstract_eval(functools.partial(_abstract, primitive))
    ad.primitive_jvps[ours] = functools.partial(_jvp, primitive)
    compat.def_linearization(ours, functools.partial(_linearize, primitive))
    ad.primitive_transposes[ours] = functools.partial(_transpose, primitive)
    batching.primitive_batchers[ours] = functools.partial(_batch, primitive)
    for platform in ("cpu", "cuda", None):
        rule = mlir.lower_fun(functools.partial(_lower, primitive, platform), multiple_results=False)
        mlir.register_lowering(ours, rule, platform=platform)
    return ours


@functools.lru_cache(maxsize=1024)
def _compiled(ours: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(ours.bind, **dict(params)))


def _impl(ours: Primitive, *operands: Any, **params: Any) -> Any:
    run = _compiled(ours, tuple(params.items()))
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined, unused-ignore]
        with jax.disable_jit(False):  # a primitive is compiled even then, as JAX's own are
            return run(*operands)
    return run(*operands)


def _cast(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


def _abstract(primitive: Any, *avals: Any, low: Any, out: Any, masters: Any, **params: Any) -> Any:
    left, right, *rest = avals[: len(avals) - sum(masters)]
    if "preferred_element_type" in params:
        params = {**params, "preferred_element_type": out}
    low_avals = (compat.with_dtype(left, low), compat.with_dtype(right, low))
    return primitive.abstract_eval(*low_avals, *rest, **params)


def _lower(
    primitive: Any, platform: str | None, *operands: Any, low: Any, out: Any, masters: Any, **params: Any
) -> Any:
    left, right, *rest = operands[: len(operands) - sum(masters)]
    left, right = _cast(left, low), _cast(right, low)
    accumulator = jnp.dtype(jnp.float32)
    if platform == "cpu" and primitive is lax.dot_general_p:
        # XLA:CPU folds a transpose of the left operand or of a float32 result into a dot that it cannot run (jaxlib
        # 0.10.2: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"); barriers prevent the folding.
        on_mesh = functools.partial(_cpu_dot_on_mesh, out_sharding=params["out_sharding"])
        product = on_mesh if compat.is_partitioned() else _cpu_dot
        result = product(lax.optimization_barrier(left), right, params["dimension_numbers"])
        return _cast(lax.optimization_barrier(result), out)
    if "preferred_element_type" in params:
        params = {**params, "preferred_element_type": accumulator if platform == "cpu" else out}
    return _cast(primitive.bind(left, right, *rest, **params), out)


def _cpu_dot(left: jax.Array, right: jax.Array, dimension_numbers: Any) -> jax.Array:
    """`lax.dot_general` with a float32 result, as the matrix product that `xla_amp.lowering` has for XLA:CPU."""
    return _as_matrices(functools.partial(contract, platform="cpu"), left, right, dimension_numbers)


def _cpu_dot_on_mesh(left: jax.Array, right: jax.Array, dimension_numbers: Any, *, out_sharding: Any) -> jax.Array:
    """`_cpu_dot` of operands that a mesh may split: no axis is merged with another, which would gather its parts."""
    (left_contracted, right_contracted), (left_batch, right_batch) = dimension_numbers
    free = [axis for axis in range(left.ndim) if axis not in (*left_contracted, *left_batch)]
    left = lax.optimization_barrier(lax.transpose(left, (*left_batch, *free, *left_contracted)))
    last = tuple(range(left.ndim - len(left_contracted), left.ndim))
    return lax.dot_general(
        left,
        right,
        ((last, right_contracted), (tuple(range(len(left_batch))), right_batch)),
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


def _as_matrices(product: Any, left: jax.Array, right: jax.Array, dimension_numbers: Any) -> jax.Array:
    """`lax.dot_general` by `product`, which takes batches of matrices as `contract` does."""
    (left_contracted, right_contracted), (left_batch, right_batch) = dimension_numbers
    left, left_axes, left_free = _matrix(left, left_contracted, left_batch)
    right, right_axes, right_free = _matrix(right, right_contracted, right_batch)
    lead = tuple(range(len(left_batch)))
    result: jax.Array = product(left, right, (left_axes, right_axes), (lead, lead))
    return result.reshape(*left.shape[: len(lead)], *left_free, *right_free)


def _matrix(x: jax.Array, contracted: Sequence[int], batch: Sequence[int]) -> tuple[jax.Array, Any, list[int]]:
    """`x` with batch axes first and free and contracted axes merged to one each; contracted axis; free extents."""
    free = [axis for axis in range(x.ndim) if axis not in contracted and axis not in batch]
    first, second = (free, contracted) if not contracted or (free and free[0] < min(contracted)) else (contracted, free)
    moved = lax.transpose(x, (*batch, *first, *second))
    lead, middle = len(batch), len(batch) + len(first)
    sizes = [math.prod(moved.shape[lead:middle]), math.prod(moved.shape[middle:])]
    axis_contracted = lead + (1 if second is contracted else 0)
    return moved.reshape(*moved.shape[:lead], *sizes), (axis_contracted,), [x.shape[axis] for axis in free]


def _jvp(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = low_primitive(primitive).bind(*primals, **params)
    return out, _tangent(primitive, _factors(primals, params), tangents, params, jax.typeof(out))


def _linearize(primitive: Any, is_vjp: bool, nonzero: Sequence[bool], *primals: Any, **params: Any) -> Any:
    # Equal to the rule that JAX derives from `_jvp`, without tracing `_jvp`.
    out = low_primitive(primitive).bind(*primals, **params)
    aval = jax.typeof(out)

    def linear(residuals: Sequence[Any], *tangents: Any) -> Any:
        return _tangent(primitive, residuals, tangents, params, aval)

    return out, True, _factors(primals, params), linear


def _factors(primals: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The operands as factors of the derivative, which can be differentiated again.

    A copy has no gradient, so a second derivative would lose its part: here its gradient is that of its master.
    """
    count = len(primals) - sum(params["masters"])
    factors = list(primals[:count])
    for index, master in zip(_copies(params), primals[count:], strict=True):
        factors[index] = _with_gradient().bind(factors[index], master)
    return factors


def _copies(params: Mapping[str, Any]) -> list[int]:
    """The positions of the operands that have masters, in the order of these."""
    return [index for index, given in enumerate(params["masters"]) if given]


def _tangent(primitive: Any, factors: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any], aval: Any) -> Any:
    sources = [(0, tangents[0]), (1, tangents[1]), *zip(_copies(params), tangents[len(factors) :], strict=True)]
    plain = {**params, "masters": (False, False)}
    terms = []
    for index, tangent in sources:
        if not isinstance(tangent, ad.Zero):
            terms.append(low_primitive(primitive).bind(*factors[:index], tangent, *factors[index + 1 :], **plain))
    return functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(aval.to_tangent_aval())


def _transpose(primitive: Any, cotangent: Any, *operands: Any, low: Any, masters: Any, out: Any, **params: Any) -> Any:
    count = len(operands) - sum(masters)
    result: list[Any] = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    # The last undefined operand: if a copy and its master are both undefined, the master gets the gradient.
    target = max(index for index, operand in enumerate(operands) if ad.is_undefined_primal(operand))
    linear = target if target < count else _copies({"masters": masters})[target - count]
    if isinstance(cotangent, ad.Zero):
        return result
    unknown = operands[target].aval
    known = [operand for index, operand in enumerate(operands[:count]) if index != linear]
    f32_jaxpr = _transposed(primitive, linear, unknown, tuple(map(jax.typeof, known)), tuple(params.items()))
    values = [(value, None) for value in (cotangent, *known)]
    result[target] = _replay(primitive, f32_jaxpr, values, low, unknown.dtype)
    return result


def _f32_aval(aval: Any) -> Any:
    return compat.with_dtype(aval, jnp.float32) if jnp.issubdtype(aval.dtype, jnp.floating) else aval


@functools.lru_cache(maxsize=4096)
def _transposed(primitive: Any, index: int, unknown: Any, known: tuple[Any, ...], params: Any) -> compat.ClosedJaxpr:
    """JAX's transpose rule for the operand at `index`: cotangent and other operands to its cotangent."""
    settings = {**dict(params), **_own_params(dict(params))}
    if "preferred_element_type" in settings:
        settings["preferred_element_type"] = jnp.dtype(jnp.float32)

    def transposed(cotangent: Any, *others: Any) -> list[Any]:
        def linear(x: Any) -> Any:
            return primitive.bind(*others[:index], x, *others[index:], **settings)

        (result,) = jax.linear_transpose(linear, _f32_aval(unknown))(cotangent)
        return [result]

    known = tuple(map(_f32_aval, known))
    operands = (*known[:index], _f32_aval(unknown), *known[index:])
    out, _ = primitive.abstract_eval(*operands, **settings)
    return compat.trace(transposed, (out, *known))


def _batch(primitive: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    masters, low, out = (params.pop(key) for key in ("masters", "low", "out"))
    count = len(operands) - sum(masters)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    extra = iter(zip(operands[count:], dims[count:], strict=True))
    pairs: list[tuple[Any, Any]] = []
    axes: list[int | None] = []
    for index, (operand, dim) in enumerate(zip(operands[:count], dims[:count], strict=True)):
        master, master_dim = next(extra) if index < 2 and masters[index] else (None, dim)
        if master_dim != dim:
            operand = batching.bdim_at_front(operand, dim, size)
            master = batching.bdim_at_front(master, master_dim, size)
            dim = 0
        pairs.append((operand, master))
        axes.append(dim)
    avals = tuple(jax.typeof(operand) for operand, _ in pairs)
    f32_jaxpr = _batched(primitive, avals, tuple(axes), tuple(params.items()))
    return _replay(primitive, f32_jaxpr, pairs, low, out), 0


@functools.lru_cache(maxsize=4096)
def _batched(primitive: Any, avals: tuple[Any, ...], axes: tuple[int | None, ...], params: Any) -> compat.ClosedJaxpr:
    """JAX's batching rule of the primitive, with the batch axis of the result first."""
    settings = {**dict(params), **_own_params(dict(params))}

    def batched(*operands: Any) -> list[Any]:
        return [jax.vmap(functools.partial(primitive.bind, **settings), in_axes=axes)(*operands)]

    return compat.trace(batched, tuple(map(_f32_aval, avals)))


class _Operand(NamedTuple):
    """A value of a replay."""

    value: Any
    master: Any = None
    """The float32 value that gets its gradient."""


def _replay(
    primitive: Any,
    f32_jaxpr: compat.ClosedJaxpr,
    values: list[tuple[Any, Any]],
    low: Any,
    out: Any,
) -> Any:
    """Evaluates a jaxpr around one contraction, which becomes a low-precision one; masters follow their operands."""
    jaxpr = f32_jaxpr.jaxpr
    given = map(_Operand, *zip(*values, strict=True))
    environment: dict[Any, _Operand] = dict(zip(jaxpr.invars, given, strict=True))
    environment.update(zip(jaxpr.constvars, map(_Operand, f32_jaxpr.consts), strict=True))

    def read(environment: dict[Any, _Operand], atom: Any) -> _Operand:
        return _Operand(atom.val) if isinstance(atom, compat.Literal) else environment[atom]

    def process(eqn: Any, operands: list[_Operand]) -> list[_Operand]:
        arrays = [each.value for each in operands]
        if eqn.primitive is primitive:
            left, right = operands[:2]
            product = described(primitive, eqn.params, *arrays[:2])
            if F32 in (left.value.dtype, right.value.dtype) and product.sums_few:
                pair = [_cast(each.value if each.master is None else each.master, F32) for each in (left, right)]
                wide = [*pair, *arrays[2:]]
                return [*map(_Operand, compat.bind(primitive, wide, eqn.params))]
            masters = (left.master, right.master)
            return [_Operand(contract_low(primitive, arrays, masters, eqn.params, low=low, out=out))]
        if len(operands) != 1 and info(eqn.primitive.name).kind is None:
            return [*map(_Operand, _bind_like(eqn, arrays))]
        plain = compat.bind(eqn.primitive, arrays, eqn.params)
        moved = operands[0]
        if moved.master is None:
            return [*map(_Operand, plain)]
        wide = compat.bind(eqn.primitive, [moved.master, *arrays[1:]], eqn.params)
        return [*map(_Operand, plain, wide)]

    # The jaxpr serves all programs: its scopes, meshes and source lines are those of the first.
    rebind.run(jaxpr.eqns, environment, process, read, context=lambda _: contextlib.nullcontext())
    return _cast(read(environment, jaxpr.outvars[0]).value, out)


def _bind_like(eqn: Any, values: list[Any]) -> list[Any]:
    """Binds an equation with all floating operands in the dtype of the first array among them."""
    floats = [v for v in values if isinstance(v, jax.Array) and jnp.issubdtype(v.dtype, jnp.floating)]
    if floats:
        dtype = floats[0].dtype
        values = [jnp.asarray(v, dtype) if jnp.issubdtype(jnp.result_type(v), jnp.floating) else v for v in values]
    return compat.bind(eqn.primitive, values, eqn.params)

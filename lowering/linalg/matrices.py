"""Helpers of linear algebra: adjoints, triangular solves, torch's ``info`` numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xla_amp.lowering.operand import as_dtype

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def exact(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """`function` with its matrix products at the highest precision (TPU and GPU would round float32 operands).

    Half types are computed in float32, and results rounded: JAX has these functions for wide types only.
    """

    @functools.wraps(function)
    def wrapped(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        half = next((x.dtype for x in args if isinstance(x, jax.Array) and x.dtype in _HALF), None)
        with jax.default_matmul_precision("highest"):
            if half is None:
                return function(*args, **kwargs)
            wide: Any = [as_dtype(x, jnp.float32) if isinstance(x, jax.Array) and x.dtype == half else x for x in args]
            results = function(*wide, **kwargs)
            rounded: _Result = jax.tree.map(lambda x: as_dtype(x, half) if x.dtype == jnp.float32 else x, results)
            return rounded

    return wrapped


_HALF = (jnp.bfloat16, jnp.float16)


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of each matrix."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def transpose(x: jax.Array) -> jax.Array:
    """The transpose of each matrix."""
    return jnp.swapaxes(x, -1, -2)


def eye_like(x: jax.Array) -> jax.Array:
    """Unit matrices of the shape of `x`."""
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def first_true(bad: jax.Array) -> jax.Array:
    """Per row of `bad` [..., n]: the position of its first true element, counted from 1, or 0."""
    return as_dtype(jnp.where(jnp.any(bad, -1), jnp.argmax(bad, -1) + 1, 0), jnp.int32)


def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Placeholder for a result that was not requested; torch gives it a shape without elements."""
    return jnp.zeros(shape.shape, shape.dtype)


def broadcast(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, broadcast to common batch dimensions."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


def triangular(
    a: jax.Array, b: jax.Array, *, lower: bool, left: bool = True, adjoint: bool = False, unit: bool = False
) -> jax.Array:
    """Solve A X = B, or X A = B if not `left`, for A or its adjoint; one triangle of A is read."""
    a, b = broadcast(a, b)
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=adjoint, conjugate_a=adjoint, unit_diagonal=unit
    )

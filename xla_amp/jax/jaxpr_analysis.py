"""Static analyses of jaxprs: kernels, backward passes, gradient outputs, contracted arguments."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from xla_amp.jax import compat
from xla_amp.jax.decisions import F32, decide, dtype_of
from xla_amp.jax.primitives import GRADIENT_PASSTHROUGH, PRIMITIVES
from xla_amp.policy import Policy


def has_kernels(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a float32 kernel: only its caller can request another dtype."""
    return any(_is_kernel(eqn) or any(map(has_kernels, compat.sub_jaxprs(eqn.params))) for eqn in jaxpr.eqns)


def _is_kernel(eqn: Any) -> bool:
    info = PRIMITIVES.get(eqn.primitive.name)
    reads_f32 = any(dtype_of(atom.aval) == F32 for atom in eqn.invars)
    return info is not None and info.kind == "kernel" and reads_f32


def has_backward(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a backward pass."""
    return any(_is_backward(eqn) or any(map(has_backward, compat.sub_jaxprs(eqn.params))) for eqn in jaxpr.eqns)


def _is_backward(eqn: Any) -> bool:
    return any(map(compat.is_transpose_scope, compat.name_stack(eqn)))


def gradient_outputs(jaxpr: Any, backward: bool, f32_outputs: Sequence[bool] | None) -> frozenset[Any]:
    """Variables through which a gradient leaves the backward pass, to the optimizer or to the caller.

    Args:
        jaxpr: the program.
        backward: whether all of it belongs to a backward pass.
        f32_outputs: which of its results are such gradients; None for all.
    """
    inside = [backward or _is_backward(eqn) for eqn in jaxpr.eqns]
    if not any(inside):
        return frozenset()
    flags = [True] * len(jaxpr.outvars) if f32_outputs is None else f32_outputs
    found = {v for v, flag in zip(jaxpr.outvars, flags, strict=True) if flag and not isinstance(v, compat.Literal)}
    for eqn, is_inside in zip(reversed(jaxpr.eqns), reversed(inside), strict=True):
        if not is_inside or (_passes_gradient(eqn.primitive.name) and not found.isdisjoint(eqn.outvars)):
            found.update(atom for atom in eqn.invars if not isinstance(atom, compat.Literal))
    computed = {var for eqn, is_inside in zip(jaxpr.eqns, inside, strict=True) if is_inside for var in eqn.outvars}
    return frozenset(found & computed)


@functools.cache
def _passes_gradient(primitive: str) -> bool:
    info = PRIMITIVES.get(primitive)
    return primitive in GRADIENT_PASSTHROUGH or (info is not None and info.kind == "data_movement")


_contracted: weakref.WeakKeyDictionary[Any, dict[Policy, tuple[bool, ...]]] = weakref.WeakKeyDictionary()


def contracted_arguments(jaxpr: Any, policy: Policy) -> tuple[bool, ...]:
    """For each argument of a jaxpr, whether a low-precision contraction reads it."""
    cache = _contracted.setdefault(jaxpr, {})
    if policy not in cache:
        reads: set[Any] = set()
        for eqn in reversed(jaxpr.eqns):
            decision, info = decide(policy, eqn.primitive.name)
            kind = info.kind if info else None
            if kind == "contraction" and decision.cast == "low":
                reads.update(atom for atom in eqn.invars[:2] if not isinstance(atom, compat.Literal))
            elif kind == "data_movement" and eqn.outvars[0] in reads and not isinstance(eqn.invars[0], compat.Literal):
                reads.add(eqn.invars[0])
            elif kind in ("call", "checkpoint"):
                (inner,) = compat.sub_jaxprs(eqn.params)
                flags = zip(eqn.invars, contracted_arguments(inner, policy), strict=True)
                reads.update(atom for atom, flag in flags if flag and not isinstance(atom, compat.Literal))
        cache[policy] = tuple(var in reads for var in jaxpr.invars)
    return cache[policy]

"""`torch_function`: a JAX function inside a torch step, recorded with it and differentiated by JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_amp.backends import base
from xla_amp.lazy.dtypes import TO_NUMPY
from xla_amp.lazy.graph.trace import Instruction
from xla_amp.lazy.interop import jax_op, shared_arrays
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration.device import device


def torch_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a JAX function callable on lazy tensors: differentiable, any number of times, and in the step's program.

    Each new combination of shapes, dtypes and other arguments is traced once.  Tensors become arrays of their dtype
    (64-bit ones as JAX is set to treat them), Python floats become data, everything else stays as it is and must be
    hashable.  jax.Arrays among the arguments are inputs too; those that `fn` closes over are constants.

    torch's autocast does not reach into `fn`: use ``torch_function(xla_amp.jax.autocast(fn))``.

    Args:
        fn: function of pytrees that returns a pytree of arrays.

    Returns:
        A function that takes tensors where `fn` takes arrays, and returns tensors of the lazy device.

    Raises:
        TypeError: an argument cannot be hashed, or a result is no array.

    Example:
        >>> import jax, torch, xla_amp
        >>> softplus = torch_function(jax.nn.softplus)
        >>> x = torch.zeros(2, device=xla_amp.xla_device(), requires_grad=True)
        >>> softplus(x).sum().backward()
        >>> x.grad.tolist()
        [0.5, 0.5]
    """
    if not callable(fn):
        raise TypeError(f"torch_function expects a JAX function, got {type(fn).__name__}")
    traced: dict[Any, _Traced] = {}

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        base.require_lazy("torch_function()", "torch_xla.core.xla_builder.call_jax")
        device()
        leaves, tree = jax.tree.flatten((args, kwargs))
        tensors: list[torch.Tensor] = []
        numbers: list[float] = []
        kinds: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf = shared_arrays.adopt(leaf)
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                kinds.append(_TENSOR)
            elif type(leaf) is float:
                numbers.append(leaf)
                kinds.append(_NUMBER)
            else:
                kinds.append((type(leaf), leaf))
        recording = torch.is_grad_enabled()
        wanted = tuple(
            place for place, x in enumerate(tensors) if recording and x.requires_grad and x.is_floating_point()
        )
        signature = tuple((tuple(x.shape), x.dtype) for x in tensors)
        key = tree, tuple(kinds), signature, wanted, has_64_bits()
        try:
            found = traced.get(key)
        except TypeError as error:
            raise TypeError(f"{_name(fn)}: arguments beside tensors and floats must be hashable: {error}") from None
        if found is None:
            found = traced[key] = _Traced.of(fn, tree, kinds, tensors, len(numbers), wanted)
        tensors = [x if x.device.type == DEVICE_TYPE or x.dim() == 0 else _elsewhere(fn, x) for x in tensors]
        recorded = _Call.apply if wanted else _without_gradients
        results = recorded(found, numbers, *tensors)
        return jax.tree.unflatten(found.tree, results)

    return call


def has_64_bits() -> bool:
    """Whether JAX makes 64-bit arrays where the caller is."""
    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


_TENSOR, _NUMBER = "tensor", "number"


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _elsewhere(fn: Any, tensor: torch.Tensor) -> torch.Tensor:
    raise TypeError(
        f"torch_function({_name(fn)}) takes tensors of the lazy device, got one of shape {list(tensor.shape)} on "
        f"{tensor.device}; move it with tensor.to(xla_amp.xla_device())"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Traced:
    """A JAX function for one signature, as instructions."""

    forward: Instruction
    """Tensors and numbers to results, and then to what the backward pass needs."""
    backward: Instruction | None
    """That and the cotangents of `floating` results to the gradients of `wanted` tensors."""
    tree: Any
    results: int
    floating: tuple[int, ...]
    wanted: tuple[int, ...]
    again: Callable[..., Any] | None
    """``again(tensors, numbers, cotangents)``: the gradients, to be differentiated in turn."""

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        tree: Any,
        kinds: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        numbers: int,
        wanted: tuple[int, ...],
    ) -> _Traced:
        """Traces `fn`."""
        seen: dict[str, Any] = {}

        def flat(values: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
            arrays, given = iter(values), iter(floats)
            filled = [next(arrays) if k is _TENSOR else next(given) if k is _NUMBER else k[1] for k in kinds]
            args, kwargs = jax.tree.unflatten(tree, filled)
            outs, seen["tree"] = jax.tree.flatten(fn(*args, **kwargs))
            return [jnp.asarray(out) for out in outs]

        def pullback(values: Sequence[Any], floats: Sequence[Any]) -> tuple[list[Any], Any]:
            """All results, and JAX's function from cotangents of the floating ones to gradients of `wanted`."""

            def chosen(differentiated: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                filled = list(values)
                for place, value in zip(wanted, differentiated, strict=True):
                    filled[place] = value
                outs = flat(filled, floats)
                seen["floating"] = tuple(i for i, out in enumerate(outs) if jnp.issubdtype(out.dtype, jnp.inexact))
                return [outs[i] for i in seen["floating"]], outs

            _, vjp, outs = jax.vjp(chosen, [values[place] for place in wanted], has_aux=True)
            return outs, vjp

        def forward(values: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
            if not wanted:
                return flat(values, floats)
            outs, vjp = pullback(values, floats)
            saved, seen["vjp"] = jax.tree.flatten(vjp)
            seen["results"], seen["saved"] = len(outs), [_keyless(value) for value in saved]
            return [*outs, *(_packed(value) for value in saved)]

        def again(values: Sequence[Any], floats: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            return list(pullback(values, floats)[1](list(cotangents))[0])

        structs = [_struct(x) for x in tensors]
        float_struct = jax.ShapeDtypeStruct((), jnp.result_type(float), weak_type=True)
        ahead = jax.make_jaxpr(forward)(structs, [float_struct] * numbers)
        name = _name(fn)
        run = jax_op.instruction(name, _evaluator(ahead, len(structs)), ahead.out_avals, len(structs), numbers)
        if not wanted:
            count = len(ahead.out_avals)
            return cls(forward=run, backward=None, tree=seen["tree"], results=count, floating=(), wanted=(), again=None)

        def backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            kept = [
                value if impl is None else jax.random.wrap_key_data(value, impl=impl)
                for value, impl in zip(saved, seen["saved"], strict=True)
            ]
            return list(jax.tree.unflatten(seen["vjp"], kept)(list(cotangents))[0])

        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ahead.out_avals]
        cotangents = [avals[place] for place in seen["floating"]]
        saved = avals[seen["results"] :]
        back = jax.make_jaxpr(backward)(saved, cotangents)
        count = len(saved) + len(cotangents)
        return cls(
            forward=run,
            backward=jax_op.instruction(f"{name} (backward)", _evaluator(back, count), back.out_avals, count),
            tree=seen["tree"],
            results=seen["results"],
            floating=seen["floating"],
            wanted=wanted,
            again=torch_function(again),
        )


def _struct(tensor: torch.Tensor) -> Any:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(TO_NUMPY[tensor.dtype]))


def _is_key(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def _keyless(value: Any) -> Any:
    return jax.random.key_impl(value) if _is_key(value) else None


def _packed(value: Any) -> Any:
    return jax.random.key_data(value) if _is_key(value) else jnp.asarray(value)


def _evaluator(closed: Any, arrays: int) -> Callable[..., Sequence[Any]]:
    """A traced function as an instruction calls it: arrays and numbers in the types that it was traced for."""
    dtypes = [np.dtype(aval.dtype) for aval in closed.in_avals]

    def evaluate(values: Sequence[Any], floats: Sequence[Any] = ()) -> Sequence[Any]:
        given = [
            value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)
            for value, dtype in zip((*values, *floats), dtypes, strict=True)
        ]
        return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *given))

    return evaluate


def _without_gradients(traced: _Traced, numbers: Sequence[float], *tensors: torch.Tensor) -> list[torch.Tensor]:
    return jax_op.append(traced.forward, tensors, numbers)


class _Call(torch.autograd.Function):
    """One call of a traced function, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, traced: _Traced, numbers: Sequence[float], *tensors: torch.Tensor) -> Any:
        made = jax_op.append(traced.forward, tensors, numbers)
        results = made[: traced.results]
        ctx.traced, ctx.numbers, ctx.inputs = traced, numbers, len(tensors)
        ctx.save_for_backward(*tensors, *made[traced.results :])
        ctx.mark_non_differentiable(*(x for place, x in enumerate(results) if place not in traced.floating))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        traced: _Traced = ctx.traced
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.inputs], saved[ctx.inputs :]
        cotangents = [grads[place] for place in traced.floating]
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated
            made = traced.again(list(tensors), list(ctx.numbers), cotangents)  # type: ignore[misc]
        else:
            made = jax_op.append(traced.backward, [*kept, *cotangents])  # type: ignore[arg-type]
        gradients: list[Any] = [None] * len(tensors)
        for place, gradient in zip(traced.wanted, made, strict=True):
            gradients[place] = gradient
        return None, None, *gradients

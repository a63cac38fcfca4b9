"""`torch_function`: call a JAX function inside a torch step; it is recorded with the step and differentiated by JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_amp.engines import base
from xla_amp.errors import UnsupportedDtypeError
from xla_amp.lazy.base.dtypes import TO_NUMPY, TO_TORCH
from xla_amp.lazy.graph.trace import Instruction, record, spec, trace
from xla_amp.lazy.interop.arrays import from_jax
from xla_amp.lazy.steps.loops import flush_if_full
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration.device import device


def torch_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a JAX function callable on lazy tensors, as a part of the step's program; derivatives of any order.

    `fn` is traced once per combination of shapes, dtypes and other arguments.  Tensors become arrays of their dtype
    (64-bit ones according to JAX's setting), Python floats become data, and other arguments must be hashable.
    jax.Arrays among the arguments are inputs too; those that `fn` closes over are constants.

    torch's autocast does not apply inside `fn`: use ``torch_function(xla_amp.jax.autocast(fn))``.

    Args:
        fn: function of pytrees that returns a pytree of arrays.

    Returns:
        A function that takes tensors where `fn` takes arrays, and returns tensors of the lazy device.

    Raises:
        TypeError: an argument cannot be hashed, or a result is not an array.

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
                leaf = from_jax(leaf)
            if isinstance(leaf, torch.Tensor):
                if leaf.device.type != DEVICE_TYPE and leaf.dim():
                    raise TypeError(
                        f"torch_function({_name(fn)}) takes tensors of the lazy device, got one of shape "
                        f"{list(leaf.shape)} on {leaf.device}; move it with tensor.to(xla_amp.xla_device())"
                    )
                tensors.append(leaf)
                kinds.append(_TENSOR)
            elif type(leaf) is float:
                numbers.append(leaf)
                kinds.append(_NUMBER)
            else:
                kinds.append((type(leaf), leaf))
        recording = torch.is_grad_enabled()
        wanted = tuple(
            index for index, x in enumerate(tensors) if recording and x.requires_grad and x.is_floating_point()
        )
        signature = tuple((tuple(x.shape), x.dtype) for x in tensors)
        key = tree, tuple(kinds), signature, wanted, has_64_bits()
        try:
            found = traced.get(key)
        except TypeError as error:
            raise TypeError(f"{_name(fn)}: arguments beside tensors and floats must be hashable: {error}") from None
        if found is None:
            found = traced[key] = _Traced.trace(fn, tree, kinds, tensors, len(numbers), wanted)
        recorded: Any = _TracedCall.apply if wanted else _without_gradients
        results = recorded(found, numbers, *tensors)
        return jax.tree.unflatten(found.tree, results)

    return call


def has_64_bits() -> bool:
    """Whether JAX makes 64-bit arrays in the current context."""
    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


_TENSOR, _NUMBER = "tensor", "number"


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Traced:
    """A JAX function traced for one signature, as instructions."""

    forward: Instruction
    """From tensors and numbers to results, followed by the residuals of the backward pass."""
    backward: Instruction | None
    """From residuals and cotangents of the `floating` results to gradients of the `wanted` tensors."""
    tree: Any
    results: int
    floating: tuple[int, ...]
    wanted: tuple[int, ...]
    again: Callable[..., Any] | None
    """``again(tensors, numbers, cotangents)``: gradients that can be differentiated again."""

    @classmethod
    def trace(
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
            """All results, and the function from cotangents of the floating ones to gradients of `wanted`."""

            def chosen(differentiated: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                filled = list(values)
                for index, value in zip(wanted, differentiated, strict=True):
                    filled[index] = value
                outs = flat(filled, floats)
                seen["floating"] = tuple(i for i, out in enumerate(outs) if jnp.issubdtype(out.dtype, jnp.inexact))
                return [outs[i] for i in seen["floating"]], outs

            _, vjp, outs = jax.vjp(chosen, [values[index] for index in wanted], has_aux=True)
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

        structs = [jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(TO_NUMPY[x.dtype])) for x in tensors]
        float_struct = jax.ShapeDtypeStruct((), jnp.result_type(float), weak_type=True)
        forward_jaxpr = jax.make_jaxpr(forward)(structs, [float_struct] * numbers)
        name = _name(fn)
        run = _instruction(
            name, _evaluator(forward_jaxpr, len(structs)), forward_jaxpr.out_avals, len(structs), numbers
        )
        if not wanted:
            count = len(forward_jaxpr.out_avals)
            return cls(forward=run, backward=None, tree=seen["tree"], results=count, floating=(), wanted=(), again=None)

        def backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            kept = [
                value if impl is None else jax.random.wrap_key_data(value, impl=impl)
                for value, impl in zip(saved, seen["saved"], strict=True)
            ]
            return list(jax.tree.unflatten(seen["vjp"], kept)(list(cotangents))[0])

        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in forward_jaxpr.out_avals]
        cotangents = [avals[index] for index in seen["floating"]]
        saved = avals[seen["results"] :]
        backward_jaxpr = jax.make_jaxpr(backward)(saved, cotangents)
        count = len(saved) + len(cotangents)
        return cls(
            forward=run,
            backward=_instruction(
                f"{name} (backward)", _evaluator(backward_jaxpr, count), backward_jaxpr.out_avals, count
            ),
            tree=seen["tree"],
            results=seen["results"],
            floating=seen["floating"],
            wanted=wanted,
            again=torch_function(again),
        )


def _is_key(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))  # type: ignore[attr-defined]


def _keyless(value: Any) -> Any:
    return jax.random.key_impl(value) if _is_key(value) else None


def _packed(value: Any) -> Any:
    return jax.random.key_data(value) if _is_key(value) else jnp.asarray(value)


def _evaluator(closed: Any, arrays: int) -> Callable[..., Sequence[Any]]:
    """A traced function that first converts arrays and numbers to the dtypes that it was traced for."""
    dtypes = [np.dtype(aval.dtype) for aval in closed.in_avals]

    def evaluate(values: Sequence[Any], floats: Sequence[Any] = ()) -> Sequence[Any]:
        given = [
            value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)
            for value, dtype in zip((*values, *floats), dtypes, strict=True)
        ]
        return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *given))

    return evaluate


def _instruction(
    name: str, function: Callable[..., Sequence[Any]], results: Sequence[Any], inputs: int, floats: int = 0
) -> Instruction:
    """An instruction that runs ``function(arrays, numbers)``, whose results have the dtypes and shapes of `results`.

    Raises:
        UnsupportedDtypeError: torch has no counterpart of a result's dtype.
    """
    outs = []
    for result in results:
        dtype = TO_TORCH.get(result.dtype) if isinstance(result.dtype, np.dtype) else None
        if dtype is None:
            raise UnsupportedDtypeError(
                f"{name}: a value of dtype {result.dtype} has no counterpart in torch; convert it inside the function"
            )
        outs.append(spec(tuple(result.shape), dtype))

    def emit(context: Any, inputs: Any, floats: Any, *_: Any) -> Sequence[Any]:
        return function(inputs, floats)

    return Instruction(name, emit, tuple(outs), inputs, floats)


def _append(run: Instruction, tensors: Sequence[torch.Tensor], floats: Sequence[float] = ()) -> list[torch.Tensor]:
    """Records an instruction on these tensors and numbers; returns a new tensor for each result."""
    with trace.lock:
        flush_if_full()
        numbers, _ = tensor_io.operands(tensors)
        trace.floats.extend(floats)
        first = record(run, *numbers)
        return [tensor_io.new_tensor(out, first + index) for index, out in enumerate(run.outs) if out is not None]


def _without_gradients(traced: _Traced, numbers: Sequence[float], *tensors: torch.Tensor) -> list[torch.Tensor]:
    return _append(traced.forward, tensors, numbers)


class _TracedCall(torch.autograd.Function):
    """One call of a traced function, for autograd."""

    @staticmethod
    def forward(ctx: Any, traced: _Traced, numbers: Sequence[float], *tensors: torch.Tensor) -> Any:
        outputs = _append(traced.forward, tensors, numbers)
        results = outputs[: traced.results]
        ctx.traced, ctx.numbers, ctx.inputs = traced, numbers, len(tensors)
        ctx.save_for_backward(*tensors, *outputs[traced.results :])
        ctx.mark_non_differentiable(*(x for index, x in enumerate(results) if index not in traced.floating))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        traced: _Traced = ctx.traced
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.inputs], saved[ctx.inputs :]
        cotangents = [grads[index] for index in traced.floating]
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated
            outputs = traced.again(list(tensors), list(ctx.numbers), cotangents)  # type: ignore[misc]
        else:
            outputs = _append(traced.backward, [*kept, *cotangents])  # type: ignore[arg-type]
        gradients: list[Any] = [None] * len(tensors)
        for index, gradient in zip(traced.wanted, outputs, strict=True):
            gradients[index] = gradient
        return None, None, *gradients

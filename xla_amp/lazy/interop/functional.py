"""`functional`: a torch module as a pure function of JAX arrays, differentiated by torch's autograd.

When JAX traces the function, the module's forward runs on placeholders of the lazy device, which records operations and
computes nothing; the trace then becomes a JAX function.  Under differentiation torch's autograd records the backward
pass after it, and the two parts become a `jax.custom_vjp`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_amp.engines import base
from xla_amp.lazy.base import private_api
from xla_amp.lazy.base.dtypes import TO_NUMPY, TO_TORCH
from xla_amp.lazy.interop.arrays import to_jax
from xla_amp.lazy.interop.functionalize import FunctionTrace, evaluate, numbers_of, tracing
from xla_amp.lazy.interop.torch_function import has_64_bits
from xla_amp.lazy.programs.observed import Function
from xla_amp.lazy.tensors.tensor_io import is_lazy
from xla_amp.lazy.torch_integration.device import device
from xla_amp.torch_common import trees


def functional(module: torch.nn.Module) -> tuple[dict[str, jax.Array], TorchFunction]:
    """The parameters of a torch module, and the module as a pure JAX function of them.

    Args:
        module: on the lazy device or on the CPU; its current parameters, buffers and mode (``train()``, ``eval()``)
            are used.  On the lazy device nothing is copied.

    Returns:
        ``(params, fn)``: arrays by parameter name, and ``fn(params, *args, **kwargs)``.

    Example:
        >>> import jax, jax.numpy as jnp, torch
        >>> params, fn = functional(torch.nn.Linear(3, 1))
        >>> loss = lambda params, x: jnp.sum(fn(params, x))
        >>> gradients = jax.jit(jax.grad(loss))(params, jnp.ones((2, 3)))
        >>> gradients["weight"].tolist(), gradients["bias"].tolist()
        ([[2.0, 2.0, 2.0]], [2.0])
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"functional() expects a torch.nn.Module, got {type(module).__name__}")
    base.require_lazy("functional()")
    device()
    params = {name: _array(tensor) for name, tensor in module.named_parameters()}
    buffers = {name: _array(tensor) for name, tensor in module.named_buffers()}
    return params, TorchFunction(module, buffers)


class TorchFunction:
    """A torch module as a JAX function; `functional` makes it.

    It can be jitted, differentiated in reverse mode, and used under `xla_amp.jax.autocast`; torch's autocast regions
    that are open while JAX traces it apply too.  Outside of `jax.jit` each call records the module again.
    """

    def __init__(self, module: torch.nn.Module, buffers: dict[str, jax.Array]) -> None:
        self._module = module
        self.buffers = buffers
        """The module's buffers by name, e.g. the running statistics of batch norms."""
        self._dtypes = {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}

    def __call__(
        self,
        params: Mapping[str, Any],
        *args: Any,
        buffers: Mapping[str, Any] | None = None,
        rng: jax.Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the module.

        Args:
            params: an array for each parameter.
            *args, **kwargs: what the module takes, with arrays for tensors.  If JAX's 64-bit types are off, int32
                arrays become int64 tensors, torch's dtype of indices and labels.
            buffers: an array for each buffer.  Without it `self.buffers` are read and changes are dropped.
            rng: a JAX key, which modules that draw random numbers (dropout in training mode) need.

        Returns:
            What the module returns, tensors as arrays (64-bit ones as JAX is set to treat them); with `buffers` a
            pair of that and the new buffers.  Gradients flow to `params` and to floating-point arguments.

        Raises:
            TypeError: names that the module does not have, tensors among the arguments, or a missing `rng`.
            EngineError: the module reads values while it runs.
        """
        state = self.buffers if buffers is None else buffers
        _require_names("params", params, [name for name in self._dtypes if name not in self.buffers])
        _require_names("buffers", state, list(self.buffers))
        flat_args, tree = jax.tree.flatten((args, kwargs))
        for arg in flat_args:
            if isinstance(arg, torch.Tensor):
                raise TypeError(
                    f"a torch module called from JAX takes arrays, got a tensor of shape {list(arg.shape)} on "
                    f"{arg.device}; convert it with xla_amp.jax.to_jax(tensor)"
                )
        indices = [i for i, arg in enumerate(flat_args) if isinstance(arg, jax.Array | np.ndarray | np.generic)]
        call = _ModuleCall(self._module, self._dtypes, list(params), list(state), flat_args, tree, indices)
        words = None if rng is None else jax.random.bits(rng, (2,), jnp.uint32)  # seed and offset of the generator
        values = [jnp.asarray(params[name]) for name in params], [jnp.asarray(flat_args[index]) for index in indices]
        results, new_buffers = call.run(*values, [jnp.asarray(state[name]) for name in state], words)
        output = call.output(results)
        return output if buffers is None else (output, dict(zip(state, new_buffers, strict=True)))


@dataclasses.dataclass(eq=False)
class _ModuleCall:
    """One call of a module: its trace, and the JAX function outputs from it."""

    _module: torch.nn.Module
    _dtypes: Mapping[str, torch.dtype]
    _params: list[str]
    _buffers: list[str]
    _flat_args: list[Any]
    _argument_tree: Any
    _array_indices: list[int]
    _result_tree: Any = None
    _result_items: Sequence[Any] = ()

    def run(self, params: Any, inputs: Any, buffers: Any, words: Any) -> tuple[list[Any], list[Any]]:
        """(results, new buffers), differentiable by `params` and `inputs`."""
        differentiable = jax.custom_vjp(self._forward)
        differentiable.defvjp(self._forward_and_saved, self._backward)
        results, new_buffers = differentiable(params, inputs, buffers, words)
        return results, new_buffers

    def output(self, results: Sequence[Any]) -> Any:
        """What the module returned, with arrays for tensors."""
        arrays = iter(results)
        return _as_dicts(
            trees.tree_unflatten([next(arrays) if x is _TENSOR else x for x in self._result_items], self._result_tree)
        )

    def _forward(self, params: Any, inputs: Any, buffers: Any, words: Any) -> Any:
        with tracing() as trace, torch.no_grad():
            outputs, state = self._record(trace, params, inputs, buffers, grad=False)[:2]
            function = trace.whole([*outputs, *state])
        dtypes = self._placeholder_dtypes(params, buffers, inputs)
        values = _run(function, [*params, *buffers, *inputs], words, dtypes)
        return values[: len(outputs)], values[len(outputs) :]

    def _forward_and_saved(self, params: Any, inputs: Any, buffers: Any, words: Any) -> Any:
        with tracing() as trace, torch.enable_grad():
            outputs, state, sources = self._record(trace, params, inputs, buffers, grad=True)
            numbers = numbers_of([*outputs, *state])
            trace.split()
            roots = [x for x in outputs if x.requires_grad]
            # Only these need a cotangent; the others get None.
            cotangents = [trace.argument(x.shape, x.dtype) for x in roots]
            gradients = torch.autograd.grad(roots, sources, cotangents, allow_unused=True) if roots and sources else ()
            present = [gradient for gradient in gradients if gradient is not None]
            forward, backward = trace.halves(numbers, present)
        outs = _run(
            forward, [*params, *buffers, *inputs], words, self._placeholder_dtypes(params, buffers, inputs), whole=True
        )
        count = len(outputs) + len(state)
        pullback = _BackwardFunction(
            backward,
            tuple(i for i, x in enumerate(outputs) if x.requires_grad),
            tuple(TO_NUMPY[x.dtype] for x in roots),
            tuple(gradient is not None for gradient in gradients),
        )
        saved = jax.tree_util.Partial(pullback, outs[count:])
        values = _narrow(outs[:count])
        return (values[: len(outputs)], values[len(outputs) :]), (saved, params, inputs, words)

    def _backward(self, residuals: Any, cotangents: Any) -> Any:
        pullback, params, inputs, words = residuals
        found = iter(pullback(cotangents[0], words))

        def gradient(x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return None
            given = next(found)
            return jnp.zeros_like(x) if given is None else given.astype(x.dtype)

        return [gradient(x) for x in params], [gradient(x) for x in inputs], None, None

    def _record(
        self, trace: FunctionTrace, params: Any, inputs: Any, buffers: Any, grad: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Runs the module on placeholders: results, buffers, and what to differentiate with respect to."""
        types = self._placeholder_dtypes(params, buffers, inputs)
        values = [*params, *buffers, *inputs]
        tensors = [trace.argument(x.shape, dtype) for x, dtype in zip(values, types, strict=True)]
        first, last = len(params), len(params) + len(buffers)
        state = tensors[first:last]
        sources = [x for x in (*tensors[:first], *tensors[last:]) if x.is_floating_point() or x.is_complex()]
        if grad:
            for source in sources:
                source.requires_grad_()
        filled = list(self._flat_args)
        for index, tensor in zip(self._array_indices, tensors[last:], strict=True):
            filled[index] = tensor.clone()  # the module may write to it
        args, kwargs = jax.tree.unflatten(self._argument_tree, filled)
        named = dict(zip((*self._params, *self._buffers), tensors[:last], strict=True))
        result = torch.func.functional_call(self._module, named, args, kwargs)
        flat, self._result_tree = trees.tree_flatten(result)
        self._result_items = [_TENSOR if is_lazy(x) else x for x in flat]
        return [x for x in flat if is_lazy(x)], state, sources

    def _placeholder_dtypes(self, params: Any, buffers: Any, inputs: Any) -> list[torch.dtype]:
        """Dtypes of the placeholders: the module's integers keep their dtypes, whatever JAX's 64-bit setting is."""
        named = list(zip((*self._params, *self._buffers), (*params, *buffers), strict=True))
        own = [
            TO_TORCH[np.dtype(x.dtype)] if jnp.issubdtype(x.dtype, jnp.inexact) else self._dtypes[name]
            for name, x in named
        ]
        # An int32 array may be an index if 64-bit types are off, and torch's indices are int64.
        narrow = not has_64_bits()
        return [*own, *(torch.int64 if narrow and x.dtype == np.int32 else TO_TORCH[np.dtype(x.dtype)] for x in inputs)]


_TENSOR = object()
"""Marks a tensor in what a module returned."""


@dataclasses.dataclass(frozen=True, eq=False)
class _BackwardFunction:
    """The backward part, and how JAX's cotangents map to its inputs; equal to others of the same trace."""

    _function: Function
    _roots: tuple[int, ...]
    _dtypes: tuple[Any, ...]
    _found: tuple[bool, ...]

    def __call__(self, saved: Sequence[Any], cotangents: Sequence[Any], words: Any) -> list[Any]:
        """Gradients, None for those that are zero."""
        given = [cotangents[index] for index in self._roots]
        with private_api.x64():
            given = [x.astype(dtype) for x, dtype in zip(given, self._dtypes, strict=True)]
            outputs = iter(evaluate(self._function, [*saved, *given], words))
        return [next(outputs) if found else None for found in self._found]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BackwardFunction) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> Any:
        function = self._function
        streams = function.streams - function.streams[0]
        numbers = function.floats.tobytes(), function.ints.tobytes(), streams.tobytes()
        constants = tuple(map(id, function.constants))
        return id(function.program), function.arguments, constants, numbers, self._roots, self._dtypes, self._found


def _run(
    function: Function, values: Sequence[Any], words: Any, dtypes: Sequence[torch.dtype], whole: bool = False
) -> list[Any]:
    if function.draws and words is None:
        raise TypeError("the module draws random numbers; pass a key, fn(params, ..., rng=key), or call module.eval()")
    with private_api.x64():
        wide = [x.astype(TO_NUMPY[dtype]) for x, dtype in zip(values, dtypes, strict=True)]
        outs = evaluate(function, wide, words)
    return outs if whole else _narrow(outs)


def _narrow(values: Sequence[Any]) -> list[Any]:
    """Values in the dtypes that JAX's 64-bit setting allows."""
    return [x.astype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in values]


def _array(tensor: torch.Tensor) -> jax.Array:
    return to_jax(tensor if is_lazy(tensor) else tensor.detach().to(device()))


def _as_dicts(value: Any) -> Any:
    """`value` with mappings that JAX does not know, such as the outputs of transformers, as dicts."""
    if isinstance(value, Mapping):
        return {name: _as_dicts(item) for name, item in value.items()}
    return value


def _require_names(kind: str, given: Mapping[str, Any], names: list[str]) -> None:
    if set(given) != set(names):
        missing, extra = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise TypeError(
            f"the {kind} of a torch module: expected an array for each of its names; "
            f"missing {missing or 'none'}, not known {extra or 'none'}"
        )

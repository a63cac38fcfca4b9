"""Attention by cuDNN on NVIDIA GPUs, through the private module behind `jax.nn.dot_product_attention`.

The public function, with ``implementation="cudnn"`` and ``return_residual=True``, rounds the logarithm of the sums to
the dtype of the query, where torch's is float32 and later passes start from it.  It also asks cuDNN for the gradient of
each mask, and cannot be traced for a GPU that is absent.

cuDNN never writes the score matrix.  Its dropout takes a seed that is a constant of the program, the same in each step,
so a call with dropout is computed by another form.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention import blocked
from xla_amp.lowering.attention.attention_call import Attention, AttentionForm
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize

_TOKEN_MAJOR: Final = (0, 2, 1, 3)
_MAX_FEATURES: Final = 128
"""Of a GPU of compute capability 8; from 9 on it would be 256."""
_QUERIES: Final = {
    "check_cudnn_version": lambda: 91400,
    "check_compute_capability": lambda wanted: float(wanted) <= 8,
    "is_cuda_compute_capability_equal": lambda wanted: False,
}
"""What JAX asks of the machine's GPU while it traces, with the answers for a program that is compiled without one."""
_NO_GRADIENT: Final = {"should_export_dbias": lambda *_: False}
"""JAX 0.10 asks cuDNN for the gradient of each mask; few versions of cuDNN have it for more than a batch of one."""


def supports(call: Attention) -> str | None:
    """Why cuDNN cannot compute this call: dtype, dropout, features not in eights, a mask of another form."""
    features = call.query.shape[-1]
    if in_the_way := call.objection_to_kernels((np.float16, jnp.bfloat16)):
        return in_the_way
    if call.value.shape[-1] != features:
        return "the result has other features than the query"
    if features % 8 or features > _MAX_FEATURES:
        return f"features must be a multiple of 8, at most {_MAX_FEATURES}"
    if not _is_available():
        return "this JAX or this GPU lacks cuDNN's attention"
    if call.bias is None:
        return None
    if call.bias.ndim != 4 or any(extent % 2 for extent in call.shape[2:]):
        return "a mask or bias must have four dimensions, rows and columns be even"
    return None if _is_mask(call) or _skips_gradient() else "this JAX would compute the bias's gradient, too"


def forward(call: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    with traced():
        output, logsumexp = _forward(*_operands(call), causal=call.causal, scale=float(call.scale))
    return _visible(call, output), logsumexp


def backward(
    call: Attention, grad: Operand, output: Operand, logsumexp: Operand, needs_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and, with `needs_bias`, bias."""
    if needs_bias:
        return blocked.backward(call, grad, output, logsumexp, needs_bias)
    given = _visible(call, materialize(grad))
    with traced():
        dquery, dkey, dvalue = _backward(
            *_operands(call), as_dtype(given, call.dtype), causal=call.causal, scale=float(call.scale)
        )
    return dquery, dkey, dvalue, None


# `jit` lets the layers of a model share one trace.
@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    library = _module()
    masks = library.MaskType
    output, logsumexp = library.dot_product_attention(
        *(jnp.transpose(x, _TOKEN_MAJOR) for x in (query, key, value)),
        **{} if bias is None else {"mask" if bias.dtype == jnp.bool_ else "bias": bias},
        scale=scale,
        mask_type=masks.CAUSAL if causal else masks.NO_MASK,
        return_residual=True,
    )
    return jnp.transpose(output, _TOKEN_MAJOR), logsumexp


@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    grad: jax.Array,
    causal: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # The forward pass that this repeats is the same operation as in `_forward`: XLA keeps one of them.
    _, pullback = jax.vjp(lambda *operands: _forward(*operands, bias, causal, scale), query, key, value)
    gradients: tuple[jax.Array, jax.Array, jax.Array] = pullback((grad, jnp.zeros(query.shape[:3], jnp.float32)))
    return gradients


def _operands(call: Attention) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    query, key, value = (materialize(x) for x in (call.query, call.key, call.value))
    bias = call.bias
    if bias is not None:
        if not _is_mask(call):  # cuDNN subtracts two such numbers
            lowest = -(2.0**41) if call.dtype == jnp.bfloat16 else -(2.0**15)
            bias = jnp.maximum(as_dtype(bias, call.dtype), np.asarray(lowest, call.dtype))
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], *call.shape[2:]))
    return query, key, value, bias


def _is_mask(call: Attention) -> bool:
    return call.bias is not None and call.bias.dtype == jnp.bool_


def _visible(call: Attention, rows: jax.Array) -> jax.Array:
    """`rows`, zero where the mask hides all columns; cuDNN would give them equal weights."""
    if call.bias is None:
        return rows
    seen = call.bias if _is_mask(call) else call.bias > -jnp.inf
    if call.causal:
        seen = jnp.logical_and(seen, jnp.tri(*call.shape[2:], dtype=bool))
    return jnp.where(jnp.any(seen, -1, keepdims=True), rows, jnp.zeros((), rows.dtype))


@functools.cache
def _module() -> Any:
    """JAX's module; None if this JAX asks for the GPU in another way."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo if all(hasattr(fused_attention_stablehlo, name) for name in _QUERIES) else None


def _skips_gradient() -> bool:
    return hasattr(_module(), *_NO_GRADIENT)


def _is_available() -> bool:
    """Whether this machine's GPU has cuDNN's attention; a program for an absent GPU is taken to run where it has."""
    module = _module()
    if module is None:
        return False
    if jax.default_backend() != "gpu":
        return True
    return getattr(module, "cuda_versions", None) is not None and module.check_compute_capability("8.0")


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Traces with 32-bit indices, without the mask's gradient, and answers JAX's questions about an absent GPU."""
    module, answers = _module(), {} if jax.default_backend() == "gpu" else dict(_QUERIES)
    answers |= _NO_GRADIENT if _skips_gradient() else {}
    before = {name: getattr(module, name) for name in answers}
    with jax.enable_x64(False):
        vars(module).update(answers)
        try:
            yield
        finally:
            vars(module).update(before)


FORM: Final = AttentionForm(
    name="cudnn",
    why="never writes the score matrix: 16 x 1024 tokens with 12 heads of 64 peak at a third of blocks' memory",
    platforms=("gpu",),
    marks=("cudnn", "fmha"),
    min_columns=256,
    supports=supports,
    forward=forward,
    backward=backward,
)

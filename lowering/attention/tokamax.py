"""Attention by tokamax's Mosaic kernels on NVIDIA GPUs of compute capability 9.0 (H100, H200), where it is installed.

The public function gives no logarithm of the sum of exponentials, so its implementation is called.  The backward pass
takes each row's maximum and sum: torch's logarithm as the maximum, with a sum of one, is equivalent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.lowering.attention.attention_call import Attention, AttentionForm, answering
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import as_dtype, materialize

_TOKEN_MAJOR: Final = (0, 2, 1, 3)
_COMPUTE: Final = (9, 0)
_TILE: Final = 128
"""Rows of two blocks, and columns of one, the largest that the kernels use."""
_FEATURES: Final = (64, 128)
"""Others are padded, and take more memory than another form."""


def supports(call: Attention) -> str | None:
    """Why the kernels cannot compute this call: another GPU, dtype, dropout, a mask, parts of tiles."""
    if call.compute != _COMPUTE:
        return "for GPUs of compute capability 9.0" if call.compute else "which GPU it is for is not known"
    if in_the_way := call.objection_to_kernels((np.float16, jnp.bfloat16)):
        return in_the_way
    if call.bias is not None:
        return "it has a mask or bias"
    if any(extent % _TILE for extent in call.shape[2:]):
        return f"rows and columns must be multiples of {_TILE}"
    if call.query.shape[-1] not in _FEATURES or call.value.shape[-1] != call.query.shape[-1]:
        return f"features must be {' or '.join(map(str, _FEATURES))}, in the result, too"
    return None if _library() else "tokamax is not installed, or lacks the kernels"


def cost(call: Attention) -> int:
    """Bytes of temporary memory: maximum, sum and gradient sum of each row."""
    return 3 * call.row_statistics


def forward(call: Attention) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp)."""
    with _traced(call):
        result: tuple[jax.Array, jax.Array] = _forward(
            *_operands(call), causal=call.causal, scale=float(call.scale), compute=call.compute
        )
        return result


def backward(
    call: Attention, grad: Operand, output: Operand, logsumexp: Operand, needs_bias: bool
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of query, key and value."""
    with _traced(call):
        results = [as_dtype(materialize(x), call.dtype) for x in (output, grad)]
        sums = as_dtype(materialize(logsumexp), np.float32)
        gradients = _backward(
            *_operands(call), *results, sums, causal=call.causal, scale=float(call.scale), compute=call.compute
        )
        return (*gradients, None)


# `jit` lets the layers of a model share one trace.
@functools.partial(jax.jit, static_argnames=("causal", "scale", "compute"))
def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, scale: float, compute: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    library, attend = _library(), _library().PallasMosaicGpuFlashAttention()
    operands = [jnp.transpose(x, _TOKEN_MAJOR) for x in (query, key, value)]
    bound = attend.bind(*operands, mask=library.Mask(is_causal=causal), logits_scale=scale, return_residuals=True)
    output, (maximum, total) = _called(attend, bound)
    return jnp.transpose(output, _TOKEN_MAJOR), maximum + jnp.log(total)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "compute"))
def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    grad: jax.Array,
    logsumexp: jax.Array,
    causal: bool,
    scale: float,
    compute: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    library, attend = _library(), _library().PallasMosaicGpuFlashAttention()
    query, key, value, output, grad = (jnp.transpose(x, _TOKEN_MAJOR) for x in (query, key, value, output, grad))
    forward = attend.bind(query, key, value, mask=library.Mask(is_causal=causal), logits_scale=scale)
    residuals = logsumexp, jnp.ones_like(logsumexp)
    bound = attend.vjp.bind(residuals, output, grad, *forward.args, **forward.kwargs)
    gradients = _called(attend.vjp, bound)
    dquery, dkey, dvalue = (jnp.transpose(gradients[name], _TOKEN_MAJOR) for name in "qkv")
    return dquery, dkey, dvalue


def _called(operation: Any, bound: Any) -> Any:
    """`operation` with the tile sizes that tokamax prefers without a measurement: the same on all machines."""
    return operation.replace(config=bound.heuristics_config)(*bound.args, **bound.kwargs)


def _operands(call: Attention) -> list[jax.Array]:
    return [materialize(x) for x in (call.query, call.key, call.value)]


@functools.cache
def _library() -> Any:
    """tokamax's module; None where it is not installed, or asks for the GPU in another way."""
    try:
        library = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu")
    except ImportError:
        return None
    known = hasattr(library.gpu_utils, "_compute_capability") and hasattr(library.gpu_utils, "config_lib")
    return library if known and hasattr(library, "PallasMosaicGpuFlashAttention") else None


@contextlib.contextmanager
def _traced(call: Attention) -> Iterator[None]:
    """Traces with 32-bit indices, for the GPU of the call, which this machine need not have."""
    utilities, (major, minor) = _library().gpu_utils, call.compute or (0, 0)
    flags = utilities.config_lib.flags.FLAGS
    if not flags.is_parsed():  # tokamax would read the arguments of the user's program
        flags(sys.argv[:1] or [""])
    with (
        jax.enable_x64(False),
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),  # tokamax calls what JAX deprecates
        utilities.config_lib.cross_compile(True),
        answering(utilities, {"_compute_capability": lambda *_: major + minor / 10}),
    ):
        yield


FORM: Final = AttentionForm(
    name="tokamax",
    why="never writes the score matrix; JAX recommends it instead of its own kernel for GPUs",
    platforms=("gpu",),
    marks=("mosaic",),
    min_columns=256,
    supports=supports,
    forward=forward,
    backward=backward,
    cost=cost,
)

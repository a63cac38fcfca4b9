"""Scaled dot product attention as one operation, forward and backward, in the fastest form for its platform.

`FORMS` is the table of forms; docs/lowering.md has the measurements.  Forward and backward choose the form by the same
properties of the call, so both draw the same dropout mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import jax
import numpy as np

from xla_amp.lowering import kernels
from xla_amp.lowering.attention import blocked, cudnn, flash, full_matrix, splash
from xla_amp.lowering.attention.attention_call import Attention
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import Permuted, as_dtype, materialize, opmath
from xla_amp.lowering.registry import register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One way to compute attention."""

    name: str
    applies: Callable[[Attention], bool]
    forward: Callable[[Attention], tuple[jax.Array, jax.Array]]
    backward: Callable[
        [Attention, Operand, Operand, Operand, bool], tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
    ]
    reason: str
    min_columns: int = 0
    """Not used for fewer columns: on a TPU small score matrices stay on chip."""


_LARGE: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"cpu": (1024, 1 << 24), "gpu": (1024, 1 << 30), "tpu": (1024, 1 << 30)}
)
"""Platform -> rows, and bytes of the score matrix in the opmath dtype, from which the rows are divided into blocks.

CPU: beyond both limits blocks are also faster.  GPU and TPU: the limit of memory for one score matrix.
"""


def _is_large(call: Attention) -> bool:
    batch, heads, rows, columns = call.shape
    min_rows, min_bytes = _LARGE[call.platform]
    return rows >= min_rows and batch * heads * rows * columns * opmath(call.dtype).itemsize >= min_bytes


FORMS: Final = (
    Form(
        name="splash",
        applies=splash.supports,
        min_columns=512,
        forward=splash.forward,
        backward=splash.backward,
        reason="on a TPU the score matrices are most of the memory traffic of a long sequence",
    ),
    Form(
        name="flash",
        applies=flash.supports,
        min_columns=1024,
        forward=flash.forward,
        backward=flash.backward,
        reason="as splash, where a scaled query would be rounded; it keeps 128 copies of each row's statistics",
    ),
    Form(
        name="cudnn",
        applies=cudnn.supports,
        min_columns=256,
        forward=cudnn.forward,
        backward=cudnn.backward,
        reason="never writes the score matrix: 16 x 1024 tokens with 12 heads of 64 peak at a third of blocks' memory",
    ),
    Form(
        name="blocked",
        applies=_is_large,
        forward=blocked.forward,
        backward=blocked.backward,
        reason="memory linear in the length, where score matrices exceed the caches (CPU) or take GiB (GPU, TPU)",
    ),
    Form(
        name="full matrix",
        applies=lambda call: True,
        forward=full_matrix.forward,
        backward=full_matrix.backward,
        reason="fewest operations, and a program with both passes computes the weights once",
    ),
)
"""The first form that applies is used."""


def form_of(call: Attention) -> Form:
    """The form in which a call is computed."""
    columns = call.shape[3]
    usable = (form for form in FORMS if columns >= form.min_columns and form.name not in kernels.refused)
    form = next(form for form in usable if form.applies(call))
    kernels.traced(form.name)
    return form


@register("_scaled_dot_product_fused_attention_overrideable", takes=(Permuted,))
def attention(
    query: Operand,
    key: Operand,
    value: Operand,
    bias: Operand | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    rng: jax.Array | None = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """(output, logsumexp, four unused results, the PRNG key as int64[2] if `dropout` > 0, two unused results)."""
    call = Attention(
        query=query,
        key=key,
        value=value,
        bias=None if bias is None else materialize(bias),
        dropout=dropout,
        causal=causal,
        given_scale=scale,
        rng=rng if dropout > 0 else None,
        platform=platform,
        partitioned=partitioned,
    )
    output, logsumexp = form_of(call).forward(call)
    seed = as_dtype(jax.random.key_data(call.rng), np.int64) if call.rng is not None else None
    return output, logsumexp, None, None, None, None, seed, None, None


@register("_scaled_dot_product_fused_attention_overrideable_backward", takes=(Permuted,))
def attention_backward(
    grad: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    bias: Operand | None,
    wanted: list[bool],
    output: Operand,
    logsumexp: Operand,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    seed: Operand | None,
    offset: None,
    *,
    scale: float | None = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Gradients of query, key, value and bias, each None unless `wanted`."""
    rng = None
    if dropout > 0 and seed is not None:
        rng = jax.random.wrap_key_data(as_dtype(materialize(seed), np.uint32), impl="threefry2x32")
    call = Attention(
        query=query,
        key=key,
        value=value,
        bias=None if bias is None else materialize(bias),
        dropout=dropout,
        causal=causal,
        given_scale=scale,
        rng=rng,
        platform=platform,
        partitioned=partitioned,
    )
    gradients = form_of(call).backward(call, grad, output, logsumexp, wanted[3])
    return tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))

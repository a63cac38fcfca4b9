"""Scaled dot product attention as one operation, forward and backward, in the form that a platform runs best.

`FORMS` is the table of forms; docs/lowering.md has the figures behind it.  Forward and backward choose by the same
facts, so that a call's dropped weights are drawn the same way in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import jax
import numpy as np

from xla_amp.lowering.attention import blocked, flash, splash, square
from xla_amp.lowering.attention.common import Attention
from xla_amp.lowering.linalg.contraction import Operand
from xla_amp.lowering.operand import Permuted, as_dtype, materialize, opmath
from xla_amp.lowering.registry import register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One way to compute attention."""

    name: str
    suits: Callable[[Attention], bool]
    forward: Callable[[Attention], tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array | None, ...]]
    why: str
    least_columns: int = 0
    """With fewer it is not used: on a TPU small square matrices stay on chip."""


_LARGE: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"cpu": (1024, 1 << 24), "gpu": (1024, 1 << 30), "tpu": (1024, 1 << 30)}
)
"""Platform -> rows, and bytes of one square matrix in opmath, from both of which on rows are taken in blocks.

CPU: from there on it is faster, too.  GPU and TPU: what a square matrix may take of their memory.
"""


def _is_large(of: Attention) -> bool:
    batch, heads, rows, columns = of.shape
    least_rows, least_bytes = _LARGE[of.platform]
    return rows >= least_rows and batch * heads * rows * columns * opmath(of.dtype).itemsize >= least_bytes


FORMS: Final = (
    Form(
        name="splash",
        suits=splash.suits,
        least_columns=512,
        forward=splash.forward,
        backward=splash.backward,
        why="on a TPU the square matrices are most of what a long sequence moves",
    ),
    Form(
        name="flash",
        suits=flash.suits,
        least_columns=1024,
        forward=flash.forward,
        backward=flash.backward,
        why="the same where a scaled query would have to be rounded; it keeps each row's figures 128 times",
    ),
    Form(
        name="blocked",
        suits=_is_large,
        forward=blocked.forward,
        backward=blocked.backward,
        why="memory linear in the length, where square matrices outgrow the caches (CPU) or take GiB (GPU, TPU)",
    ),
    Form(
        name="square",
        suits=lambda of: True,
        forward=square.forward,
        backward=square.backward,
        why="fewest operations, and a program of both passes computes the weights once",
    ),
)
"""The first that suits is used."""


def form_of(of: Attention) -> Form:
    """The form in which a call is computed."""
    return next(form for form in FORMS if of.shape[3] >= form.least_columns and form.suits(of))


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
    rng: Any = None,
    platform: str,
    partitioned: bool = False,
) -> tuple[jax.Array | None, ...]:
    """(output, logsumexp, four of no use here, the random key as int64[2] when `dropout` is used, two of no use)."""
    of = Attention(
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
    output, logsumexp = form_of(of).forward(of)
    seed = as_dtype(jax.random.key_data(rng), np.int64) if dropout > 0 else None
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
    """Gradients of query, key, value and bias."""
    rng = None
    if dropout > 0 and seed is not None:
        rng = jax.random.wrap_key_data(as_dtype(materialize(seed), np.uint32), impl="threefry2x32")
    of = Attention(
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
    gradients = form_of(of).backward(of, grad, output, logsumexp, wanted[3])
    return tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))

"""Lowerings: what each ATen operation computes, as pure JAX functions in families.

This folder imports JAX, but neither torch nor any other module of the package except `xla_amp.common.loss_scaling` and
`xla_amp.master_weights`.
"""

# ruff: noqa: F401 (importing a family registers its lowerings)

from xla_amp.lowering.attention import fused_layers, sdpa
from xla_amp.lowering.linalg import contraction, factorization, float8, grouped
from xla_amp.lowering.math import (
    bits,
    complex_numbers,
    counting,
    distance,
    elementwise,
    foreach,
    fourier,
    reduction,
    segments,
    special,
)
from xla_amp.lowering.nn import (
    activation,
    convolution,
    ctc,
    detection,
    embedding_bag,
    fractional_pooling,
    loss,
    normalization,
    padding,
    pooling,
    quantization,
    recurrent,
    resampling,
)
from xla_amp.lowering.operand import OneHot, Permuted
from xla_amp.lowering.registry import SUPPLIES, Lowering, find, register, table
from xla_amp.lowering.tensor import factory, indexing, random_numbers, shape
from xla_amp.lowering.training import amp, master_weights, optim

__all__ = ["SUPPLIES", "Lowering", "OneHot", "Permuted", "find", "register", "table"]

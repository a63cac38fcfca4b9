"""Lowerings: what each ATen operation computes, as pure JAX functions in families.

This folder is a leaf: it imports JAX and nothing of torch or of the rest of the package.
"""

from xla_amp.lowering import (  # noqa: F401  (importing a family fills the table)
    activation,
    amp,
    attention,
    attention_layers,
    bits,
    complex_numbers,
    contraction,
    convolution,
    counting,
    ctc,
    distance,
    elementwise,
    factory,
    foreach,
    fourier,
    fractional_pooling,
    grouped,
    indexing,
    linalg,
    loss,
    normalization,
    optim,
    pooling,
    quantization,
    random_numbers,
    recurrent,
    reduction,
    segments,
    shape,
    special,
)
from xla_amp.lowering.operand import OneHot, Permuted
from xla_amp.lowering.registry import SUPPLIES, Lowering, find, register, table

__all__ = ["SUPPLIES", "Lowering", "OneHot", "Permuted", "find", "register", "table"]

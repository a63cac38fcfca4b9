"""The families of lowerings: importing this module registers all of them."""

# ruff: noqa: F401 (importing a family registers its lowerings)

from xla_amp.lowering.attention import fused_layers, sdpa
from xla_amp.lowering.linalg import contraction, factorization, grouped
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
from xla_amp.lowering.tensor import factory, indexing, random_numbers, shape
from xla_amp.lowering.training import amp, optim

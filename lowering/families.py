"""The families of lowerings: importing this module registers all of them."""

# ruff: noqa: F401 (importing a family registers its lowerings)

from xla_amp.lowering.attention import sdpa
from xla_amp.lowering.linalg import contraction, factorization
from xla_amp.lowering.math import arithmetic, elementwise, foreach, fourier, ordering, reduction
from xla_amp.lowering.nn import (
    activation,
    convolution,
    embedding_bag,
    loss,
    normalization,
    pooling,
    recurrent,
    resampling,
)
from xla_amp.lowering.tensor import factory, random_numbers, scattering, shape
from xla_amp.lowering.training import optim, quantization

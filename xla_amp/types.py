"""The words of the library, each with one meaning.

A *policy* is a layered set of *rules*; a rule gives operations a *cast*; a *decision* is the rule that won for one
operation, with the *layer* that it came from.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Cast: TypeAlias = Literal["low", "fp32", "fp32_out", "fp32_append", "promote", "keep", "ban"]
"""What happens to an operation's eligible operands (floating, not float64, on the region's device):

``low``          cast to the region's low dtype
``fp32``         cast to float32
``fp32_out``     operands stay; the optional ``dtype`` argument becomes float32 unless the caller gave one
                 (torch: ``fp32_set_opt_dtype``)
``fp32_append``  operands stay; the call is redirected to the overload that takes ``dtype``, with float32
                 (torch: ``fp32_append_dtype``)
``promote``      cast to the widest dtype among them
``keep``         untouched: the operation runs in the dtypes that it was given
``ban``          an error that says what to use instead
"""

CASTS: Final[tuple[Cast, ...]] = get_args(Cast)

Layer: TypeAlias = Literal["builtin", "file", "environment", "override", "context"]
"""Where a rule was written; a later layer wins over an earlier one."""

LAYERS: Final[tuple[Layer, ...]] = get_args(Layer)

OperationClass: TypeAlias = Literal[
    "contraction",
    "convolution",
    "recurrent",
    "reduction",
    "transcendental",
    "normalization",
    "loss",
    "activation",
    "elementwise",
    "comparison",
    "pooling",
    "interpolation",
    "linear_algebra",
    "fourier",
    "indexing",
    "sorting",
    "data_movement",
    "random",
]
"""What kind of arithmetic an operation is; says why one cast suits it, and lets a front that sees another
vocabulary (jaxpr primitives, StableHLO) treat what it cannot name."""

OPERATION_CLASSES: Final[tuple[OperationClass, ...]] = get_args(OperationClass)

LowDtype: TypeAlias = Literal["bfloat16", "float16"]
"""A dtype that ``low`` can mean."""

LOW_DTYPES: Final[tuple[LowDtype, ...]] = get_args(LowDtype)

Dtype: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]
"""Names of floating dtypes wherever no framework may be imported."""

DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)

Platform: TypeAlias = Literal["cpu", "gpu", "tpu"]
"""XLA platforms."""

PLATFORMS: Final[tuple[Platform, ...]] = get_args(Platform)

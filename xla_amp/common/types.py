"""Shared type names: casts, layers, operation classes, dtypes and their ranges, platforms.

A *policy* is a layered set of *rules*; a rule gives operations a *cast*; a *decision* is the winning rule for one
operation, with the *layer* that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

Cast: TypeAlias = Literal[
    "low",
    "fp32",
    "fp32_inside",
    "low_fp32_out",
    "fp32_out",
    "fp32_append",
    "promote",
    "keep",
    "ban",
]
"""What happens to an operation's eligible operands (floating, not float64, on the region's device):

``low``          cast to the region's low dtype
``fp32``         cast to float32
``fp32_inside``  computed in float32; the result has the dtype of the first operand
``low_fp32_out`` operands are cast to the low dtype, products are summed in float32, and the result is float32
``fp32_out``     operands stay; the optional ``dtype`` argument becomes float32 unless the caller gave one
                 (torch: ``fp32_set_opt_dtype``)
``fp32_append``  operands stay; the call is redirected to the overload that takes ``dtype``, with float32
                 (torch: ``fp32_append_dtype``)
``promote``      cast to the widest dtype among them
``keep``         no cast: the operation runs in the dtypes of its operands
``ban``          an error that names the replacement
"""

CASTS: Final[tuple[Cast, ...]] = get_args(Cast)

Layer: TypeAlias = Literal["builtin", "file", "environment", "override", "context"]
"""Where a rule is written; a later layer wins over an earlier one."""

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
"""Kind of arithmetic of an operation.  It explains the cast, and lets a front with another vocabulary (jaxpr
primitives, StableHLO) handle operations without an ATen name."""

OPERATION_CLASSES: Final[tuple[OperationClass, ...]] = get_args(OperationClass)

LowDtype: TypeAlias = Literal["bfloat16", "float16"]
"""Possible low dtypes."""

LOW_DTYPES: Final[tuple[LowDtype, ...]] = get_args(LowDtype)


class Range(NamedTuple):
    """Range of a dtype's magnitudes."""

    largest: float
    """Largest finite value."""
    zero: float
    """Largest magnitude that rounds to zero: half of the smallest subnormal value (a tie goes to even)."""


_FLOAT32: Final = Range((2 - 2.0**-23) * 2.0**127, 2.0**-150)
_FLOAT64: Final = Range(1.7976931348623157e308, 0.0)  # half of its smallest value is no float64

RANGES: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "float8_e4m3fn": Range(448.0, 2.0**-10),
        "float8_e5m2": Range(57344.0, 2.0**-17),
        "float16": Range(65504.0, 2.0**-25),
        "bfloat16": Range((2 - 2.0**-7) * 2.0**127, 2.0**-134),
        "float32": _FLOAT32,
        "complex64": _FLOAT32,
        "float64": _FLOAT64,
        "complex128": _FLOAT64,
    }
)
"""Name of a dtype -> its range (IEEE 754; OCP 8-bit formats); of complex dtypes that of their parts."""

Platform: TypeAlias = Literal["cpu", "gpu", "tpu"]
"""XLA platforms."""

PLATFORMS: Final[tuple[Platform, ...]] = get_args(Platform)

LAZY: Final = "jax"
"""torch's name of the lazy device's type."""

"""What the program itself says about a contraction: a precision, a dtype, an algorithm.  It wins over the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jax import lax

from xla_amp.jax import compat
from xla_amp.jax.decisions import F32, is_castable

NOTHING_SUMMED: Final = "nothing is summed: a low dtype would round the operands and gain nothing"
"""Why a contraction whose results are single products stays in the dtypes that its operands have."""

_OPEN: Final = (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)
"""Values of ``precision`` with which a program leaves the choice to the backend, hence to the policy."""


def asked_precision(eqn: Any) -> str:
    """Which precision or algorithm a contraction asks for, in words; empty if it asks for none."""
    precision = eqn.params.get("precision")
    for wish in precision if isinstance(precision, tuple) else (precision,):
        if wish not in _OPEN:
            if compat.in_lowering(eqn):  # torch's default precision, which no one asked for
                return ""
            named = isinstance(wish, lax.Precision)
            return f"the program asks for float32: precision {wish.name}" if named else f"the program asks for {wish}"
    return ""


def _is_algorithm(params: Mapping[str, Any]) -> bool:
    return isinstance(params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset)


def request(eqn: Any, low: Any) -> str:
    """Why a contraction runs in the dtypes that it was written with; empty if the program leaves them to the policy.

    Args:
        eqn: its equation.
        low: the low dtype of the region.
    """
    params, dtypes = eqn.params, [atom.aval.dtype for atom in eqn.invars[:2]]
    asked = asked_precision(eqn)
    if asked and not (_is_algorithm(params) and all(dtype == low for dtype in dtypes)):
        return asked  # the low contraction is what algorithms do with operands that are low already
    for dtype in dtypes:
        if not is_castable(dtype):
            return f"an operand is {dtype}: the product would not be faster"
        if dtype not in (F32, low):
            return f"the program asks for {dtype} operands"
    wanted = params.get("preferred_element_type")
    if wanted is not None and wanted not in (F32, low):  # to NumPy, None is equal to float64
        return f"the program asks for a {wanted} result"
    return ""

"""The update of a dynamic loss scale: one formula for every array library.

The loss is multiplied by ``scale`` before the backward pass so that small float16 gradients do not become zero.  After
each step the scale moves: an overflow lowers it, and ``growth_interval`` steps in a row without overflow raise it
(Micikevicius et al. 2018, section 3.2).  The rule and its rounding are those of torch's ``_amp_update_scale_``
(ATen/native/cuda/AmpKernels.cu; the CPU kernel is the same): the product is formed in float64 and rounded once to
float32.  The scale grows on the step that completes the interval, and only if the result is finite, so a scale at the
top of the range stays there (torch_xla's kernel has no such bound).  There is no lower bound: repeated overflows take
the scale to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

LARGEST: Final = 3.4028234663852886e38
"""Largest finite float32: the scale is a float32 whatever the compute dtype is."""

INITIAL: Final = 2.0**16
GROWTH_FACTOR: Final = 2.0
BACKOFF_FACTOR: Final = 0.5
GROWTH_INTERVAL: Final = 2000
"""torch.amp.GradScaler's defaults."""

Where: TypeAlias = Callable[[Any, Any, Any], Any]
"""``where(condition, if_true, if_false)``, elementwise."""

Multiply: TypeAlias = Callable[[Any, Any], Any]
"""``multiply(scale, factor)``: the product formed in float64, rounded once to the dtype of `scale`."""


def update(
    scale: Any,
    growth_tracker: Any,
    found_inf: Any,
    growth_factor: Any,
    backoff_factor: Any,
    growth_interval: Any,
    *,
    where: Where,
    multiply: Multiply,
) -> tuple[Any, Any]:
    """The scale and the growth tracker for the next step.

    For arrays of any library; no value is read back to the host.

    Args:
        scale: float32 array; what the loss of this step was multiplied by.
        growth_tracker: int32 array; steps in a row without overflow so far.
        found_inf: 0 if every gradient was finite, otherwise any other number (torch: a float32 0 or 1).
        growth_factor: multiplies the scale after `growth_interval` steps without overflow; above 1.
        backoff_factor: multiplies it after an overflow; between 0 and 1.
        growth_interval: steps without overflow between two growths.
        where: selection function of the array library.
        multiply: product that is rounded as torch rounds it.

    Returns:
        ``(scale, growth_tracker)``.
    """
    overflow = found_inf != 0
    clean_steps = growth_tracker + 1
    due = clean_steps == growth_interval
    grown = multiply(scale, growth_factor)
    return (
        where(overflow, multiply(scale, backoff_factor), where(due & (abs(grown) <= LARGEST), grown, scale)),
        where(overflow | due, growth_tracker * 0, clean_steps),
    )

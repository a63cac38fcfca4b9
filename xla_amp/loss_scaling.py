"""The loss-scale formula, written once for every front.

A loss is multiplied by ``scale`` before the backward pass so that small float16 gradients do not become zero.  After
each step the scale moves: an overflow lowers it at once, a run of ``growth_interval`` clean steps raises it
(Micikevicius et al. 2018, section 3.2).  The arithmetic is that of torch's ``_amp_update_scale_``
(ATen/native/cuda/AmpKernels.cu): it grows on the step that completes the interval, and only if the grown scale is a
finite float32, so a scale that has reached the top of the range stays there (torch_xla's kernel has no such bound).
Downwards there is no bound: overflows without end take the scale to zero.
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


def update(
    scale: Any,
    growth_tracker: Any,
    found_inf: Any,
    growth_factor: Any = GROWTH_FACTOR,
    backoff_factor: Any = BACKOFF_FACTOR,
    growth_interval: Any = GROWTH_INTERVAL,
    *,
    where: Where | None = None,
) -> tuple[Any, Any]:
    """The scale and the growth tracker for the next step.

    Nothing is read back to the host: with arrays the choice is made by `where`, in the dtypes of `scale` and
    `growth_tracker`.  Factors that float32 cannot hold exactly are rounded by the array library, so they may differ
    from torch in the last place.

    Args:
        scale: float, or 0-d float32 array; what the loss of this step was multiplied by.
        growth_tracker: int, or 0-d int32 array; clean steps in a row so far.
        found_inf: 0 if every gradient was finite, anything else if not (torch: a float32 0 or 1).
        growth_factor: multiplies the scale after `growth_interval` clean steps; above 1.
        backoff_factor: multiplies it after an overflow; between 0 and 1.
        growth_interval: clean steps between two growths.
        where: selection of the array library; by default that of the Python array API, or plain ``if`` for numbers.

    Returns:
        ``(scale, growth_tracker)``.

    Raises:
        TypeError: an array whose library is not known, and no `where`.

    Example:
        >>> update(65536.0, 0, found_inf=1.0)
        (32768.0, 0)
        >>> update(65536.0, 1999, found_inf=0.0)
        (131072.0, 0)
        >>> update(2.0**127, 1999, found_inf=0.0) == (2.0**127, 0)
        True
    """
    choose = where or _where_of(scale, growth_tracker, found_inf)
    overflow = found_inf != 0
    clean_steps = growth_tracker + 1
    due = clean_steps == growth_interval
    grown = scale * growth_factor
    grown = choose(due & (grown <= LARGEST), grown, scale)
    return (
        choose(overflow, scale * backoff_factor, grown),
        choose(overflow | due, growth_tracker * 0, clean_steps),
    )


def _where_of(*values: Any) -> Where:
    arrays = [value for value in values if not isinstance(value, int | float)]
    if not arrays:
        return lambda condition, if_true, if_false: if_true if condition else if_false
    for array in arrays:
        if hasattr(array, "__array_namespace__"):
            where: Where = array.__array_namespace__().where
            return where
    raise TypeError(
        f"scale.update() got {type(arrays[0]).__module__}.{type(arrays[0]).__qualname__}, which names no array "
        "namespace; pass where=, e.g. where=torch.where"
    )

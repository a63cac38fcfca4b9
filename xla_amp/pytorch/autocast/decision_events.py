"""Emit a decision event for an operation that ran in an autocast region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from xla_amp.analysis import costs
from xla_amp.common import events
from xla_amp.common.types import Cast
from xla_amp.policy import Decision, Policy
from xla_amp.pytorch.autocast import casting


def telling(
    point: events.Point[[events.DecisionRecord], None],
    decision: Decision,
    rules: Policy,
    given: Sequence[torch.Tensor],
    used: Sequence[str],
    module: str | None,
) -> Callable[[Any], Any]:
    """Notes the operands of one operation before it runs.

    Returns:
        A function of the operation's result, which sends the event to the listeners of `point` and returns the result.
    """
    before, shapes = dtypes(given), shapes_of(given)

    def tell(result: Any) -> Any:
        results = [
            x for x in (result if isinstance(result, list | tuple) else (result,)) if isinstance(x, torch.Tensor)
        ]
        result_shapes = shapes_of(results)
        point(
            events.DecisionRecord(
                **decision.recorded(),
                operation=decision.operation,
                policy=rules.name,
                front="pytorch",
                given=before,
                used=tuple(used),
                why=decision.rule.why if decision.rule else "",
                result=dtypes(results),
                location=events.user_location(),
                module=module or "",
                shapes=shapes,
                result_shapes=result_shapes,
                flops=costs.flops(decision.operation, shapes, result_shapes),
            )
        )
        return result

    return tell


def dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """dtypes by name, ``"bfloat16"``."""
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def shapes_of(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Shapes; a size that is a symbol is -1, and a nested tensor has none."""
    return tuple(
        () if tensor.is_nested else tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
        for tensor in tensors
    )


def after(cast: Cast, tensors: Sequence[torch.Tensor], device_type: str) -> tuple[str, ...]:
    """dtypes of `tensors` after `cast`, for torch's kernels, which do not report them."""
    if cast == "ban":
        return dtypes(tensors)
    eligible = [t.dtype in casting.ELIGIBLE and t.device.type == device_type for t in tensors]
    given = tuple(t.dtype if e else None for t, e in zip(tensors, eligible, strict=True))
    used = casting.dtypes_after(cast, given, device_type).operands
    names = (t.dtype if u is None else u for t, u in zip(tensors, used, strict=True))
    return tuple(str(name).removeprefix("torch.") for name in names)

"""Check lowerings of operations that only write their arguments (``_foreach_add_``, ``_fused_adam_``)."""

from __future__ import annotations

from typing import Any

import torch
from harness import Call, compare, widened


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def written_by_torch(name: str, *args: Any, wide: bool = False, **kwargs: Any) -> list[torch.Tensor]:
    """The values that torch's CPU kernel writes to the arguments in the lowering's `mutates`."""
    call = Call(name, args, kwargs)
    given = {key: call.values[key] for key in call.given}
    if wide:  # the lists; flags and scales stay float32, as the kernels require
        given = {key: widened(value) if isinstance(value, list) else value for key, value in given.items()}
    values = {key: _copied(value) for key, value in given.items()}
    keywords = {a.name for a in call.schema.arguments if a.kwarg_only}
    positional = [values[a.name] for a in call.schema.arguments if a.name in call.given and not a.kwarg_only]
    call.operator(*positional, **{key: value for key, value in values.items() if key in keywords})
    written: list[torch.Tensor] = []
    for key in call.lowering.mutates:
        value = values.get(key)
        written.extend(value if isinstance(value, list) else [] if value is None else [value])
    return written


def written_by_lowering(name: str, *args: Any, like: list[torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
    """The values that the lowering writes to the same arguments; `like` has their shapes and dtypes."""
    results = Call(name, args, kwargs).lowered(like)
    return [result for result in results if result is not None]


def check_written(
    name: str, *args: Any, rtol: float | None = None, atol: float | None = None, wide: bool = False, **kwargs: Any
) -> None:
    """Asserts that the lowering writes what torch writes; with `wide`, what torch writes in float64."""
    promised = written_by_torch(name, *args, **kwargs)
    expected = written_by_torch(name, *args, wide=True, **kwargs) if wide else promised
    actual = written_by_lowering(name, *args, like=promised, **kwargs)
    for index, (got, want, like) in enumerate(zip(actual, expected, promised, strict=True)):
        compare(got, want.to(like.dtype), rtol=rtol, atol=atol, where=f"{name}, written tensor {index}")

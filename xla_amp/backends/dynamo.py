"""Python functions that Dynamo, the tracer of `torch.compile`, must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP = eval_frame._FrameAction.SKIP
_WITH_CALLS = eval_frame._FrameExecStrategy(_SKIP, _SKIP)


def skip(function: _Function) -> _Function:
    """Marks a function that torch or a user's program calls: neither it nor what it calls is compiled.

    Dynamo looks at each Python function that runs beside a compiled graph, as the kernels of a device do.  A function
    that Dynamo reads as a part of another one is not affected.  Imports nothing of Dynamo, which takes a second.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        eval_frame.set_code_exec_strategy(code, _WITH_CALLS)
    return function


def constant(function: _Function) -> _Function:
    """Marks a function that Dynamo calls while it reads another, as ``torch.compiler.assume_constant_result`` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

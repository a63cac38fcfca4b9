"""Python functions that Dynamo, the tracer of `torch.compile`, must not trace.

Nothing here imports Dynamo, which takes a second; the public decorators do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP = eval_frame._FrameAction.SKIP
_WITH_CALLS = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_METHODS = ("__init__", "__enter__", "__exit__", "__call__")


def skip(function: _Function) -> _Function:
    """Marks a function that torch or a user's program calls: neither it nor what it calls is compiled.

    Dynamo looks at each Python function that runs beside a compiled graph, as the kernels of a device do.  A function
    that Dynamo reads as a part of another one is not affected.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        eval_frame.set_code_exec_strategy(code, _WITH_CALLS)
    return function


def graph_break(entry: _Function) -> _Function:
    """Marks a function or a class whose calls depend on Python state: a compiled graph ends there, and Python runs it.

    As ``torch.compiler.disable`` does; of a class the construction, the call and the use as a context manager.
    """
    methods = [vars(entry)[name] for name in _METHODS if name in vars(entry)] if isinstance(entry, type) else [entry]
    function: Any
    for function in methods:
        skip(inspect.unwrap(function))
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = "Python runs this function of xla_amp; leave out fullgraph=True"
    return entry

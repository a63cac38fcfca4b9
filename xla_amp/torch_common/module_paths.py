"""Path of the running module, as ``named_modules`` of the outermost running module gives it.

Known only after `acquire`, until its end: a region with rules for modules and `xla_amp.explain` call it.  Two global
hooks then follow every ``Module.__call__``; otherwise no hook is installed.  A module that
`torch.utils.checkpoint` runs again in the backward pass has the path of its forward pass.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from xla_amp.policy.module_patterns import joined
from xla_amp.torch_common import dynamo


def backward_pass() -> int:
    """torch's number of the backward pass that this thread runs, or -1."""
    number: int = torch._C._current_graph_task_id()
    return number


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return backward_pass() != -1


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[torch.nn.Module, str]] = []
        """Running modules of this thread with their paths, innermost last."""
        self.names: dict[int, str] = {}
        """Path of each module of the outermost running module, by ``id``."""


_thread = _Thread()
_lock = threading.Lock()
_holders = 0
_handles: list[Any] = []
_seen: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
"""Path of each module in the model that it last ran in.  A recomputed part runs without the model around it."""


def current() -> str | None:
    """Path of the innermost running module of this thread: ``""`` for the model itself, None outside modules.

    Meaningful after `acquire` only.
    """
    stack = _thread.stack
    return stack[-1][1] if stack else None


def acquire() -> Callable[[], None]:
    """Follows modules until what this returns is called.  Also finds the modules that this thread runs already."""
    global _holders
    with _lock:
        _holders += 1
        if _holders == 1:
            _handles.append(torch_module.register_module_forward_pre_hook(_enter))
            _handles.append(torch_module.register_module_forward_hook(_leave, always_call=True))
    found = running()
    stack = _thread.stack
    if len(found) == len(stack) and all(a is b for a, (b, _) in zip(found, stack, strict=True)):
        return _release
    # The hooks were installed after these modules started, or a BaseException skipped the forward hook.
    _thread.stack = stack = []
    for module in found:
        _enter(module, ())
    return functools.partial(_release, stack)


def _release(rebuilt: list[tuple[torch.nn.Module, str]] | None = None) -> None:
    """Ends one `acquire`; `rebuilt`: the stack, if that made it from Python frames."""
    global _holders
    if rebuilt is not None and rebuilt is _thread.stack:
        _thread.stack = []
    with _lock:
        _holders -= 1
        if _holders == 0:
            for handle in _handles:
                handle.remove()
            _handles.clear()


def _enter(module: torch.nn.Module, _args: Any) -> None:
    stack = _thread.stack
    stack.append((module, _path(module, stack[-1][1]) if stack else _outermost(module)))


def _leave(module: torch.nn.Module, _args: Any, _result: Any) -> None:
    stack = _thread.stack
    for index in range(len(stack) - 1, -1, -1):
        if stack[index][0] is module:
            del stack[index:]
            return


for _hook in (_enter, _leave):
    dynamo.graph_break(_hook)  # a compiled graph has no modules


def _path(module: torch.nn.Module, parent: str) -> str:
    found = _thread.names.get(id(module))
    if found is None:  # not registered in the model: made while it runs, or reached through a closure
        found = joined(parent, type(module).__name__)
    return found


def _outermost(module: torch.nn.Module) -> str:
    recomputed = in_backward()
    top = _seen.get(module, "") if recomputed else ""
    _thread.names = {id(part): joined(top, name) for name, part in _named(module)}
    if not recomputed:
        _seen.update((part, name) for name, part in _named(module))
    return top


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The parts and their names, without the names of what `torch.compile` wraps around a module."""
    for name, part in module.named_modules():
        yield ".".join(each for each in name.split(".") if each != "_orig_mod"), part


_CALL = torch.nn.Module.__call__.__code__


def running() -> list[torch.nn.Module]:
    """Modules whose call is on this thread's Python stack, outermost first; needs no `acquire`."""
    found = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]

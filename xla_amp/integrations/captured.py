"""What the captured steps of Lightning and of transformers' Trainer share: what they read, what prevents a capture."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from xla_amp.common import events
from xla_amp.engines import base
from xla_amp.training.reader import FUNCTIONS, bound


def obstacle(callbacks: Iterable[Any], root: type, hooks: Iterable[str]) -> str | None:
    """Why a trainer's step cannot be replayed: what runs in it that a replay would leave out; None if nothing does.

    Args:
        callbacks: of the trainer.
        root: their base class, whose hooks do nothing.
        hooks: names of those that a trainer calls inside of its step.
    """
    if base.in_processes():
        return "several processes train together"
    for callback in callbacks:
        for hook in hooks:
            if getattr(type(callback), hook, None) is not getattr(root, hook, None):
                return f"{type(callback).__name__}.{hook} runs inside of the step"
    return None


def report(reason: str) -> None:
    """Tells the user why the trainer's steps are recorded."""
    events.warn(
        f"capture=True: the training step cannot be replayed: {reason}. Each call is recorded: correct, but slower"
    )


def code(owner: Any, root: type, names: Iterable[str]) -> list[Any]:
    """What users wrote of a step's code: methods of an object, and methods of it and functions of their file in them.

    Args:
        owner: the object.
        root: the class of the framework, whose own methods are left out.
        names: of the methods that the framework calls.
    """
    found = [each for name in names for each in _methods(owner, root, name)]
    for function in found:  # which grows
        values, named, _ = bound(function)
        file = [each for each, *_ in values if isinstance(each, FUNCTIONS) and each.__module__ == function.__module__]
        methods = [each for name in named for each in _methods(owner, root, name)]
        found += [each for each in dict.fromkeys((*file, *methods)) if each not in found]
    return found


def _methods(owner: Any, root: type, name: str) -> Iterator[Any]:
    """The function that an object and its classes, but not `root`, have by a name, and those that it extends."""
    for space in (vars(owner), *(vars(each) for each in type(owner).__mro__ if each not in root.__mro__)):
        value = space.get(name)
        function = inspect.unwrap(getattr(value, "__func__", value))  # also of a static or class method
        if isinstance(function, types.FunctionType) and getattr(value, "__self__", owner) is owner:
            yield (method := types.MethodType(function, owner))
            if name not in bound(method).names:  # it does not call that of a base
                return

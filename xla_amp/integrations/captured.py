"""What the captured steps of Lightning and of transformers' Trainer share: what prevents the capture of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_amp.backends import base
from xla_amp.common import events


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

"""The module hook of `step_marker`, the one function of this package that Dynamo reads as a part of others."""

from __future__ import annotations

from typing import Any

import torch

from xla_amp.common import events
from xla_amp.torch_common import dynamo


@events.Point
def forward_begins(module: torch.nn.Module, /) -> None:
    """When a module is called, and Dynamo does not read the call."""


def before_forward(module: torch.nn.Module, inputs: Any) -> None:
    """The hook.  Graphs of Dynamo call `step_marker.before_forward`."""
    if not torch.compiler.is_dynamo_compiling():
        for listener in forward_begins.listeners:
            listener(module)


dynamo.skip(before_forward)

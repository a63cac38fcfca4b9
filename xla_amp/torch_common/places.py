"""Where in the user's program an operation of torch runs, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.common import events
from xla_amp.common.events import Place as Place
from xla_amp.torch_common import module_paths


class LocatingMode(TorchDispatchMode):
    """Counts operations and locates them in the user's program.

    Module paths are known after `module_paths.acquire`, until its end.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._forward: dict[int, Place] = {}
        """By the sequence number of the operation's autograd node."""
        self._backward_seen = False

    def locate(self, func: Any) -> Place:
        """The place of an operation that this mode is called for, which it counts."""
        self.count += 1
        name = str(func).removeprefix("aten.").removesuffix(".default")
        module, location = module_paths.current(), events.user_location()
        if module_paths.in_backward() and module is None:
            self._backward_seen = True
            node = torch._C._current_autograd_node()
            made_by = self._forward.get(node._sequence_nr()) if node is not None else None
            if made_by is None:
                return Place(operation=name, phase="backward", module="", location=location)
            return Place(
                operation=name,
                phase="backward",
                module=made_by.module,
                location=made_by.location,
                gradient_of=made_by.operation,
            )
        phase = "update" if self._backward_seen and not torch.is_grad_enabled() and module is None else "forward"
        place = Place(operation=name, phase=phase, module=module or "", location=location)
        # Autograd creates and numbers its node before the operation reaches this mode.
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place

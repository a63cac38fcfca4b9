"""The programs that one of two processes would run, as JSON on the last line: text by collective.

A separate process, in which torch_xla believes that there are two: its CPU client has one device (with a second it
ends the process), and it ties each collective to the one before it, so that nothing may run here afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch_xla
from torch import nn

import xla_amp
from xla_amp import xla_model

GROUPS = [[0, 1]]


def program(tensors: Sequence[torch.Tensor]) -> str:
    """What these tensors would be computed by."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def programs() -> dict[str, str]:
    """By collective of `xla_model`, once among all and once in a group."""
    found = {}
    for groups in (None, GROUPS):
        suffix = "" if groups is None else " in groups"
        tensor, weight = torch.arange(4.0).to("xla"), nn.Parameter(torch.ones(2).to("xla"))
        (weight * 2).sum().backward()
        found["no collective" + suffix] = program([weight.grad])
        xla_model.reduce_gradients(torch.optim.SGD([weight]), groups)
        found["reduce_gradients" + suffix] = program([weight.grad])
        found["all_reduce" + suffix] = program([xla_model.all_reduce("max", tensor, groups=groups)])
        found["all_gather" + suffix] = program([xla_model.all_gather(tensor, groups=groups)])
        found["reduce_scatter" + suffix] = program([xla_model.reduce_scatter("sum", tensor, 1.0, 0, 2, groups)])
        xla_model.collective_broadcast([tensor], groups=groups)
        found["collective_broadcast" + suffix] = program([tensor])
    return found


if __name__ == "__main__":
    xla_amp.xla_device()
    torch_xla.runtime.world_size = lambda: 2
    print(json.dumps(programs()))

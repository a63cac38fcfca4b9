"""Parameters and gradients for optimizers on a device, and two of them under an optimizer of torch's database."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerInfo

import xla_amp

OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 2.0, "lambd": 0.01},
    "Adadelta": {"weight_decay": 0.01},
    "Adafactor": {"weight_decay": 0.01},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "Muon": {},
    "NAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "SparseAdam": {},
}
"""Options that change the arithmetic of each optimizer of torch that needs no closure."""
SHAPES = [(5, 3), (4,), ()]


def parameters(device: torch.device | str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """The same ones at each call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0, bad: bool = False) -> None:
    """Gives parameters the gradients of a step, times a factor; with `bad`, one is infinite in each."""
    xla_amp.sync()  # each step is the same small program
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator)
        if bad:
            gradient.view(-1)[0] = float("inf")
        parameter.grad = (gradient * factor).to(parameter.dtype).to(parameter.device)


class Training:
    """Two parameters (one matrix for Muon) and an optimizer, with gradients that depend on them."""

    def __init__(self, info: OptimizerInfo, options: dict[str, Any], where: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((3, 4),) if info.optim_cls is torch.optim.Muon else ((3, 4), (5,))
        self.sparse, self.closure = info.only_supports_sparse_grads, info.step_requires_closure
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(where)) for shape in shapes]
        self.optimizer = info.optim_cls(self.parameters, **copy.deepcopy(options))

    def loss(self, scaler: torch.amp.GradScaler | None = None, factor: float = 1.0) -> torch.Tensor:
        """The loss, after its backward pass."""
        self.optimizer.zero_grad()
        loss = torch.stack([(p - 0.3).pow(2).sum() for p in self.parameters]).sum()
        (loss if scaler is None else scaler.scale(loss * factor)).backward()
        for parameter in self.parameters if self.sparse else ():
            parameter.grad = _rows_of(parameter.grad)
        return loss

    def step(self) -> None:
        # which torch's own test cases turn on, and which the empty entries of a coalesced gradient do not pass
        with torch.sparse.check_sparse_tensor_invariants(False):
            if self.closure:
                self.optimizer.step(self.loss)
            else:
                self.loss()
                self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().cpu() for p in self.parameters]


def _rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of two rows, in three entries."""
    rows = torch.tensor([2, 0, 2]).to(gradient.device)
    values = gradient.index_select(0, rows)
    return torch.sparse_coo_tensor(rows.reshape(1, 3), values, gradient.shape, check_invariants=False)

"""torch's own list of options for SGD, Adam and AdamW by dtype, with skipped steps, against torch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import syncfree

STEPS = 5
EXTRA: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "weight_decay": torch.tensor(0.1)},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    ],
    "Adam": [
        {"betas": (0.9, 0.999999), "eps": 1e-12},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "amsgrad": True},
        {"lr": torch.tensor(0.01, dtype=torch.float64)},
        {"foreach": True, "weight_decay": 0.1},
    ],
    "AdamW": [{"betas": (0.5, 0.999999)}, {"lr": torch.tensor(0.01, dtype=torch.float64)}, {"capturable": True}],
}
"""What the list leaves out, and where another implementation of these optimizers is known to go wrong."""


def rows() -> list[Any]:
    from torch.testing._internal.common_optimizers import optim_db

    found = []
    for info in optim_db:
        name = info.optim_cls.__name__
        if name in EXTRA:
            listed = [(given.desc, given.kwargs) for given in info.optim_inputs_func(device="cpu")]
            extra = [(str(sorted(kwargs)), kwargs) for kwargs in EXTRA[name]]
            found += [pytest.param(name, kwargs, id=f"{name}-{desc}") for desc, kwargs in (*listed, *extra)]
    return found


def run(make, dtype, device, kwargs, grouped, skips=False):
    """Parameters and state after some steps; with `skips`, before each is one that must leave nothing behind."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device))
        for shape in [(4, 3), (5,), ()]
    ]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03, "weight_decay": 0.2}] if grouped else params
    optimizer = make(groups, **kwargs)
    for step in range(STEPS):
        if skips:
            for parameter in params:
                parameter.grad = torch.full_like(parameter, float("nan"))
            optimizer.step(found_inf=torch.tensor(1.0 + step % 2, device=device))  # 2: flags of two optimizers, added
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        optimizer.step()
        xla_amp.sync()  # one small program, instead of one of all steps
    states = [value for p in params for _, value in sorted(optimizer.state[p].items()) if torch.is_tensor(value)]
    return [value.detach().cpu().double() for value in (*params, *states)]


def distance(ours, theirs):
    """Largest difference, relative to the largest value of each tensor."""
    assert len(ours) == len(theirs)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(ours, theirs, strict=True))


# Of 16 bits an eps of each value is lost in each step and in the gradients; in float16 small second moments lose more.
TOLERANCES = {
    torch.float32: 1e-6,
    torch.float64: 1e-12,
    torch.bfloat16: STEPS * torch.finfo(torch.bfloat16).eps,
    torch.float16: 2 * STEPS * torch.finfo(torch.float16).eps,
}


@pytest.mark.parametrize(("dtype", "grouped"), [*((dtype, False) for dtype in TOLERANCES), (torch.float64, True)])
@pytest.mark.parametrize(("name", "kwargs"), rows())
def test_options(device, name, kwargs, dtype, grouped):
    if grouped and isinstance(kwargs.get("lr"), torch.Tensor):
        kwargs = {**kwargs, "weight_decay": 0.05}
    plain = {key: value for key, value in kwargs.items() if key not in ("capturable", "foreach")}
    exact = torch.float32 if dtype is torch.float32 else torch.float64
    theirs = run(getattr(torch.optim, name), exact, "cpu", {**plain, "foreach": False}, grouped)
    ours = run(getattr(syncfree, name), dtype, device, kwargs, grouped, skips=True)
    assert distance(ours, theirs) <= TOLERANCES[dtype]

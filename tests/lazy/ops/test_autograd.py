"""PyTorch's autograd on the lazy device: its errors, hooks, graphs, functional transforms, and surgery on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn
from torch.func import hessian, jacrev, jvp, vjp

from xla_amp import lazy as engine
from xla_amp.testing import counts as counted

PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    PROGRAMS[function.__name__] = function
    return function


def line(*shape: int, where: str, grad: bool = False) -> torch.Tensor:
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(where)
    return x.requires_grad_() if grad else x


def network(where: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(where)


@program
def gradient_penalty(where: str) -> Any:
    model, x = network(where), line(4, 3, where=where, grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((g.norm(dim=1) - 1) ** 2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@program
def hooks_see_and_change_gradients(where: str) -> Any:
    model, seen = network(where), []
    x = line(4, 3, where=where, grad=True)
    model[0].register_forward_hook(lambda m, i, o: o * 2)
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].sum()))
    model[0].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    model[0].weight.register_hook(lambda g: g * 10)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    middle = model[0](x)
    middle.register_hook(lambda g: seen.append(g.abs().sum()))
    middle.retain_grad()
    model[2](model[1](middle)).sum().backward()
    return seen, middle.grad, x.grad, [p.grad for p in model.parameters()]


@program
def optimizer_inside_backward(where: str) -> Any:
    model = network(where)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(line(4, 3, where=where)).square().sum().backward()
    return list(model.parameters())


@program
def saved_on_the_cpu(where: str) -> Any:
    x = line(4, where=where, grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad


@program
def functional_derivatives(where: str) -> Any:
    x = line(3, where=where)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.sum()).pow(2)

    out, pull = vjp(f, x)
    return jacrev(f)(x), jvp(f, (x,), (torch.ones_like(x),)), pull(out), hessian(lambda x: f(x).sum())(x)


@program
def surgery(where: str) -> Any:
    model, x = network(where), line(4, 3, where=where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    old = model[2]
    model[2] = nn.Linear(6, 3).to(where)
    with torch.no_grad():
        model[2].weight[:2].copy_(old.weight)
        model[2].weight[2] = old.weight.mean(0)
        model[2].bias.zero_()
        model[0].weight.mul_(0.5)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    step()
    model[0].bias = None
    model[1] = nn.ReLU()
    model(x).square().sum().backward()
    return [model(x), *[p.grad for p in model.parameters()], *model.parameters()]


TOLERANT = {"rtol": 2e-5, "atol": 2e-6}


def test_same_as_the_cpu(device: torch.device) -> None:
    with counted() as counts:
        assert_same(lambda where: {name: program(where) for name, program in PROGRAMS.items()}, **TOLERANT)
    assert counts.fallbacks == 0


def test_a_value_needed_for_backward_that_was_changed(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    y = w.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        y.sum().backward()
    z = w.exp()
    z[1:].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    assert w._version == 0
    fine = w + 1  # the twin: a sum does not need its result
    fine.add_(1)
    fine.sum().backward()


def test_versions_count_writes_through_aliases(device: torch.device) -> None:
    def versions(where: str) -> list[int]:
        x = torch.zeros(4, 4).to(where)
        x.add_(1)
        x[1].mul_(2)
        x.t().copy_(torch.ones(4, 4).to(where))
        x.detach().zero_()
        x.data.zero_()
        torch.add(x, 1, out=x)
        torch._foreach_add_([x, x[0]], 1)
        return [x._version, x[0]._version]

    assert versions("jax") == versions("cpu")


def test_an_optimizer_step_makes_older_graphs_stale(device: torch.device) -> None:
    model = network("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, second = model(line(4, 3, where="jax")).sum(), model(line(4, 3, where="jax")).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_backward_pass_does_not_cut(device: torch.device) -> None:
    model = network("jax")
    x = line(4, 3, where="jax", grad=True)
    engine.sync()
    with counted() as counts:
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        engine.sync()
    assert (counts.executions, counts.host_syncs) == (1, 0)

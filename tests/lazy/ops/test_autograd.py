"""PyTorch's autograd on the lazy device: its errors, hooks, graphs, functional transforms, and surgery on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize

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
def retained_graph(where: str) -> Any:
    x = line(4, where=where, grad=True)
    y = (x.exp() * x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    return first, x.grad


@program
def double_backward_of_a_convolution(where: str) -> Any:
    x, w = line(1, 2, 5, 5, where=where, grad=True), line(3, 2, 3, 3, where=where, grad=True)
    y = nn.functional.conv2d(x, w, padding=1).pow(2).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (g * g).sum().backward()
    return w.grad / 1000, x.grad / 1000


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
def accumulated_gradients(where: str) -> Any:
    model = network(where)
    for _ in range(3):
        model(line(4, 3, where=where)).sum().backward()
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    zeros = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return first, zeros, [p.grad is None for p in model.parameters()]


@program
def a_function_of_ones_own(where: str) -> Any:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return g * 3 * x * x

    x = line(4, where=where, grad=True)
    Cube.apply(x).sum().backward()
    return x.grad


@program
def saved_on_the_cpu(where: str) -> Any:
    x = line(4, where=where, grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad


@program
def functional_gradients(where: str) -> Any:
    model = network(where)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    x = line(4, 3, where=where)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, p, (x,)).square().sum()

    per_sample = vmap(grad(lambda p, x: loss(p, x[None])), in_dims=(None, 0))(parameters, x)
    return grad(loss)(parameters, x), per_sample


@program
def functional_derivatives(where: str) -> Any:
    x = line(3, where=where)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.sum()).pow(2)

    out, pull = vjp(f, x)
    return jacrev(f)(x), jvp(f, (x,), (torch.ones_like(x),)), pull(out), hessian(lambda x: f(x).sum())(x)


@program
def vmapped(where: str) -> Any:
    x, w = line(4, 3, where=where), line(3, 3, where=where)
    return (
        vmap(lambda row: w @ row + 1)(x),
        vmap(torch.dot)(x, x),
        vmap(lambda row: row.softmax(0).cumsum(0))(x),
        vmap(lambda a, b: a.view(1, 3).t() * b, in_dims=(0, None))(x, w[0]),
    )


@program
def frozen_and_unfrozen(where: str) -> Any:
    model, x = network(where), line(4, 3, where=where)
    model[0].requires_grad_(False)
    model(x).sum().backward()
    first = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model[0].requires_grad_(True)
    model.zero_grad()
    with torch.no_grad():
        y = model(x)
    with torch.inference_mode():
        z = model(x) + 1
    model(x).sum().backward()
    return [g for g in first if g is not None], y.requires_grad, z, [p.grad for p in model.parameters()]


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


@program
def parametrized(where: str) -> Any:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).mT

    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3)).to(where)
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    model(line(2, 3, where=where)).square().sum().backward()
    return [p.grad for p in model.parameters()], model[1].weight


TOLERANT = {"rtol": 2e-5, "atol": 2e-6}


def test_same_as_the_cpu(device: torch.device) -> None:
    with counted() as counts:
        assert_same(lambda where: {name: program(where) for name, program in PROGRAMS.items()}, **TOLERANT)
    assert counts.fallbacks == 0


def test_the_tolerance_can_fail(device: torch.device) -> None:
    """The twin of the table: bfloat16 anywhere would be seen."""

    def rounded(where: str) -> Any:
        x = line(64, where=where)
        return x.exp() if where == "cpu" else x.bfloat16().exp().float()

    with pytest.raises(AssertionError, match="result "):
        assert_same(rounded, **TOLERANT)


# ---- errors are PyTorch's own ----------------------------------------------------------------------------------------


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


def test_a_leaf_is_not_written_in_place(device: torch.device) -> None:
    w = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        w.add_(1)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        w[0] = 2
    with torch.no_grad():
        w.add_(1)
    assert w.tolist() == [2, 2, 2]


def test_a_graph_is_gone_after_its_backward_pass_which_starts_at_a_scalar(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        y.backward()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.sum().backward()


def test_inference_tensors_stay_out_of_graphs(device: torch.device) -> None:
    with torch.inference_mode():
        x = torch.ones(3, device=device) + 1
    w = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        w * x
    assert (x + 1).tolist() == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_a_nan_in_backward_is_named(device: torch.device) -> None:
    x = torch.zeros(2, device=device, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"),
    ):
        (x * 0).sqrt().mul(0).sum().backward()


# ---- one executable --------------------------------------------------------------------------------------------------


def test_a_backward_pass_does_not_cut(device: torch.device) -> None:
    model = network("jax")
    x = line(4, 3, where="jax", grad=True)
    engine.sync()
    with counted() as counts:
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        engine.sync()
    assert (counts.executions, counts.host_syncs) == (1, 0)


@pytest.mark.full
def test_gradcheck(device: torch.device) -> None:
    x = torch.linspace(0.1, 1, 6, dtype=torch.float64).view(2, 3).to(device).requires_grad_()
    w = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2).to(device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: (x.log() @ w).sigmoid()[:, 1:].cumsum(0), (x, w))

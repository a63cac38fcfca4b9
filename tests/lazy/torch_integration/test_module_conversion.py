"""`module.to(device)` and back at any time, and ``p.data = value`` between devices, as on torch's own devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

INPUT = torch.linspace(-1, 1, 6).view(2, 3)


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def _tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, first)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "parametrized weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "parametrized": lambda: parametrize.register_parametrization(nn.Linear(3, 3), "weight", _Symmetric()),
    "tied and shared": _tied,
}


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, where: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = module(INPUT.to(where)).square().sum()
    loss.backward()
    optimizer.step()
    return loss  # holds the graph


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", MODULES)
def test_there_and_back_while_graphs_are_alive(device: torch.device, name: str) -> None:
    """Trains on the CPU, the device, the CPU again; the reference stays on the CPU."""

    def made() -> nn.Module:
        torch.manual_seed(3)
        module = MODULES[name]()
        module(INPUT)  # a lazy module's dry run; weight_norm keeps a graph
        return module

    module, reference = made(), made()
    parameters = list(module.parameters())
    names = [weakref.ref(parameter) for parameter in parameters]
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (module, reference))
    graphs = []
    for where in ("cpu", "jax", "jax", "cpu"):
        module.to(where)
        for state in ours.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].to(where)
        assert {p.device.type for p in module.parameters()} == {where}
        assert all(p.grad is None or p.grad.device.type == where for p in module.parameters())
        graphs.append((_train(module, ours, where), _train(reference, theirs, "cpu")))
    for loss, expected in graphs:
        torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=2e-5, atol=1e-5)
    assert all(new is old for new, old in zip(module.parameters(), parameters, strict=True))
    assert [name() for name in names] == parameters


def test_a_lazy_module_moved_before_its_dry_run(device: torch.device) -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2)).to(device)
    assert isinstance(module[0].weight, nn.UninitializedParameter)
    module(INPUT.to(device)).sum().backward()
    assert type(module[0].weight) is nn.Parameter
    assert module[0].weight.grad is not None
    assert module[0].weight.grad.device == device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_device_and_dtype_in_one_call(device: torch.device, dtype: torch.dtype) -> None:
    module = nn.Linear(3, 3)
    module(INPUT).sum().backward()
    weight, values = module.weight, module.weight.detach().clone()
    gradient, slope = weight.grad, weight.grad.clone()
    module.to(device)
    assert weight.grad is gradient
    assert torch.equal(gradient.cpu(), slope)
    for wanted in (device, torch.device("cpu"), device):
        module.to(wanted, dtype)
        assert (weight.device, weight.dtype, weight.grad.dtype) == (wanted, dtype, dtype)
        module.float()
        assert module.weight is weight
        assert torch.equal(weight.detach().cpu(), values.to(dtype).float())


def test_hooks_move_along(device: torch.device) -> None:
    module, seen = nn.Linear(3, 1), []
    handle = module.weight.register_hook(lambda g: seen.append(g.device.type))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
    for where in ("jax", "cpu"):
        module.to(where)
        module.zero_grad()
        module(INPUT.to(where)).sum().backward()
    assert seen == ["jax", "jax", "cpu", "cpu"]
    handle.remove()
    module(INPUT).sum().backward()
    assert seen[4:] == ["cpu"]


def test_in_inference_mode(device: torch.device) -> None:
    module = nn.Linear(3, 2)
    expected = module(INPUT).detach()
    for _ in range(2):
        with torch.inference_mode():
            found = module.to(device)(INPUT.to(device)).cpu()
        torch.testing.assert_close(found, expected)
        module.to(device)(INPUT.to(device))
        module.cpu()
        torch.testing.assert_close(module(INPUT), expected)
    module.to(device)
    module(INPUT.to(device)).sum().backward()
    assert module.weight.grad is not None


def test_data_takes_a_value_of_the_other_device(device: torch.device) -> None:
    x = nn.Parameter(torch.arange(3.0))
    graph = x * 2
    x.data = x.data.to(device)
    assert x.device == device
    assert x.is_leaf
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 4]
    x.data = torch.ones(2, 2)
    assert torch.equal(x, torch.ones(2, 2))
    with pytest.raises(TypeError):
        x.data = 3  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        x.data = torch.ones(2, dtype=torch.int64, device=device)
    assert (x + 1).tolist() == [[2, 2], [2, 2]]
    assert graph.tolist() == [0, 2, 4]


def test_dynamo_traces_data_and_conversions(device: torch.device) -> None:
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x.data * 2, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]

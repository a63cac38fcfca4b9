"""PyTorch's tools around training, on the device and on the CPU: same numbers, and no extra flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import forked
import pytest
import torch
from harness import assert_same
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from xla_amp.testing import counts as counted


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def inputs(where: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(4, 3).to(where)


def clipped_gradients(where: str) -> Any:
    model = network().to(where)
    norms = []
    for kind, foreach in ((2.0, None), (2.0, False), (float("inf"), True), (1.0, None)):
        model.zero_grad()
        model(inputs(where)).pow(2).sum().backward()
        norms.append(get_total_norm([p.grad for p in model.parameters()], kind))
        norms.append(clip_grad_norm_(model.parameters(), 0.5, kind, foreach=foreach))
        norms.append(model[0].weight.grad.clone())
    clip_grad_value_(model.parameters(), 0.01)
    return norms, [p.grad for p in model.parameters()]


def an_ensemble(where: str) -> Any:
    models = [network().to(where) for _ in range(3)]
    for scale, model in enumerate(models, 1):
        model[0].weight.data.mul_(scale)
    parameters, buffers = torch.func.stack_module_state(models)

    def loss(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (x,)).pow(2).sum()

    values = torch.func.vmap(loss, in_dims=(0, 0, None))(parameters, buffers, inputs(where))
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(0, 0, None))(parameters, buffers, inputs(where))
    return values, gradients


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step\\(\\)`:UserWarning")
@pytest.mark.parametrize("program", [clipped_gradients, an_ensemble])
def test_same_as_the_cpu(device: torch.device, program: Callable[[str], Any]) -> None:
    assert_same(program, rtol=2e-5, atol=2e-6)


def test_clipping_does_not_wait(device: torch.device) -> None:
    model = network().to(device)
    model(inputs("jax")).pow(2).sum().backward()
    with counted() as counts:
        clip_grad_norm_(model.parameters(), 0.5)
    assert (counts.executions, counts.host_syncs) == (0, 0)
    model[0].weight.grad.fill_(float("inf"))
    with counted() as counts, pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
    assert counts.host_syncs == 1  # this form asks


TRACED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a convolution": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 8)),
    "a recurrent layer": (lambda: First(nn.GRU(8, 4)), (3, 2, 8)),
    "a network": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)),
        (2, 3, 5, 5),
    ),
}


class First(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x)[0]


@pytest.mark.filterwarnings("ignore")  # torch's own, of tracing
@pytest.mark.parametrize("called_before", [False, True], ids=["at first", "after a call"])
@pytest.mark.parametrize("name", TRACED)
def test_a_traced_module_is_a_function_of_its_input(device: torch.device, name: str, called_before: bool) -> None:
    make, shape = TRACED[name]
    torch.manual_seed(0)
    model, x, other = make().eval(), torch.randn(shape), torch.randn(shape)
    want = model(other)
    weights = torch.linspace(0.5, 1, want.numel()).view(want.shape)
    gradients = torch.autograd.grad((want * weights).sum(), list(model.parameters()))
    model.to(device)
    if called_before:
        model(x.to(device))
    traced = torch.jit.trace(model, x.to(device))
    got = traced(other.to(device))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((got * weights.to(device)).sum(), list(model.parameters()))
    for gradient, expected in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.jit.freeze(traced)(other.to(device)).cpu(), want, rtol=1e-5, atol=1e-5)


PROGRAM = """
import sys, warnings
import torch, xla_amp

def train(where, width=400, steps=12):
    model = torch.nn.Linear(width, width).to(where)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(1, width, device=where)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

device = xla_amp.xla_device()
for line in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(line)
    print(*[warning.message for warning in told])
"""


def told(*lines: str) -> list[str]:
    """The warnings of each line in a process that has started the device and not used it."""
    return forked.run(*lines, program=PROGRAM).stdout.splitlines()


def test_a_model_is_told_once_and_short_comparisons_and_small_ones_beside_work_on_the_device_are_not() -> None:
    short, small, again = told("train('cpu', steps=9)", "train('cpu', width=8)", "train('cpu')")
    assert (short, again) == ("", "")
    assert "SGD has made 10 steps on 72 " in small
    assert "model.to(xla_amp.xla_device())" in small
    works, small, large = told("torch.ones(2, device=device).tolist()", "train('cpu', width=8)", "train('cpu')")
    assert (works, small) == ("", "")
    assert "SGD has made 10 steps on 160400 " in large


def test_nor_is_a_program_that_trains_on_the_device() -> None:
    assert told("train(device, width=2, steps=1)", "train('cpu')") == ["", ""]

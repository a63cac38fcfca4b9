"""Steps of torch on the lazy device as StableHLO programs: exported, converted, run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import checks
import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import xla_amp
from xla_amp.errors import CaptureError
from xla_amp.lazy.interop.export import Exported, export
from xla_amp.stablehlo import autocast, io


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield xla_amp.xla_device()
    xla_amp.sync()


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.MaxPool2d(2), ResidualBlock(8), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10))
    return model, (torch.randn(8, 3, 32, 32), torch.randint(10, (8,))), lambda m, x, y: F.cross_entropy(m(x), y)


def exported_step(make: Any, device: torch.device) -> Exported:
    torch.manual_seed(0)
    model, data, loss_of = make()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss, [parameter.grad for parameter in model.parameters()]

    return export(step, *(each.to(device) for each in data))


def test_step_of_a_model(device: torch.device) -> None:
    program = exported_step(resnet, device)
    names = [value.name for value in program.inputs]
    assert names[:2] == ["x", "y"]
    assert all(name.startswith("model.") for name in names[2:])
    assert program.outputs[0].name == "output[0]"
    assert {value.name for value in program.outputs} >= {
        f"new {value.name}" for value in program.inputs if value.name.endswith("weight")
    }

    converted = autocast(program)
    assert checks.wide_contractions(converted.module) == []
    assert len(checks.contractions(converted.module)) >= 11
    assert list(checks.low_denied(converted.module, "tpu")) == []
    given = [value.initial for value in program.inputs]
    expected = [np.asarray(each) for each in program.call()]
    with jax.enable_x64(True):
        got = [np.asarray(each) for each in converted.program.exported.call(*given)]
    # Gradients that cancel to nothing (a bias before a norm) have no size to be relative to.
    sizes = [np.linalg.norm(each.astype(np.float64)) for each in expected]
    some = [i for i, size in enumerate(sizes) if size > 1e-4]
    assert len(some) > 0.8 * len(sizes)
    assert checks.error([got[i] for i in some], [expected[i] for i in some]) < 0.15
    # as gradients before a batch norm are small differences of large ones, and a relu or a largest pixel may flip


def test_program_is_what_the_call_computed(device: torch.device, low_of: Any, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    x = torch.randn(4, 3).to(device)

    def forward(batch: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        return {"y": (model(batch["x"]) * scale).t()}

    with xla_amp.autocast(device):
        program = export(forward, {"x": x}, 2.0)
        wanted = forward({"x": x}, 2.0)["y"].float().cpu().detach().numpy()
    assert [value.name for value in program.inputs] == [
        "batch['x']", "model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias",
    ]  # fmt: skip
    low = str(low_of(device)).removeprefix("torch.")
    assert [(value.name, value.shape, value.dtype) for value in program.outputs] == [("output['y']", (2, 4), low)]
    np.testing.assert_array_equal(np.asarray(program.call()[0]).astype(np.float32), wanted)
    path = tmp_path / "step.jax_export"
    path.write_bytes(program.serialize())
    loaded = io.load(path)
    assert loaded.format == "export"
    again = jax.export.deserialize(bytearray(program.serialize())).call(*(value.initial for value in program.inputs))
    np.testing.assert_array_equal(np.asarray(again[0]).astype(np.float32), wanted)
    assert {"bfloat16": "bf16", "float16": "f16"}[low] in program.mlir_text
    with pytest.raises(TypeError, match="takes 5 arrays"):
        program.call(1)


def test_a_training_step_gives_new_values(device: torch.device) -> None:
    torch.manual_seed(2)
    weight = torch.randn(3, 3).to(device).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    x = torch.randn(2, 3).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step(x)
    program = export(step, x)
    assert [value.name for value in program.inputs][:2] == ["x", "weight"]
    new = dict(zip([value.name for value in program.outputs], program.call(), strict=True))
    np.testing.assert_allclose(np.asarray(new["new weight"]), weight.detach().cpu().numpy(), rtol=1e-6)
    assert any(name.startswith("new optimizer.state[0].exp_avg") for name in new)


def test_what_cannot_be_exported(device: torch.device) -> None:
    x = torch.ones(3).to(device)

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * (x.sum() * 2).item()

    ended = r"and no read\. The first ended at .*test_leaving_torch.py:\d+\. Take"
    for step, what in (
        (reads, "ran 2 programs"),
        (lambda x: (x.sum() * 2).item(), "ran one program and read its values"),
    ):
        with pytest.raises(CaptureError, match=f"{what}.*{ended}"):
            export(step, x)
    with pytest.raises(CaptureError, match="recorded nothing"):
        export(lambda: None)


COMPLEX = torch.complex(torch.arange(6.0), torch.arange(6.0) + 10).view(2, 3)
REAL = torch.arange(12.0).view(3, 4)
VIEWS: dict[str, tuple[Any, torch.Tensor]] = {
    "integers": (lambda x: (x + 1).view(torch.int32), REAL),
    "larger": (lambda x: {"a": (x + 1).view(torch.float64).t(), "b": x}, REAL),
    "imaginary": (lambda x: (x + 1).conj().imag[:, 1:], COMPLEX),
    "pairs": (lambda x: torch.view_as_real(x + 1)[..., 1].t(), COMPLEX),
    "adjoint": (lambda x: (x + 1).mH, COMPLEX),
    "negated": (lambda x: torch._neg_view(x + 1), REAL),
    "repeated": (lambda x: (x + 1)[0].expand(2, 4), REAL),
    "overlapping": (lambda x: (x + 1).as_strided((3, 3), (1, 2), 2), REAL),
    "empty": (lambda x: (x + 1)[1:1].view(torch.int32), REAL),
    "written": (lambda x: x.clone().view(torch.int32).add_(1), REAL),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_exported_with_their_dtype(device: torch.device, name: str) -> None:
    function, x = VIEWS[name]
    program = export(function, x.to(device))
    expected = [out.resolve_conj().resolve_neg().numpy() for out in tree_leaves(function(x))]
    results = [np.asarray(result) for result in program.call()]
    described = [(value.shape, value.dtype) for value in program.outputs]
    assert described == [(out.shape, out.dtype.name) for out in expected] == [(x.shape, x.dtype.name) for x in results]
    for result, out in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, out)
    assert 'constant dense<"0x' not in program.mlir_text  # no memory became a constant


def test_of_a_view_the_program_takes_all_memory(device: torch.device) -> None:
    x = torch.arange(9.0).view(3, 3).to(device)
    transposed = export(lambda y: y * y[0], x.t())
    assert [(value.name, value.shape) for value in transposed.inputs] == [("storage of y", (3, 3))]
    np.testing.assert_array_equal(transposed.call()[0], (x.t() * x.t()[0]).cpu())
    rows = export(lambda a, b: a.view(torch.int32) + b.view(torch.int32), x[0], x[1])
    assert [value.name for value in rows.inputs] == ["storage of a"]
    assert [value.name for value in export(lambda y: y * 2, x.t().clone()).inputs] == ["y"]

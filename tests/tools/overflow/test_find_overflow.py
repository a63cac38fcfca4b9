"""find_overflow: models with a known first overflow, on the CPU and on the lazy device; all state is restored."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp
from xla_amp import GradScaler
from xla_amp.errors import RecompileWarning, StepError
from xla_amp.testing import counts
from xla_amp.tools.overflow.on_pytorch import find_overflow

# A skipped step is none to torch's schedulers.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")


class Block(nn.Module):
    """Attention with a mask of infinities, then a layer whose values are `gain` times larger."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(4, 8), gain

    def forward(self, x):
        scores = x @ x.transpose(-1, -2)
        mixed = torch.softmax(scores + torch.full_like(scores, float("-inf")).triu(1), -1) @ x
        return (self.up(mixed) * self.gain).square().mean(-1, keepdim=True) * x


class Trainer:
    def __init__(self, device, *blocks, init_scale=2.0**10, dtype=torch.float16):
        torch.manual_seed(0)
        self.model = nn.Sequential(*blocks, nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(4, 2)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = GradScaler(device, init_scale=init_scale)
        self.batch = torch.randn(2, 3, 4).to(device)
        self.dtype, self.device = dtype, device

    def step(self, batch):
        self.optimizer.zero_grad()
        with xla_amp.autocast(self.device, dtype=self.dtype):
            loss = self.model(batch).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def epoch(self, batch):
        self.step(batch)
        self.schedule.step()


def state(trainer):
    """Everything that a step changes, on the host."""

    def host(value):
        if isinstance(value, torch.Tensor):
            return str(value.detach().cpu().tolist())  # a NaN is not equal to itself, its text is
        if isinstance(value, dict):
            return {str(key): host(item) for key, item in value.items()}
        return [host(item) for item in value] if isinstance(value, list | tuple) else value

    return [
        host(trainer.model.state_dict()),
        host([parameter.grad for parameter in trainer.model.parameters()]),
        host(trainer.optimizer.state_dict()),
        host(trainer.schedule.state_dict()),
        host(trainer.scaler.state_dict()),
        int(trainer.scaler.skipped_steps()),
        host(torch.get_rng_state()),
        host(xla_amp.xla_model.get_rng_state()),
    ]


def test_the_first_overflow_of_a_forward_pass(device):
    trainer = Trainer(device, Block(), Block(1e6))
    trainer.epoch(trainer.batch)
    before = state(trainer)
    report = find_overflow(trainer.epoch, trainer.batch)
    assert state(trainer) == before
    first = report.first
    assert (first.place.operation, first.place.phase, first.place.module) == ("mul.Tensor", "forward", "1")
    assert (first.made, first.result) == ("inf", "float16")
    assert __file__ in first.place.location
    (given,) = first.inputs
    assert (given.name, given.dtype, given.shape) == ("self", "float16", (2, 3, 8))
    assert report.scale == 2.0**9
    assert "0.up.weight" in report.nonfinite_gradients
    text = str(report)
    assert "mul.Tensor made inf in the forward pass, module 1" in text
    assert f"self: float16 2x3x8, {given.least:.3g} to {given.greatest:.3g}, magnitudes" in text
    assert "result: float16, which holds magnitudes up to 6.55e+04" in text


def test_a_finite_step_and_one_that_is_compiled():
    device = xla_amp.xla_device()
    trainer = Trainer(device, Block())
    step = xla_amp.compile(trainer.step)
    for _ in range(3):
        step(trainer.batch)
    before = state(trainer)
    report = find_overflow(step, trainer.batch)
    assert state(trainer) == before
    assert report.first is None
    assert report.nonfinite_gradients == ()
    # The mask of the attention is an infinity.
    assert "no operation that was watched made one" in str(report)
    step(trainer.batch)
    assert state(trainer) != before  # the comparison sees a step


def test_the_first_overflow_of_a_backward_pass(device):
    trainer = Trainer(device, init_scale=2.0**40)
    report = find_overflow(trainer.step, trainer.batch)
    first = report.first
    assert (first.place.phase, first.made) == ("backward", "inf")
    assert first.place.operation == "_to_copy"  # the float32 gradient of the loss becomes the layer's
    assert (first.inputs[0].dtype, first.result) == ("float32", "float16")
    assert first.inputs[0].largest > 65504
    assert first.place.gradient_of == "_to_copy"
    assert len(report.nonfinite_gradients) == len(list(trainer.model.parameters()))


def test_the_module_of_a_backward_operation(device):
    class Inner(nn.Module):
        def forward(self, x):
            return torch.sqrt(x)

    model = nn.Sequential(nn.Linear(2, 2), Inner()).to(device)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    x = torch.ones(1, 2, device=device)

    def step():
        model(x).sum().backward()

    report = find_overflow(step)
    place = report.first.place
    # The derivative of a square root at zero.
    assert (place.phase, place.module, place.gradient_of) == ("backward", "1", "sqrt")
    assert report.first.made == "inf"
    assert any(operand.largest == 0.0 for operand in report.first.inputs)
    assert model[0].weight.grad is None
    assert sorted(report.nonfinite_gradients) == ["0.bias", "0.weight"]


def in_a_region(f):
    def step(x):
        with xla_amp.autocast(x.device, dtype=torch.float16):
            return f(x)

    return step


@pytest.mark.parametrize(
    ("step", "operation"),
    [
        (in_a_region(lambda x: x @ x), "matmul"),
        (in_a_region(lambda x: F.linear(x.half() * 1, x)), "_to_copy"),
        (in_a_region(lambda x: F.linear(x / 1e9, x)), "linear"),
        (lambda x: x.half() * 2, "_to_copy"),
    ],
)
def test_a_cast_of_autocast_has_the_name_of_its_operation(device, step, operation):
    first = find_overflow(step, torch.full((2, 2), 1e6, device=device)).first
    assert (first.place.operation, first.inputs[0].dtype, first.result) == (operation, "float32", "float16")


def many_masks(x):
    """Seventeen infinities on purpose before the one that is found."""
    masked = [x.masked_fill(x > 0, float("inf")).clamp(max=1.0) for _ in range(17)]
    return torch.log(sum(masked) * 0.0)


@pytest.mark.parametrize(("compute", "programs"), [(torch.exp, 1), (lambda x: torch.exp(x * 1e4), 2), (many_masks, 2)])
def test_each_run_is_a_program_and_no_recompilation(compute, programs):
    x = torch.ones(2, 3, device=xla_amp.xla_device())
    for _ in range(2):
        with counts() as seen, warnings.catch_warnings():
            warnings.simplefilter("error", RecompileWarning)
            report = find_overflow(lambda: compute(x))
        assert (report.first is None) == (programs == 1)
        assert seen.executions == programs
        assert seen.compilations <= programs


def test_a_step_that_is_not_the_same_twice():
    lengths = iter([1, 2, 3])
    with pytest.raises(StepError, match=r"two runs of the step differ \(\d+ operations, then \d+\)"):
        find_overflow(lambda: [torch.log(torch.zeros(1)) for _ in range(next(lengths))])


def test_objects_that_the_step_does_not_reach_are_restored_where_they_are_named():
    hidden = {"model": nn.BatchNorm1d(3)}
    find_overflow(lambda: hidden["model"](torch.ones(2, 3)), objects=[hidden["model"]])
    assert hidden["model"].num_batches_tracked == 0


def test_a_step_that_fails_is_taken_back(device):
    trainer = Trainer(device, Block())
    trainer.step(trainer.batch)
    before = state(trainer)

    def step(batch):
        trainer.step(batch)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        find_overflow(step, trainer.batch)
    assert state(trainer) == before
    assert F.relu(trainer.batch).device.type == device.type


@pytest.mark.full  # as the blocks of other pages
def test_the_report_in_the_documentation_is_that_of_its_script(tmp_path, capsys, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/tools.md").read_text(encoding="utf-8")
    script, report = re.search(r"`overflow_demo.py`:\n\n```python\n(.*?)```.*?```\n(.*?)```", page, re.DOTALL).groups()
    file = tmp_path / "overflow_demo.py"
    file.write_text(script)
    monkeypatch.setenv("COLUMNS", "1000")  # the folder's name makes lines long
    capsys.readouterr()
    runpy.run_path(str(file))
    printed = capsys.readouterr().out.replace(f"{tmp_path}/", "")

    def words(text):  # magnitudes may differ in the last digit between machines
        return re.sub(r"[\d.,]+(e[+-]\d+)?", "#", text)

    assert words(printed) == words(report)

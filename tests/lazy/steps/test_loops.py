"""Loops without an optimizer: few programs for any length, and training steps that stay whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.steps import loops, step_marker
from xla_amp.testing import counts as counted

LENGTHS = (7, 100, 400)


def network(width: int) -> nn.Module:
    """A network whose programs no other test compiles, if no other has this width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 5, generator=generator), torch.arange(4) % 3) for _ in range(count)]


def correct(model: nn.Module, where: Any, count: int, mode: Callable[[], Any]) -> int:
    total: Any = 0
    with mode():
        for x, y in batches(count):
            x, y = x.to(where), y.to(where)
            total += (model(x).argmax(-1) == y).sum()
    return int(total.item())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_is_two_programs_of_any_length(device: torch.device, mode: Callable[[], Any]) -> None:
    width = 17 if mode is torch.no_grad else 18
    model = network(width)
    expected = [correct(model, "cpu", count, mode) for count in LENGTHS]
    model.to(device)
    executions = []
    with counted() as counts:
        for count, wanted in zip(LENGTHS, expected, strict=True):
            with counted() as each:
                assert correct(model, device, count, mode) == wanted
            executions.append(each.executions)
            assert each.host_syncs == 1
    assert counts.compilations <= 2
    assert executions[2] - executions[1] == 300  # one for each batch


def test_an_evaluation_that_records_a_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program is longer, because its batches might be parts of an accumulated gradient."""
    monkeypatch.setattr(loops, "LONG", 128)
    model = network(19).to(device)
    with counted() as counts:
        for count in (100, 400):
            correct(model, device, count, torch.enable_grad)
    assert counts.compilations <= 4
    assert counts.executions > 20


def features(where: Any, count: int) -> torch.Tensor:
    model = network(20).requires_grad_(False).to(where)
    return torch.cat([model(x.to(where)) for x, _ in batches(count)])


def several_sums(where: Any, count: int) -> torch.Tensor:
    hits, sizes = torch.zeros(3, device=where), torch.zeros(3, device=where)
    for x, y in batches(count):
        guess, true = (x[:, :3] > 0).float().to(where), nn.functional.one_hot(y, 3).to(where)
        hits += (guess * true).sum(0)
        sizes += guess.sum(0)
    return hits / sizes


def denoising(where: Any, count: int) -> torch.Tensor:
    model, x = nn.Sequential(nn.Linear(5, 21), nn.SiLU(), nn.Linear(21, 5)), torch.ones(4, 5)
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.01 * (index + 1))
    model, x = model.to(where), x.to(where)
    with torch.no_grad():
        for step in range(count):
            x = x - 0.1 * model(x * (1 - step / count))
    return x


def plain_tensors(where: Any, count: int) -> torch.Tensor:
    x = torch.ones(4, 6, device=where)
    for step in range(count):
        x = (x * 0.99 + step).roll(step, 1)
    return x


@pytest.mark.parametrize("program", [features, several_sums, denoising, plain_tensors])
def test_other_loops(device: torch.device, program: Callable[..., torch.Tensor]) -> None:
    lengths = (60, 130)
    expected = [program("cpu", length) for length in lengths]
    torch.ones(1).to(device).add(1).item()  # the next module is the first one of a program
    with counted() as first:
        with counted() as running:
            result = program(device, lengths[0])
        torch.testing.assert_close(result.cpu(), expected[0])
    assert running.host_syncs == running.device_to_host == 0  # ending a program waits for none
    with counted() as second:
        torch.testing.assert_close(program(device, lengths[1]).cpu(), expected[1])
    assert first.compilations <= 4
    assert second.compilations <= (1 if program is features else 0)  # `cat` of more parts
    # Two operations of an iteration of `several_sums` are equal, and each ends a program.
    programs = 2 if program is several_sums else 1
    assert second.executions - first.executions == programs * (lengths[1] - lengths[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self.cell(x))
        return x


def test_time_steps_are_one_program(device: torch.device) -> None:
    model, x = Recurrent().to(device), torch.ones(2, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counted() as counts:
        for _ in range(3):
            model(x, 30).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.sync()
    assert counts.executions == 3
    total, executions = torch.zeros((), device=device), []
    with torch.no_grad():
        for x, _ in batches(12):
            with counted() as counts:
                total += model(x.to(device), 20).square().sum()
            executions.append(counts.executions)
    assert executions == [0, *[1] * 11]


class Overlaps(nn.Module):
    """A cost of 40 operations in which operations repeat."""

    @torch.no_grad()
    def forward(self, boxes: torch.Tensor) -> torch.Tensor:
        cost = torch.zeros_like(boxes)
        for step in range(10):
            cost = cost + boxes.minimum(boxes.roll(step, 0)).clamp(0) * boxes.maximum(boxes.roll(step, 0))
        return cost


@pytest.mark.filterwarnings("ignore:the size of what:UserWarning")
@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_that_reads_a_value_is_no_loop(device: torch.device, steps: int) -> None:
    """Targets are assigned under `no_grad` after a read, as detectors do: no program ends there."""

    def train(where: Any) -> list[float]:
        model, overlaps, losses = network(23 + steps).to(where), Overlaps(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in batches(steps):
            found = model(x.to(where))
            with torch.no_grad():
                chosen = (found > found.mean()).nonzero()[:2, 0]  # waits
            cost = overlaps(found[chosen])
            loss = (found[chosen] * cost).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [each.item() for each in losses]

    expected = train("cpu")
    torch.ones(1).to(device).add(1).item()  # the next module is the first one of a program
    with counted() as counts:
        torch.testing.assert_close(train(device), expected)
    assert counts.executions == 2 * steps


def test_an_evaluation_after_a_forward_pass_without_a_backward_pass_is_a_loop(device: torch.device) -> None:
    model = network(29).to(device)
    model(torch.ones(4, 5, device=device)).sum().item()
    with counted() as counts:
        correct(model, device, 100, torch.no_grad)
    assert counts.executions > 50


def test_equal_layers_are_no_loop(device: torch.device) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(40))).to(device)
    with torch.no_grad(), counted() as counts:
        model(torch.ones(2, 5).to(device)).sum().item()
    assert counts.executions == 1


# ---- training without an optimizer -----------------------------------------------------------------------------------

UPDATES: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], Any]]] = {}
"""Name -> maker of a step that trains a network; the step returns nothing that lives."""


def by_hand(update: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def make(model: nn.Module) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            update(model)
            model.zero_grad()

        return step

    UPDATES[update.__name__] = make
    return update


@by_hand
def under_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


@by_hand
def of_replaced_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad


@by_hand
def of_a_list(model: nn.Module) -> None:
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_add_(parameters, [each.grad for each in parameters], alpha=-0.1)


def accumulated(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    total = torch.zeros((), device=next(model.parameters()).device)

    def step(x: torch.Tensor) -> None:
        for scale in (1, 2, 3):
            loss = model(x * scale).square().mean()
            loss.backward()
            total.add_(loss.detach())
        under_no_grad(model)
        model.zero_grad()

    return step


def of_plain_tensors(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    weights = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]

    def step(x: torch.Tensor) -> None:
        one, two, three, four = weights
        (((x @ one.t() + two).relu() @ three.t()) + four).square().mean().backward()
        with torch.no_grad():
            for weight, parameter in zip(weights, model.parameters(), strict=True):
                weight -= 0.1 * weight.grad
                weight.grad = None
                parameter.copy_(weight)

    return step


def of_a_dict(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    state = {"now": {name: value.detach() for name, value in model.named_parameters()}}
    gradient = torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean())

    def step(x: torch.Tensor) -> None:
        now = state["now"]
        gradients = gradient(now, x)
        state["now"] = {name: value - 0.1 * gradients[name] for name, value in now.items()}
        for name, parameter in model.named_parameters():
            parameter.data = state["now"][name]

    return step


UPDATES |= {each.__name__: each for each in (accumulated, of_plain_tensors, of_a_dict)}


@pytest.mark.parametrize("name", UPDATES)
def test_a_step_that_updates_by_hand_is_one_program(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(step_marker._process, "watches", True)  # as in a program that has no optimizer
    monkeypatch.setattr(step_marker._step(), "begins_program", False)  # and that has made no step
    expected, model = network(26), network(26).to(device)
    x = torch.linspace(-1, 1, 20).reshape(4, 5)
    wanted, step = UPDATES[name](expected), UPDATES[name](model)
    engine.sync()
    with counted() as counts:
        for _ in range(12):
            wanted(x)
            step(x.to(device))
    assert (counts.executions, counts.host_syncs) == (11, 0)  # the last one ends where it is read
    assert counts.compilations <= 2 + (name == "of_a_dict")  # autograd's thread may hold values a little longer
    for parameter, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), right, rtol=1e-4, atol=1e-5)


def test_gradients_accumulated_for_an_optimizer_are_one_program(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: weights that a step does not write end nothing, whatever it computes between two backward passes."""
    monkeypatch.setattr(step_marker._process, "watches", True)
    monkeypatch.setattr(step_marker._step(), "begins_program", False)
    weight, total = nn.Parameter(torch.ones(5, 27, device=device)), torch.zeros((), device=device)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 27)), nn.BatchNorm1d(27)).to(device)
    x = torch.ones(4, 5).to(device)
    losses: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda y: y @ weight, model]
    for loss_of in losses:
        optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.1)
        step_marker._process.watches = True
        engine.sync()
        with counted() as counts:
            for _ in range(4):
                for scale in (1, 2, 3):
                    loss = loss_of((x - 1) / scale).square().mean()
                    loss.backward()
                    total += loss.detach()
                    nn.utils.clip_grad_norm_([weight, *model.parameters()], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            engine.sync()
        assert counts.executions == 4


# ---- sequences that grow; docs/pytorch.md has a remedy ---------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "pytorch.md"


class Causal(nn.Module):
    """A decoder's layer with positions, as minGPT has it: no cache, no mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.out = nn.Embedding(32, 16), nn.Embedding(64, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.out(x)

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids


def recipe() -> Any:
    """``generate`` of the page."""
    (block,) = re.findall(r"```python\n(@torch.no_grad\(\)\ndef generate.*?)\n\n\n", PAGE.read_text("utf-8"), re.S)
    scope = {"torch": torch}
    exec(block, scope)
    return scope["generate"]


def test_the_recipe_gives_the_tokens_of_the_growing_loop_with_few_programs(device: torch.device) -> None:
    model, prompt, generate = Causal().eval(), torch.tensor([[5, 6, 7], [1, 9, 3]]), recipe()
    expected = model.generate(prompt, 20)
    model.to(device)
    prompt = prompt.to(device)
    xla_amp.sync(wait=True)
    for most in (4, 0):
        with counted() as counts:
            assert generate(model, prompt, 20).tolist() == expected.tolist()
        assert counts.compilations <= most


def test_transformers_with_a_static_cache_has_two_programs(device: torch.device) -> None:
    """The token ids stay on the CPU, so that nothing that grows reaches the device."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}
    config = transformers.LlamaConfig(**size, num_hidden_layers=1, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    model.to(device)
    xla_amp.sync()
    for most in (2, 0):
        with counted() as counts:
            got = model.generate(ids, cache_implementation="static", **options)
        assert counts.compilations <= most
        assert got.tolist() == expected.tolist()


class NativeScaler:
    """timm's, without its arguments for second derivatives and accumulation."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("jax")

    def __call__(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()


def test_a_training_has_one_program_and_an_evaluation_two() -> None:
    """Nine batches of each; the first batches of an evaluation that reads nothing are one program."""
    device = xla_amp.xla_device()
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 36, 5)).to(
        device
    )
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True), NativeScaler()
    batches = [(torch.rand(4, 3, 8, 8), torch.arange(4)) for _ in range(9)]
    xla_amp.sync(wait=True)
    xla_amp.metrics.reset()
    optimizer.zero_grad()
    for index, (images, labels) in enumerate(batches):
        images, labels = images.to(device), labels.to(device)
        with torch.autocast("jax", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler(loss, optimizer, list(model.parameters()))
        optimizer.zero_grad()
        if index % 4 == 0:
            assert loss.item() > 0
    xla_amp.sync()
    assert (xla_amp.metrics()["compilations"], xla_amp.metrics()["executions"]) == (1, 9)
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in batches:
            with torch.autocast("jax", torch.float16):
                right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    assert 0 <= int(right) <= 36
    assert xla_amp.metrics()["compilations"] <= 3

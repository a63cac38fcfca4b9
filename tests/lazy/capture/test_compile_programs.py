"""Programs as users write them: each trains once with `xla_amp.compile` and once without, to the same bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_amp

STEPS = 12


@pytest.fixture(scope="module")
def device():
    return xla_amp.xla_device()


def batches(device, shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(STEPS)]


def tensors(*modules):
    return [value.clone() for module in modules for value in module.state_dict().values()]


def gan(device, compiled):
    """Two networks with an optimizer each, in one step; the noise is drawn on the device."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)).to(device)
    of_generator = xla_amp.syncfree.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = xla_amp.syncfree.AdamW(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(6, 1, device=device), torch.zeros(6, 1, device=device)

    def step(real):
        fake = generator(torch.randn(6, 4, device=device))
        of_critic.zero_grad()
        with xla_amp.autocast(device):
            loss_real = F.binary_cross_entropy_with_logits(critic(real), ones)
            loss_fake = F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        (loss_real + loss_fake).backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss.backward()
        of_generator.step()
        return {"critic": (loss_real + loss_fake).detach(), "generator": loss.detach(), "sample": fake.detach()[0]}

    step, results = compiled(step), []
    for real in batches(device, (6, 8)):
        results.append(step(real))
    return [value for result in results for value in result.values()] + tensors(generator, critic), [step]


def accumulation(device, compiled):
    """Gradients of three batches, clipped, then an update: two captured functions, with gradients between them."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 20)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    total = torch.zeros((), device=device)

    def part(tokens, labels):
        loss = F.cross_entropy(model(tokens), labels) / 3
        loss.backward()
        total.add_(loss.detach())

    def update():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    part, update, results = compiled(part), compiled(update), []
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for _ in range(3):
            tokens = torch.randint(20, (5, 4), generator=generator).to(device)
            part(tokens, tokens[:, 0].clone())
        results += [update().clone(), total.clone()]
        total.zero_()
    return results + tensors(model), [part, update]


def schedule(device, compiled):
    """A scaler that skips, warm-up and cosine of the learning rate and momentum, weight decay in two groups."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(device)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is wide], "weight_decay": decay}
              for wide, decay in ((True, 0.1), (False, 0.0))]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.8, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    rates = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])
    scaler = xla_amp.GradScaler(device, init_scale=2.0**14, growth_interval=3)

    def step(x):
        optimizer.zero_grad(set_to_none=False)
        with xla_amp.autocast(device, dtype=torch.float16, policy="gpu"):
            loss = F.cross_entropy(model(x), torch.arange(6, device=device) % 3)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), norm

    step, results = compiled(step), []
    for number, x in enumerate(batches(device, (6, 8))):
        results += step(x * 1e6 if number == 6 else x)
        rates.step()
        for group in optimizer.param_groups:
            group["momentum"] = 0.8 + 0.1 * math.sin(number)
    return [*results, *tensors(model), scaler.get_scale()], [step]


def evaluation(device, compiled):
    """Training and evaluation of one model in turn: running statistics, buffers, a count of what was right."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).to(device)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = xla_amp.syncfree.SGD(model.parameters(), lr=0.05, momentum=0.9)
    right = torch.zeros((), dtype=torch.int64, device=device)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(x, y):
        logits = model(x)
        right.add_((logits.argmax(1) == y).sum())
        return logits.softmax(1)

    train, evaluate, results = compiled(train), compiled(evaluate), []
    for number, x in enumerate(batches(device, (6, 8))):
        y = x[:, :4].argmax(1)
        model.train()
        results.append(train(x, y))
        if number % 2:
            average.update_parameters(model)
        model.eval()
        results.append(evaluate(x, y))
        if number == 7:
            model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    return [*results, right, *tensors(model)], [train, evaluate]


def recurrent(device, compiled):
    """A hidden state that goes from call to call, dropout from the device's generator, reseeded outside."""
    cell, head = nn.GRUCell(4, 8).to(device), nn.Linear(8, 4).to(device)
    optimizer = xla_amp.syncfree.AdamW([*cell.parameters(), *head.parameters()], lr=1e-2)

    class State:
        hidden = torch.zeros(3, 8, device=device)

    state = State()

    def step(x, target):
        state.hidden = cell(x, state.hidden.detach())
        loss = F.mse_loss(head(F.dropout(state.hidden, 0.3)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.hidden = state.hidden.detach()
        return loss.detach(), state.hidden

    step, results = compiled(step), []
    given = batches(device, (3, 4))
    for number, (x, target) in enumerate(zip(given, given[1:] + given[:1], strict=True)):
        if number == 8:
            torch.manual_seed(5)
        if number == 9:
            state.hidden = torch.zeros(3, 8, device=device)
        results += step(x, target)
    return [*results, state.hidden, *tensors(cell, head), torch.jax.get_rng_state()], [step]


@pytest.mark.parametrize(
    "program", [gan, accumulation, schedule, evaluation, recurrent], ids=lambda each: each.__name__
)
def test_a_program_trains_to_the_same_bits(program, device):
    def run(compiled):
        xla_amp.sync()
        torch.manual_seed(3)
        found, steps = program(device, compiled)
        return [value.cpu() if isinstance(value, torch.Tensor) else torch.tensor(value) for value in found], steps

    def recorded(function):
        def call(*args):
            result = function(*args)
            xla_amp.sync()
            return result

        return call

    found, steps = run(lambda function: xla_amp.compile(function, strict=True))
    expected, _ = run(recorded)
    assert all(step.replays >= 4 for step in steps)
    assert len(found) == len(expected)
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.numpy().tobytes() == other.numpy().tobytes(), position  # NaN at the overflow, too

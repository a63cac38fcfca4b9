"""Programs as users write them: each trains once with `xla_amp.compile` and once without, to the same bits."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from jax.experimental.layout import Format, Layout
from torch import nn

import xla_amp
import xla_amp.jax
from xla_amp.lazy.programs import execute

STEPS = 12


def batches(device, shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(STEPS)]


def tensors(*modules):
    return [value.clone() for module in modules for value in module.state_dict().values()]


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


def accumulation_in_a_step(device, compiled):
    """Gradients of three parts in one step, for which a weight is cast once."""
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 4)).to(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)

    def step(*batch):
        losses = []
        for x, y in zip(*(tensor.chunk(3) for tensor in batch), strict=True):
            with xla_amp.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses)

    execute.clear_programs()
    step = compiled(step)
    results = [step(x, x[:, :4].argmax(1)) for x in batches(device, (6, 24))]
    text = max(execute.programs(), key=lambda program: program.operations).optimized_hlo()
    # The weight itself is cast once for all parts; gradients of its shape are cast too.
    assert len(re.findall(r"= bf16\[40,24\]\S* (?:fusion|convert)\(%taken_", text)) == 1
    return results + tensors(model), [step]


def two_step_gan(device, compiled):
    """A GAN in two captured steps, each with zero_grad() first; the generator's also fills the critic's gradients."""
    generator, critic = nn.Linear(4, 8).to(device), nn.Linear(8, 1).to(device)
    of_generator = xla_amp.syncfree.Adam(generator.parameters(), lr=1e-2)
    of_critic = xla_amp.syncfree.Adam(critic.parameters(), lr=1e-2)

    def critic_step(real, z):
        of_critic.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(generator(z).detach())).mean()
        loss.backward()
        of_critic.step()
        return loss.detach()

    def generator_step(z):
        of_generator.zero_grad()
        loss = F.softplus(-critic(generator(z))).mean()
        loss.backward()
        of_generator.step()
        return loss.detach()

    critic_step, generator_step, results = compiled(critic_step), compiled(generator_step), []
    for real, z in zip(batches(device, (6, 8)), batches(device, (6, 4), seed=2), strict=True):
        results += [critic_step(real, z), generator_step(z)]
    return results + tensors(generator, critic), [critic_step, generator_step]


def training(device, model, optimizer):
    """A step with zero_grad() first, as our pages write it."""

    def step(x):
        optimizer.zero_grad()
        with xla_amp.autocast(device):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def network(device):
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(device)


def alternating_shapes(device, compiled):
    model = network(device)
    step = compiled(training(device, model, xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)))
    results = [step(x[: 6 - number % 2]) for number, x in enumerate(batches(device, (6, 8)) * 2)]
    return results + tensors(model), [step]


def mixed_optimizers(device, compiled):
    """torch's SGD for one part and a sync-free AdamW for the rest, with tied weights, clipped together."""
    torch.manual_seed(1)
    embed, body, head = nn.Embedding(12, 8).to(device), nn.Linear(8, 8).to(device), nn.Linear(8, 12).to(device)
    head.weight = embed.weight
    every = nn.ModuleList([embed, body, head])
    of_body = torch.optim.SGD(body.parameters(), lr=0.1)
    of_rest = xla_amp.syncfree.AdamW([embed.weight, head.bias], lr=1e-2)

    def step(tokens):
        for optimizer in (of_body, of_rest):
            optimizer.zero_grad()
        loss = F.cross_entropy(head(body(embed(tokens))), tokens.roll(1))
        loss.backward()
        nn.utils.clip_grad_norm_(every.parameters(), 0.5)
        for optimizer in (of_body, of_rest):
            optimizer.step()
        return loss.detach()

    step = compiled(step)
    results = [step((x[:, 0].abs() * 4).long() % 12) for x in batches(device, (6, 8))]
    return results + tensors(every), [step]


def checkpoints(device, compiled):
    """A rollback of everything in the middle, one with tensors that are assigned, and a parameter that is replaced."""
    model = network(device)
    optimizer = xla_amp.syncfree.AdamW(model.parameters(), lr=1e-2)
    step, results = compiled(training(device, model, optimizer)), []
    saved = []
    for number, x in enumerate(batches(device, (6, 8)) * 2):
        if number in (4, 9):
            saved = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
        if number in (7, 8, 13):
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if number == 15:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        if number == 17:
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if number == 19:
            for parameter in model.parameters():
                parameter.grad = None
        results.append(step(x))
    return results + tensors(model), [step]


def shared_with_jax(device, compiled):
    """A batch and two weights, one of them frozen, that JAX has in another order in memory, and keeps."""

    def column_major(tensor):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        array = jax.device_put(jnp.asarray(tensor.cpu().numpy()), Format(Layout((1, 0)), sharding))
        assert array.format.layout.major_to_minor == (1, 0)
        return array

    model, arrays = network(device), []
    for layer in (model[0], model[3]):
        arrays.append(column_major(layer.weight.detach()))
        layer.weight = nn.Parameter(xla_amp.jax.from_jax(arrays[-1]), requires_grad=layer is model[3])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step, results = compiled(training(device, model, xla_amp.syncfree.AdamW(trained, lr=0.1))), []
    for number, x in enumerate(batches(device, (6, 8))):
        results.append(step(xla_amp.jax.from_jax(column_major(x)) if number == 6 else x))
    return results + tensors(model) + [array.tolist() for array in arrays], [step]


OPTIMIZERS = {
    "adam on the device": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(1e-2, device="jax"), betas=(0.8, 0.99), capturable=True
    ),
    "sync-free adam, two groups": lambda p: xla_amp.syncfree.Adam(
        [{"params": each, "lr": lr} for each, lr in zip(map(list, (p[:2], p[2:])), (0.1, 0.05), strict=True)]
    ),
    "sync-free sgd": lambda p: xla_amp.syncfree.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sync-free adamw": lambda p: xla_amp.syncfree.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
}


def of_optimizer(name):
    """Everything that changes from step to step: dropout, running statistics, a rate, an overflow."""

    def program(device, compiled):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        optimizer = OPTIMIZERS[name](list(model.to(device).parameters()))
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = xla_amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)

        def step(x):
            optimizer.zero_grad(set_to_none=name.startswith("adam"))
            with xla_amp.autocast(device, dtype=torch.float16, policy="gpu"):
                loss = F.cross_entropy(model(x), torch.arange(6, device=device) % 3)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss, norm

        step, results = compiled(step), []
        for number, x in enumerate(batches(device, (6, 8))):
            results += [each.detach() for each in step(x * 1e30 if number == 9 else x)]
            rates.step()
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return results + tensors(model) + state, [step]

    program.__name__ = name
    return program


SCHEDULES = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=30),
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1.0 / (n + 1)]),
    "of schedules": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 4), torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 7)],
        [5],
    ),
}


def of_schedule(name, inside=False):
    """Stepped after each step or by the step, behind its optimizer."""

    def program(device, compiled):
        model = network(device)
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "lr": 0.05}]
        optimizer = xla_amp.syncfree.SGD(groups, lr=0.1, momentum=0.9)
        schedule, train = SCHEDULES[name](optimizer), training(device, model, optimizer)

        def step(x):
            loss = train(x)
            schedule.step()
            return loss

        step, results = compiled(step if inside else train), []
        for number, x in enumerate(batches(device, (6, 8)) * 2):
            results.append(step(x))
            if not inside:
                schedule.step()
            elif number == 9:  # a checkpoint is loaded
                schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 2})
            results += [torch.tensor(group["lr"]) for group in optimizer.param_groups]
        return results + tensors(model), [step]

    program.__name__ = f"schedule{' inside' * inside}: {name}"
    return program


def schedule_far_away(device, compiled):
    """Stepped by an object of an object, and it changes nothing in the calls that are recorded."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(device, model, optimizer)
    loop = SimpleNamespace(rates=SimpleNamespace(schedule=torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)))

    def step(x):
        loss = train(x)
        loop.rates.schedule.step()
        return loss

    step, results = compiled(step), []
    for x in batches(device, (6, 8)) * 2:
        results += [
            step(x),
            torch.tensor(loop.rates.schedule.last_epoch),
            torch.tensor(optimizer.param_groups[0]["lr"]),
        ]
    return results + tensors(model), [step]


def schedule_made_later(device, compiled):
    """By a callback that is added when the step is captured already."""
    model, callbacks = network(device), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, schedules = training(device, model, optimizer), []

    def step(x):
        loss = train(x)
        for callback in callbacks.values():
            callback()
        return loss

    step, results = compiled(step), []
    for number, x in enumerate(batches(device, (6, 8)) * 2):
        if number == 6:
            schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5))
            callbacks["rates"] = lambda: schedules[0].step()
        results += [step(x), torch.tensor(optimizer.param_groups[0]["lr"])]
    return results + tensors(model) + [torch.tensor(schedules[0].last_epoch)], [step]


class Meter:
    """A mean, as a loop's own."""

    def __init__(self, device):
        self.total, self.count = torch.zeros((), device=device), 0

    def update(self, value, count):
        self.total = self.total + value * count
        self.count += count


class Trainer:
    """Counts, accumulates by the count, steps a schedule, keeps an average, and returns a dictionary."""

    parts = 2

    def __init__(self, device):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average)
        self.global_step = self.updates = 0

    def loss(self, x):
        scores = self.model(x)
        return F.cross_entropy(scores, x[:, :3].argmax(1)), scores

    def training_step(self, x):
        loss, scores = self.loss(x)
        (loss / self.parts).backward()
        if (self.global_step + 1) % self.parts == 0:
            self.update()
        self.global_step += 1
        return {"loss": loss.detach(), "accuracy": (scores.argmax(1) == x[:, :3].argmax(1)).float().mean()}

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        self.updates += 1


def trainer_class(device, compiled):
    trainer = Trainer(device)
    step, results = compiled(trainer.training_step), []
    for number, x in enumerate(batches(device, (6, 8)) * 2):
        results += step(x).values()
        if number == 16:
            trainer.parts = 3
        counts = trainer.global_step, trainer.updates, trainer.schedule.last_epoch, trainer.average.n_averaged
        results += [torch.tensor([*counts, *trainer.schedule.get_last_lr()], dtype=torch.float64)]
    return results + tensors(trainer.model, trainer.average), [step]


def recurrent_in_parts(device, compiled):
    """An LSTM whose state goes from part to part, clipped, with a meter."""
    lstm, head = nn.LSTM(8, 16, batch_first=True).to(device), nn.Linear(16, 8).to(device)
    every = nn.ModuleList([lstm, head])
    optimizer = torch.optim.SGD(every.parameters(), lr=0.1)
    hidden = tuple(torch.zeros(1, 2, 16, device=device) for _ in range(2))
    meter = Meter(device)

    def step(x):
        nonlocal hidden
        optimizer.zero_grad()
        found, after = lstm(x, hidden)
        loss = F.mse_loss(head(found), x)
        loss.backward()
        nn.utils.clip_grad_norm_(every.parameters(), 0.25)
        optimizer.step()
        hidden = tuple(each.detach() for each in after)
        meter.update(loss.detach(), x.size(0))

    step, results = compiled(step), []
    for x in batches(device, (2, 3, 8)):
        step(x)
        results += [*hidden, meter.total, torch.tensor(meter.count)]
    return results + tensors(every), [step]


def gradient_penalty(device, compiled):
    """A critic whose gradient has the norm one, and a generator, with an optimizer each."""
    critic, generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(4, 8)
    of_critic, of_generator = (torch.optim.Adam(each.to(device).parameters(), lr=1e-2) for each in (critic, generator))

    def step(real):
        fake = generator(torch.randn(6, 4, device=device))
        part = torch.rand(6, 1, device=device)
        between = (part * real + (1 - part) * fake.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        of_critic.zero_grad()
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
        return loss.detach()

    step = compiled(step)
    return [step(x) for x in batches(device, (6, 8))] + tensors(critic, generator), [step]


def activation_checkpointing(device, compiled):
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]).to(device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        for block in blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = compiled(step)
    return [step(x) for x in batches(device, (6, 8))] + tensors(blocks), [step]


def transformers_model(device, compiled):
    """GPT-2 with transformers' schedule inside, bfloat16."""
    transformers = pytest.importorskip("transformers", reason="the extra `huggingface`")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, 20)

    def step(tokens):
        with xla_amp.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    step = compiled(step)
    return [step((x.abs() * 10).long() % 40) for x in batches(device, (4, 8))] + tensors(model), [step]


def averages_by_data(device, compiled):
    """An average and a key encoder get other ``.data``, and other objects have them, too; two change places."""
    model = network(device)
    average, key = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)
    pair = nn.ParameterList([torch.zeros(2, device=device), torch.ones(2, device=device)])
    optimizer = torch.optim.SGD([*model.parameters(), *key.parameters()], lr=0.1, weight_decay=0.1)
    train, kept = training(device, model, optimizer), [*average.parameters(), *key.parameters()]

    def step(x):
        loss = train(x)
        for mean, other, now in zip(average.parameters(), key.parameters(), model.parameters(), strict=True):
            mean.data = mean.data * 0.9 + now.data * 0.1
            other.data = other.data * 0.5 + now.data * 0.5
        pair[0].data, pair[1].data = pair[1].data, pair[0].data
        pair[0].data.mul_(2)
        return loss

    step = compiled(step)
    results = [step(x) for x in batches(device, (6, 8))]
    assert all(isinstance(each, nn.Parameter) for each in [*average.parameters(), *key.parameters()])
    return results + tensors(model, average, key, pair) + [each.detach() for each in kept], [step]


class Experts(nn.Module):
    """A mixture of experts, which keeps the loss that balances them."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.balance = None

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        self.balance = shares.mean(0).square().sum()
        parts = [(weights * (chosen == at)).sum(-1, keepdim=True) * each(x) for at, each in enumerate(self.experts)]
        return sum(parts)


def mixture_of_experts(device, compiled):
    model = nn.Sequential(Experts(), nn.LayerNorm(8), Experts()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        with xla_amp.autocast(device):
            loss = (model(x).float() - x).square().mean() + 0.1 * sum(each.balance for each in (model[0], model[2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, results = compiled(step), []
    for x in batches(device, (6, 8)):
        results += [step(x), model[0].balance.detach() * 1]
    return results + tensors(model), [step]


PROGRAMS = [
    averages_by_data, mixture_of_experts, accumulation, accumulation_in_a_step, two_step_gan, alternating_shapes,
    mixed_optimizers, checkpoints, shared_with_jax, *map(of_schedule, SCHEDULES),
    *(of_schedule(name, inside=True) for name in SCHEDULES), schedule_far_away, schedule_made_later, trainer_class,
    recurrent_in_parts, gradient_penalty, activation_checkpointing, transformers_model, *map(of_optimizer, OPTIMIZERS),
]  # fmt: skip


LONG = {"adam on the device", "sync-free adamw", "sync-free sgd"}
"""Whose parts other programs have: optimizers of other kinds."""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=each.__name__, marks=pytest.mark.full if each.__name__ in LONG else [])
        for each in PROGRAMS
    ],
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

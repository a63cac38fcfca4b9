"""Random numbers: reproducible, the same wherever the trace is flushed, and restored by activation checkpointing."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import distributions, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import xla_amp
from xla_amp import lazy as engine
from xla_amp import xla_model as xm
from xla_amp.testing import counts as counted

DRAWS: dict[str, Callable[[torch.Generator | None], torch.Tensor]] = {
    "rand": lambda g: torch.rand(8, device="jax", generator=g),
    "randn": lambda g: torch.randn(8, device="jax", generator=g),
    "randn half": lambda g: torch.randn(16, device="jax", dtype=torch.bfloat16, generator=g),
    "randint": lambda g: torch.randint(0, 1000, (8,), device="jax", generator=g),
    "randperm": lambda g: torch.randperm(16, device="jax", generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((64,), 0.5, device="jax"), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(16, device="jax"), 16, generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (8,), device="jax", generator=g),
    "uniform_": lambda g: torch.empty(16, device="jax").uniform_(-1, 1, generator=g),
    "normal_": lambda g: torch.empty(16, device="jax").normal_(1, 2, generator=g),
    "exponential_": lambda g: torch.empty(8, device="jax").exponential_(generator=g),
    "random_": lambda g: torch.empty(16, device="jax", dtype=torch.int64).random_(1000, generator=g),
    "trunc_normal_": lambda g: nn.init.trunc_normal_(torch.empty(8, device="jax"), generator=g),
}
GLOBAL = {
    "dropout": lambda g: nn.functional.dropout(torch.ones(64, device="jax"), 0.5),
    "rand_like of a view": lambda g: torch.rand_like(torch.ones(4, 4, device="jax").t()),
}
"""Draws that take no generator."""


def test_a_seed_gives_the_same_numbers_wherever_the_tape_is_cut_and_they_go_on(device: torch.device) -> None:
    draws = [*DRAWS.items(), *GLOBAL.items()] * 2
    torch.manual_seed(4)
    together = [draw(None) for _, draw in draws]
    together = [x.cpu() for x in together]
    torch.manual_seed(4)
    for number, (name, draw) in enumerate(draws):
        assert torch.equal(draw(None).cpu(), together[number]), name
        engine.sync()
        assert not torch.equal(together[number], together[number - len(draws) // 2]), name


def test_another_seed_gives_other_numbers_and_builds_nothing(device: torch.device) -> None:
    drawn = []
    for seed in (0, 1, 2, -1, 2**63, 2**64 - 1, 2**32, 0):
        with counted() as counts:
            torch.manual_seed(seed)
            x = torch.randn(9, device=device)
            engine.sync()
        drawn.append((tuple(x.tolist()), counts.compilations))
    numbers = [values for values, _ in drawn]
    assert numbers[0] == numbers[-1]
    assert numbers[3] == numbers[5]  # -1 and 2**64 - 1 are one seed, as in torch
    assert len(set(numbers)) == 6
    assert sum(built for _, built in drawn) <= 1


def test_every_way_of_seeding(device: torch.device) -> None:
    numbers = []
    ways = (torch.manual_seed, torch.jax.manual_seed, torch.jax.manual_seed_all, engine.manual_seed, xm.set_rng_state)
    for seed in ways:
        seed(11)
        numbers.append(torch.rand(4, device=device).tolist())
    assert numbers == [numbers[0]] * len(ways)


def test_the_state_is_restored_in_the_middle_of_a_tape(device: torch.device) -> None:
    torch.manual_seed(6)
    engine.sync()
    with counted() as counts:
        state = torch.jax.get_rng_state()
        a = torch.randn(5, device=device)
        b = torch.randn(5, device=device)
        torch.jax.set_rng_state(state)
        c = torch.randn(5, device=device)
        engine.set_rng_state(state)
        xm.set_rng_state(state)
        d, e = torch.randn(5, device=device), torch.randn(5, device=device)
        engine.sync()
    assert (state.dtype, state.device.type, counts.executions) == (torch.uint8, "cpu", 1)
    assert a.tolist() == c.tolist() == d.tolist()
    assert b.tolist() == e.tolist() != a.tolist()
    torch.manual_seed(6)
    assert torch.equal(torch.jax.get_rng_state(), state)
    assert torch.equal(xm.get_rng_state(), state)
    assert torch.randn(5, device=device).tolist() == a.tolist()
    torch.jax.set_rng_state(state)  # after a flush
    assert torch.randn(5, device=device).tolist() == a.tolist()


def test_the_device_does_not_disturb_the_cpu(device: torch.device) -> None:
    torch.manual_seed(8)
    expected = torch.randn(3).tolist()
    torch.manual_seed(8)
    torch.randn(100, device=device).sum().item()
    assert torch.randn(3).tolist() == expected


def test_a_foreign_state_is_refused(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"uint8 tensor .* got a torch.float32 tensor"):
        engine.set_rng_state(torch.zeros(16))
    with pytest.raises(TypeError, match="got list"):
        engine.set_rng_state([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"16 bytes .* got 5056"):
        engine.set_rng_state(torch.zeros(5056, dtype=torch.uint8))


# ---- torch.Generator -------------------------------------------------------------------------------------------------


def test_a_generator_is_reproducible_and_apart(device: torch.device) -> None:
    generators = {name: torch.Generator(device=device) for name in DRAWS}
    torch.manual_seed(12)
    expected = torch.rand(3, device=device).tolist()
    torch.manual_seed(12)
    first = {name: draw(generators[name].manual_seed(5)) for name, draw in DRAWS.items()}
    second = {name: draw(generators[name]) for name, draw in DRAWS.items()}
    other = torch.rand(3, device=device)
    assert other.tolist() == expected
    for name, draw in DRAWS.items():  # two programs, after one
        generators[name].manual_seed(5)
        assert draw(generators[name]).tolist() == first[name].tolist() != second[name].tolist(), name
        assert draw(generators[name]).tolist() == second[name].tolist(), name


def test_a_generators_state(device: torch.device) -> None:
    g = torch.Generator(device="jax:0").manual_seed(3)
    assert isinstance(g, torch.Generator)
    assert (g.device, g.initial_seed(), g.get_offset()) == (device, 3, 0)
    state = g.get_state()
    first, second = torch.rand(3, device=device, generator=g), torch.rand(3, device=device, generator=g)
    assert g.get_offset() == 2
    for copied in (copy.deepcopy(g), pickle.loads(pickle.dumps(g)), g.clone_state()):  # before and after a flush
        assert copied.get_state().tolist() == g.get_state().tolist() != state.tolist()
        copied.set_offset(1)
        assert torch.rand(3, device=device, generator=copied).tolist() == second.tolist()
    assert torch.rand(3, device=device, generator=g.set_state(state)).tolist() == first.tolist()
    assert g.get_offset() == 1
    g.graphsafe_set_state(torch.Generator(device=device).manual_seed(3))
    assert torch.rand(3, device=device, generator=g).tolist() == first.tolist()
    assert g.seed() == g.initial_seed() != 3
    with pytest.raises(ValueError, match="16 bytes"):
        g.set_state(torch.Generator().get_state())
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.Generator(device="jax:1")


def test_a_generator_in_each_step_builds_one_program(device: torch.device) -> None:
    with counted() as counts:
        seen = set()
        for seed in range(6):
            g = torch.Generator(device=device).manual_seed(seed)
            x = torch.randn(5, device=device, generator=g) + torch.randn(5, device=device)
            engine.sync()
            seen.add(tuple(x.tolist()))
    assert len(seen) == 6
    assert counts.compilations <= 1


def test_a_captured_step_with_a_generator_goes_on_recording(device: torch.device) -> None:
    g, plain = (torch.Generator(device=device).manual_seed(2) for _ in range(2))
    step = xla_amp.compile(lambda x: x + torch.rand(3, device=device, generator=g))
    zero = torch.zeros(3, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [step(zero).tolist() for _ in range(5)]
    assert found == [torch.rand(3, device=device, generator=plain).tolist() for _ in range(5)]
    assert any("torch.Generator" in str(warning.message) for warning in caught)


def test_a_generator_of_the_cpu_gives_the_seed(device: torch.device) -> None:
    g = torch.Generator().manual_seed(1)
    torch.manual_seed(4)
    expected = torch.rand(3, device=device).tolist()
    torch.manual_seed(4)
    first, second = torch.randn(3, device=device, generator=g), torch.randn(3, device=device, generator=g)
    assert torch.rand(3, device=device).tolist() == expected
    assert torch.randn(3, device=device, generator=g.manual_seed(1)).tolist() == first.tolist() != second.tolist()


@pytest.mark.parametrize("where", ["default", "cpu", "jax"])
def test_a_shuffling_loader_under_a_default_device(device: torch.device, where: str) -> None:
    data = TensorDataset(torch.arange(8))
    orders = []
    with device:
        for _ in range(2):
            torch.manual_seed(0)
            g = None if where == "default" else torch.Generator(device=where).manual_seed(6)
            loader = DataLoader(data, shuffle=True, batch_size=4, generator=g)
            orders.append([x.tolist() for (x,) in loader])
    assert orders[0] == orders[1]
    assert sorted(number for batch in orders[0] for number in batch) == list(range(8))


# ---- distributions ---------------------------------------------------------------------------------------------------

N = 20_000


def full(value: float, *more: int) -> torch.Tensor:
    return torch.full((N, *more), value, device="jax")


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="jax")


LOG_MEAN = math.exp(1 / 32)
MOMENTS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "bernoulli_": (lambda: full(0.0).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    "bernoulli_ of a tensor": (lambda: full(0.0).bernoulli_(full(0.3)), 0.3, math.sqrt(0.21)),
    "binomial": (lambda: torch.binomial(full(10.0), full(0.3)), 3, math.sqrt(2.1)),
    "categorical": (lambda: distributions.Categorical(weights(2, 3, 5)).sample((N,)).float(), 1.3, math.sqrt(0.61)),
    "dirichlet": (lambda: distributions.Dirichlet(weights(1, 2, 3)).sample((N,))[:, 1], 1 / 3, math.sqrt(2 / 63)),
    "dropout": (lambda: nn.functional.dropout(full(1.0), 0.2), 1, 0.5),
    "exponential_": (lambda: torch.empty(N, device="jax").exponential_(2.0), 0.5, 0.5),
    "gamma": (lambda: torch._standard_gamma(full(2.5)), 2.5, math.sqrt(2.5)),
    "geometric_": (lambda: torch.empty(N, device="jax").geometric_(0.3), 10 / 3, math.sqrt(0.7) / 0.3),
    "gumbel_softmax": (lambda: nn.functional.gumbel_softmax(full(0.0, 2), hard=True)[:, 0], 0.5, 0.5),
    "laplace": (lambda: distributions.Laplace(full(0.0), full(1.0)).sample(), 0, math.sqrt(2)),
    "log_normal_": (lambda: full(0.0).log_normal_(0, 0.25), LOG_MEAN, LOG_MEAN * math.sqrt(math.expm1(1 / 16))),
    "multinomial": (lambda: torch.multinomial(weights(1, 1, 2), N, replacement=True).float(), 1.25, math.sqrt(0.6875)),
    "normal of tensors": (lambda: torch.normal(full(1.0), full(2.0)), 1, 2),
    "normal_": (lambda: torch.empty(N, device="jax").normal_(2, 3), 2, 3),
    "poisson": (lambda: torch.poisson(full(3.0)), 3, math.sqrt(3)),
    "rand": (lambda: torch.rand(N, device="jax"), 0.5, math.sqrt(1 / 12)),
    "randint": (lambda: torch.randint(-5, 6, (N,), device="jax").float(), 0, math.sqrt(10)),
    "randn": (lambda: torch.randn(N, device="jax"), 0, 1),
    "trunc_normal_": (lambda: nn.init.trunc_normal_(torch.empty(N, device="jax")), 0, 0.8796),
    "uniform_": (lambda: torch.empty(N, device="jax").uniform_(-3, 1), -1, 4 * math.sqrt(1 / 12)),
}
"""Name -> draw, mean and standard deviation of the distribution (textbook formulas)."""


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(device: torch.device, name: str) -> None:
    draw, mean, deviation = MOMENTS[name]
    torch.manual_seed(0)
    x, y = draw().cpu().double(), draw().cpu().double()  # flush in between: the second runs the first one's program
    assert x.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(N))
    assert x.std().item() == pytest.approx(deviation, rel=0.03)
    # Two draws, and neighbours within one, are not correlated (five standard errors).
    for a, b in ((x, y), (x[1:], x[:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 5 / math.sqrt(N)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reentrant", "kept"), [(False, True), (True, True), (False, False)])
def test_a_recomputed_dropout_has_the_same_mask_if_its_state_is_kept(
    device: torch.device, reentrant: bool, kept: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    engine.sync()
    with counted() as counts:
        y = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=kept)
        y.sum().backward()
        engine.sync()
    assert counts.executions == 1
    units = (y != 0).sum(0).float().cpu()  # a kept unit passes a gradient of 1 / (1 - 0.5)
    assert 0 < units.sum() < 32
    assert torch.equal(model[0].bias.grad.cpu(), 2 * units) == kept

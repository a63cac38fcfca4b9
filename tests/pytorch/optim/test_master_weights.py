"""Sync-free optimizers with `master`: 16-bit weights that train as if they had float32's bits."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

import xla_amp
from xla_amp import syncfree
from xla_amp.errors import EngineError
from xla_amp.pytorch.optim import master_weights

if xla_amp.xla_device().type != "jax":
    pytest.skip("torch_xla cannot read a number as bits", allow_module_level=True)

STEPS = 4
MODES = ["fp32", "split16", "kahan", "stochastic"]
OPTIMIZERS = {
    "AdamW": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
}
SHAPES = [(30, 20), ()]


@pytest.fixture
def optimized(monkeypatch):
    """Programs as users get them; conftest turns LLVM's passes off, which then contracts some products and sums."""
    monkeypatch.setenv("XLA_AMP_COMPILER_OPTIONS", "xla_backend_optimization_level=3 xla_cpu_use_fusion_emitters=true")


def parameters(device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]
    return [nn.Parameter(value.to(dtype).to(device)) for value in values]


def set_gradients(params, step, factor=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16) * factor
        parameter.grad = gradient.to(parameter.dtype).to(parameter.device)


def make(name, params, library=syncfree, **options):
    return getattr(library, name)(params, **{"lr": 1e-3, **OPTIMIZERS[name], **options})


def train(optimizer, params, steps, first=0, **arguments):
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step(**arguments)
        xla_amp.sync()


def state_bits(optimizer, params):
    """Every value of weights and state as bytes."""
    tensors = [*params, *(optimizer.state[p][name] for p in params for name in sorted(optimizer.state[p]))]
    return [tensor.detach().cpu().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]


def same(ones, others):
    return all(torch.equal(one.detach().cpu(), other.detach().cpu()) for one, other in zip(ones, others, strict=True))


# ---- formulas --------------------------------------------------------------------------------------------------------


def patterns():
    """float32 values of all kinds: of random bits, in a tie between two bfloat16, and the ends of the range."""
    bits = np.random.default_rng(0).integers(0, 2**32, 5_000, dtype=np.uint32)
    ends = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 1, 0x80000001], np.uint32)
    values = np.concatenate([bits, bits & 0xFFFF0000 | 0x8000, ends]).view(np.float32)
    return torch.from_numpy(values[~np.isnan(values)])


def test_two_halves_are_the_value_to_the_bit(device):
    value = patterns().to(device)
    weight, rest = torch.zeros_like(value, dtype=torch.bfloat16), torch.zeros_like(value, dtype=torch.int16)
    torch.ops.xla_amp.part_weights_([weight], [rest], [value], None)
    [back] = torch.ops.xla_amp.join_weights([weight], [rest])
    assert torch.equal(back.cpu().view(torch.int32), patterns().view(torch.int32))
    nearest = patterns().to(torch.bfloat16).view(torch.int16)
    tie = patterns().view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight.cpu().view(torch.int16)[~tie], nearest[~tie])


def test_not_a_number_stays_one(device):
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    weight = torch.zeros(4, dtype=torch.bfloat16, device=device)
    torch.ops.xla_amp.part_weights_([weight], [], [bits.view(torch.float32).to(device)], None)
    assert weight.isnan().all()
    torch.ops.xla_amp.round_at_random_(
        [weight], [bits.view(torch.float32).to(device)], [torch.tensor([1, 2], device=device)], 0, None
    )
    assert weight.isnan().all()


def rounded_at_random(value, seed, count, stream, device):
    weight = torch.zeros(value.shape, dtype=torch.bfloat16, device=device)
    state = torch.tensor([seed, count], device=device)
    torch.ops.xla_amp.round_at_random_([weight], [value.to(device)], [state], stream, None)
    return weight.cpu()


def test_random_rounding_has_the_value_as_its_mean():
    low, unit = 1.0, 2.0**-7
    for part in (0.1, 0.5, 0.9):
        value = torch.full((100_000,), low + part * unit)
        found = [rounded_at_random(value, seed, count, 0, "cpu") for seed, count in ((0, 0), (0, 1), (1, 0))]
        for one in found:
            assert set(one.tolist()) == {low, low + unit}
            assert (one == low + unit).double().mean().item() == pytest.approx(part, abs=0.008)  # 5 deviations
        # Seeds and counts are independent of each other: so many agree by chance.
        for one, other in ((found[0], found[1]), (found[0], found[2])):
            assert (one == other).double().mean().item() == pytest.approx(part**2 + (1 - part) ** 2, abs=0.008)
    assert not torch.equal(rounded_at_random(value, 0, 0, 0, "cpu"), rounded_at_random(value, 0, 0, 1, "cpu"))


def test_random_rounding_is_the_same_on_every_device():
    value = patterns()
    for seed, count, stream in ((5, 0, 0), (2**31 - 2, 3, 1), (0, 10**6, 2)):
        ours = rounded_at_random(value, seed, count, stream, xla_amp.xla_device())
        theirs = rounded_at_random(value, seed, count, stream, "cpu")
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_halves_train_as_float32_to_the_bit(device, name, optimized):
    whole, halves, masters = parameters(device), parameters(device), parameters(device, torch.float32)
    pairs = [(whole, make(name, whole, master="fp32")), (halves, make(name, halves, master="split16"))]
    pairs.append((masters, make(name, masters)))
    for params, optimizer in pairs:
        train(optimizer, params, STEPS)
    assert same(pairs[0][1].master_weights(), pairs[1][1].master_weights())
    assert same(pairs[0][1].master_weights(), masters)
    assert same(whole, halves)
    for weight, master in zip(whole, masters, strict=True):
        tie = master.detach().cpu().view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(weight.cpu()[~tie], master.detach().cpu().bfloat16()[~tie])
    for one, other, plain in zip(whole, halves, masters, strict=True):
        rows = [optimizer.state[p] for (_, optimizer), p in zip(pairs, (one, other, plain), strict=True)]
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            assert key not in rows[0] or same([rows[0][key]] * 2, [rows[1][key], rows[2][key]])


def test_small_updates_are_lost_without_a_master_only(device):
    """200 updates of an eighth of half a unit: what plain bfloat16 loses."""
    moved = {}
    for master in (None, *MODES):
        weight = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16, device=device))
        optimizer = syncfree.SGD([weight], lr=2.0**-12, master=master)
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            xla_amp.sync()
        moved[master] = 1 - optimizer.master_weights()[0].double().mean().item()
    assert moved.pop(None) == 0
    assert moved["fp32"] == moved["split16"] == 200 * 2.0**-12
    assert list(moved.values()) == pytest.approx([200 * 2.0**-12] * 4, rel=0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("master", MODES)
def test_a_skipped_step_leaves_every_bit(device, name, master):
    params, others = parameters(device), parameters(device)
    optimizer, other = make(name, params, master=master), make(name, others, master=master)
    set_gradients(params, 0)
    torch.manual_seed(1)
    optimizer.step(found_inf=torch.ones((), device=device))  # the very first
    assert same(params, parameters("cpu"))
    torch.manual_seed(1)
    for step in range(STEPS):
        for owner, tensors in ((optimizer, params), (other, others)):
            set_gradients(tensors, step)
            owner.step(found_inf=torch.zeros((), device=device))
        before = state_bits(optimizer, params)
        for parameter in params:
            parameter.grad = torch.full_like(parameter, float("inf"))
        optimizer.step(found_inf=torch.ones((), device=device))
        assert state_bits(optimizer, params) == before
    assert before == state_bits(other, others)


@pytest.mark.parametrize("master", MODES)
def test_a_step_is_one_program(master):
    """With a scaler, a schedule and an overflow; captured, too, with the same values."""
    found = []
    for captured in (False, True):
        device = xla_amp.xla_device()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(torch.bfloat16).to(device)
        optimizer = syncfree.AdamW(model.parameters(), lr=1e-2, master=master, foreach=True, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        scaler = xla_amp.GradScaler(device, init_scale=16.0, growth_interval=2)

        def step(x, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            for part in x.chunk(2):  # gradient accumulation
                scaler.scale(model(part).square().mean().float()).backward()
            scaler.step(optimizer)
            scaler.update()

        call = xla_amp.compile(step) if captured else step
        for number in range(8):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
            if number == 6:
                x[0, 0] = float("inf")
            xla_amp.sync()
            before = xla_amp.metrics()
            call(x.to(device))
            xla_amp.sync()
            after = xla_amp.metrics()
            schedule.step()
        counted = {name: after[name] - before[name] for name in ("executions", "compilations", "host_syncs")}
        assert counted == {"executions": 1, "compilations": 0, "host_syncs": 0}
        assert int(scaler.skipped_steps()) == 1
        found.append(state_bits(optimizer, list(model.parameters())))
    assert found[0] == found[1]


def test_unscaled_gradients_are_written_back(device):
    params, expected = parameters(device), parameters("cpu")
    optimizer = syncfree.AdamW(params, master="split16")
    set_gradients(params, 0, factor=8.0)
    set_gradients(expected, 0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0, device=device), torch.zeros((), device=device)
    optimizer.step()
    assert same([p.grad for p in params], [p.grad for p in expected])


def test_weights_that_are_set_from_outside_are_taken_over(device):
    """Loaded, clipped or averaged weights: a float32 copy must not bring the old ones back."""
    params = parameters(device)
    optimizer = syncfree.SGD(params, lr=0.5, master="fp32")
    train(optimizer, params, 2)
    with torch.no_grad():
        params[0][:5] = 3.0
    kept = optimizer.master_weights()[0].cpu()
    assert (kept[:5] == 3.0).all()
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = None
    optimizer.step()
    assert torch.equal(optimizer.master_weights()[0].cpu(), kept - 0.5)


def test_groups_may_differ(device):
    groups = [{"params": [p], "master": mode} for p, mode in zip(parameters(device), ("split16", "kahan"), strict=True)]
    wide = nn.Parameter(torch.ones(3, device=device))  # float32 weights are their own masters
    optimizer = syncfree.AdamW([*groups, {"params": [wide]}], master="fp32")
    params = [group["params"][0] for group in optimizer.param_groups]
    train(optimizer, params, 2)
    assert [set(optimizer.state[p]) - {"step", "exp_avg", "exp_avg_sq"} for p in params] == [
        {"master_low"},
        {"compensation"},
        set(),
    ]
    assert params[2].dtype == optimizer.state[wide]["exp_avg"].dtype == torch.float32


def test_float16_has_float32_masters(device):
    params, masters = parameters(device, torch.float16), parameters("cpu", torch.float32)
    optimizer, other = make("AdamW", params, master="fp32"), make("AdamW", masters, torch.optim)
    train(optimizer, params, STEPS)
    train(other, masters, STEPS)
    for found, expected in zip(optimizer.master_weights(), masters, strict=True):
        torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-6, atol=1e-7)
    assert same(params, [value.half() for value in optimizer.master_weights()])


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_the_seed_is_the_devices_generators(device):
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        params = parameters(device)
        optimizer = make("AdamW", params, master="stochastic")
        train(optimizer, params, 3)
        found.append(state_bits(optimizer, params))
        assert [optimizer.state[p]["rng_state"][1].item() for p in params] == [3, 3]
    assert found[0] == found[1] != found[2]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(optimizer, params):
    file = io.BytesIO()
    xla_amp.xla_model.save({"optimizer": optimizer.state_dict(), "weights": [p.detach() for p in params]}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def restored(checkpoint, optimizer, params, optimizer_first):
    def weights():
        with torch.no_grad():
            for parameter, value in zip(params, checkpoint["weights"], strict=True):
                parameter.copy_(value)

    for part in ([0, 1], [1, 0])[optimizer_first]:
        optimizer.load_state_dict(checkpoint["optimizer"]) if part else weights()
    xla_amp.sync()  # so that the next step is the program that it always is


@pytest.mark.parametrize("master", MODES)
def test_a_resumed_run_is_the_same_to_the_bit(device, master):
    params = parameters(device)
    optimizer = make("AdamW", params, master=master)
    train(optimizer, params, 3)
    checkpoint = saved(optimizer, params)
    train(optimizer, params, 2, first=3)
    others = [nn.Parameter(torch.zeros_like(p)) for p in params]
    again = make("AdamW", others, master=master)
    restored(checkpoint, again, others, optimizer_first=True)
    train(again, others, 2, first=3)
    assert state_bits(again, others) == state_bits(optimizer, params)
    copied = copy.deepcopy(again)
    assert copied.param_groups[0]["master"] == master
    assert state_bits(copied, copied.param_groups[0]["params"]) == state_bits(again, others)


@pytest.mark.parametrize("source", [None, *MODES])
@pytest.mark.parametrize("target", [None, *MODES])
def test_checkpoints_pass_between_modes_and_devices(source, target):
    """The float32 values of weights pass exactly where both have them; into other modes to the nearest bfloat16."""
    here, there = "cpu", xla_amp.xla_device()
    dtypes = [torch.float32 if mode is None else torch.bfloat16 for mode in (source, target)]
    params, others = parameters(here, dtypes[0]), parameters(there, dtypes[1])
    optimizer, other = make("AdamW", params, master=source), make("AdamW", others, master=target)
    train(optimizer, params, 3)
    values = optimizer.master_weights()
    checkpoint = saved(optimizer, params)
    restored(checkpoint, other, others, optimizer_first=False)
    passed = other.master_weights()
    exact = {"fp32", "split16"}
    for value, found in zip(values, passed, strict=True):
        exactly, nearly = source in exact and target in {*exact, None}, source is not None and target != "stochastic"
        tolerance = 0 if exactly else 2.0**-15 if nearly else 2.0**-8
        torch.testing.assert_close(found.cpu(), value.detach().cpu(), rtol=tolerance, atol=0)
    train(other, others, 2, first=3)
    train(optimizer, params, 2, first=3)
    for value, found in zip(optimizer.master_weights(), other.master_weights(), strict=True):
        torch.testing.assert_close(found.cpu(), value.detach().cpu(), rtol=0.02, atol=2e-3)
    rest = master_weights.MODES[target].rest if target else None
    assert set(other.state[others[0]]) & {*master_weights.RESTS} == ({rest} if rest else set())


@pytest.mark.parametrize("master", MODES)
def test_torchs_class_loads_it_and_gives_it_back(master):
    params = parameters("cpu")
    optimizer = make("AdamW", params, master=master)
    train(optimizer, params, 3)
    others = parameters("cpu")
    theirs = make("AdamW", others, torch.optim)
    restored(saved(optimizer, params), theirs, others, optimizer_first=False)
    train(theirs, others, 2, first=3)
    again = make("AdamW", params, master=master)
    restored(saved(theirs, others), again, params, optimizer_first=False)
    # What ours kept beside the weights is old: torch has stepped them since.
    torch.testing.assert_close(again.master_weights()[0], others[0].detach().float(), rtol=2.0**-8, atol=0)
    train(again, params, 1, first=5)
    assert again.state[params[0]]["step"].item() == 6


def test_float32_averages_of_torch_are_not_rounded(device):
    masters, params = parameters("cpu", torch.float32), parameters(device)
    theirs, ours = make("AdamW", masters, torch.optim), make("AdamW", params, master="split16")
    train(theirs, masters, 3)
    restored(saved(theirs, masters), ours, params, optimizer_first=False)
    ours.master_weights()
    assert same([ours.state[p]["exp_avg_sq"] for p in params], [theirs.state[p]["exp_avg_sq"] for p in masters])


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_it_refuses(monkeypatch):
    with pytest.raises(ValueError, match=r"syncfree.AdamW\(master='bf16'\): expected None or one of 'fp32', 'split16'"):
        syncfree.AdamW(parameters("cpu"), master="bf16")
    with pytest.raises(ValueError, match=r"float16 \(parameter \(30, 20\)\); use master='fp32' for float16"):
        syncfree.SGD(parameters("cpu", torch.float16), master="kahan")
    with pytest.raises(ValueError, match=r"no parameter is bfloat16 or float16, so it has no effect"):
        syncfree.Adam(parameters("cpu", torch.float32), master="split16")
    optimizer = syncfree.AdamW(parameters("cpu"))
    with pytest.raises(ValueError, match=r"master='half'"):
        optimizer.add_param_group({"params": parameters("cpu"), "master": "half"})
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(type(parameter), "device", torch.device("xla", 0), raising=False)
    with pytest.raises(EngineError, match="torch_xla has no operation that reads a number as bits"):
        master_weights.check("syncfree.SGD", {"params": [parameter], "master": "fp32"})

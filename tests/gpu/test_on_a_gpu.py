"""What only a GPU or TPU can show; `scripts/gpu_day.sh` and `hardware_day.py tpu` run it, and on a CPU with --dry-run.

Every number is compared with float64 or with torch on the CPU, at a tolerance that a product in a wrong dtype misses.
"""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from source_tree import ROOT

import xla_amp
import xla_amp.jax
from xla_amp.lazy.programs import execute, pjrt
from xla_amp.lowering import forms
from xla_amp.lowering.attention import blocked, sdpa
from xla_amp.lowering.attention.attention_call import Attention

pytestmark = pytest.mark.gpu
DEVICE = xla_amp.xla_device()
PLATFORM = pjrt.platform()
GPU = PLATFORM == "gpu"


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = (
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(288, 10),
    )
    return torch.nn.Sequential(*layers)


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator))
        for _ in range(number)
    ]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_training_run_follows_float32_with_one_program_and_no_wait(dtype, captured):
    losses: dict[str, list[float]] = {"float32": [], "low": []}
    model, reference = network().to(DEVICE), network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for x, y in batches(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(reference(x), y)
        loss.backward()
        optimizer.step()
        losses["float32"].append(loss.item())

    syncfree, scaler = xla_amp.syncfree.SGD(model.parameters(), lr=0.05), xla_amp.GradScaler(init_scale=256.0)

    def step(x, y):
        syncfree.zero_grad()
        with xla_amp.autocast(DEVICE, dtype=dtype):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(syncfree)
        scaler.update()
        return loss.detach()

    run, kept, before = xla_amp.compile(step) if captured else step, [], {}
    for number, (x, y) in enumerate(batches(10)):
        moved = x.to(DEVICE), y.to(DEVICE)
        if number == 5:
            before = xla_amp.metrics()
        kept.append(run(*moved))
        xla_amp.sync()
    after = xla_amp.metrics()
    assert [after[name] - before[name] for name in ("executions", "compilations", "host_syncs")] == [5, 0, 0]
    losses["low"] = [loss.item() for loss in kept]
    np.testing.assert_allclose(losses["low"], losses["float32"], rtol=3e-2, atol=2e-2)


def test_an_overflow_in_float16_is_skipped_and_the_scale_halves():
    model = torch.nn.Linear(8, 8).to(DEVICE)
    optimizer, scaler = xla_amp.syncfree.AdamW(model.parameters()), xla_amp.GradScaler(init_scale=2.0**16)
    before = model.weight.detach().cpu().clone()
    with xla_amp.autocast(DEVICE, dtype=torch.float16):
        loss = (model(torch.full((4, 8), 100.0, device=DEVICE)).float() * 100).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight.detach().cpu(), before)
    assert scaler.get_scale() == 2.0**15


def test_rounded_operands_and_exact_sums():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)
    with xla_amp.autocast(DEVICE, dtype=torch.bfloat16):
        got = (x.to(DEVICE) @ w.to(DEVICE)).cpu()
    want = x.bfloat16().double() @ w.bfloat16().double()
    assert got.dtype is torch.bfloat16
    assert ((got.double() - want).abs() / want.abs().clamp(min=1)).max() < 2**-8
    full = (x.to(DEVICE) @ w.to(DEVICE)).cpu()  # TF32 would be off by 1e-3
    assert (full.double() - x.double() @ w.double()).abs().max() < 1e-4


def test_the_policy_is_that_of_the_platform():
    with xla_amp.explain() as report, xla_amp.autocast(DEVICE):
        torch.nn.functional.linear(torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE)).cpu()
    assert {record.used[0] for record in report.records if record.operation == "linear"} == {
        "float16" if GPU else "bfloat16"
    }


def test_a_function_of_jax_and_its_gradient():
    x, w = (jax.random.normal(jax.random.key(seed), (64, 64)) for seed in (0, 1))

    def loss(w):
        return jnp.mean(jnp.tanh(x @ w / 8) ** 2)

    low, wide = (jax.jit(jax.grad(f))(w) for f in (xla_amp.jax.autocast(loss, dtype=jnp.bfloat16), loss))
    error = float(jnp.linalg.norm(low - wide) / jnp.linalg.norm(wide))
    assert low.dtype == jnp.float32
    assert 1e-4 < error < 2e-2


def test_a_module_of_stablehlo_runs_after_its_conversion():
    x, w = (jax.random.normal(jax.random.key(seed), (32, 32)) for seed in (0, 1))
    exported = jax.export.export(jax.jit(lambda a, b: jnp.tanh(a @ b)))(x, w)
    converted = xla_amp.stablehlo.autocast(exported)
    error = np.abs(np.asarray(converted.program.exported.call(x, w)) - np.tanh(np.asarray(x) @ np.asarray(w))).max()
    assert 1e-5 < error < 5e-2


def test_arrays_of_jax_and_cuda_tensors_of_torch():
    tensor = torch.arange(12.0, device=DEVICE).reshape(3, 4) * 2
    array = xla_amp.jax.to_jax(tensor)
    np.testing.assert_array_equal(np.asarray(array), np.arange(12.0).reshape(3, 4) * 2)
    assert torch.equal(xla_amp.jax.from_jax(array + 1).cpu(), tensor.cpu() + 1)
    if GPU and torch.cuda.is_available():
        moved = torch.arange(6.0, device="cuda").to(DEVICE)
        assert (moved * 2).cpu().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        back = torch.from_dlpack(array)
        assert back.device.type == "cuda"
        assert torch.equal(back.cpu(), tensor.cpu())


@pytest.mark.parametrize("name", [form.name for form in sdpa.forms_of(PLATFORM)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_forms_of_attention_against_float64(name, masked, dtype):
    form = next(form for form in sdpa.forms_of(PLATFORM) if form.name == name)
    shape = (2, 4, 256, 64)
    query, key, value, grad = (
        jax.random.normal(each, shape, jnp.float32).astype(dtype) for each in jax.random.split(jax.random.key(0), 4)
    )
    mask = jax.random.bernoulli(jax.random.key(5), 0.7, (2, 1, 256, 256)) if masked else None

    settings = {"bias": mask, "causal": True, "platform": PLATFORM}
    objection = form.objection(Attention(query=query, key=key, value=value, **settings))
    if objection is not None and form is not blocked.FORM:  # which is only slower here
        pytest.skip(objection)

    @jax.jit
    def both(query, key, value, grad):
        call = Attention(query=query, key=key, value=value, **settings)
        output, logsumexp = form.forward(call)
        gradients = form.backward(call, grad, output.astype(dtype), logsumexp, False)
        return output, *gradients[:3]

    q, k, v, g = (np.asarray(x, np.float64) for x in (query, key, value, grad))
    seen = np.tril(np.ones((256, 256), bool)) & (True if mask is None else np.asarray(mask))
    weights = np.where(seen, np.exp(q @ k.swapaxes(-1, -2) / 8), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    output = weights @ v
    dscores = weights * (g @ v.swapaxes(-1, -2) - (g * output).sum(-1, keepdims=True)) / 8
    wanted = (output, dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g)
    for of, got, want in zip(("output", "query", "key", "value"), both(query, key, value, grad), wanted, strict=True):
        error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
        assert error < (2e-3 if dtype == jnp.float16 else 1.6e-2), (of, error)


def test_the_device_computes_attention_by_a_kernel_on_a_gpu():
    shape = (2, 4, 512, 64)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(3))
    got = torch.nn.functional.scaled_dot_product_attention(*(x.to(DEVICE) for x in (query, key, value)), is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), is_causal=True)
    assert (got.cpu().double() - want).abs().max() < 2e-2
    text = execute.programs()[-1].optimized_hlo()
    assert ("cudnn$fmha" in text) is GPU
    form = forms.chosen("scaled_dot_product_attention")[-1].form
    assert form in {"gpu": ("cudnn",), "tpu": ("splash",), "cpu": ("full matrix",)}[PLATFORM]


def test_memory_is_given_back():
    stats = torch.get_device_module(DEVICE)
    xla_amp.sync(wait=True)
    before = stats.memory_allocated()
    tensor = torch.ones(1 << 20, device=DEVICE) * 2
    xla_amp.sync(wait=True)
    during = stats.memory_allocated()
    del tensor
    xla_amp.sync(wait=True)
    assert during - before >= 4 << 20
    assert stats.memory_allocated() - before < 1 << 20


ALONE = """
import json, torch, xla_amp
from xla_amp import xla_model as xm
def main(rank):
    value = xm.all_reduce("sum", torch.full((4,), rank + 1.0, device=xla_amp.xla_device()))
    print(json.dumps([xm.xrt_world_size(), value.cpu().tolist()]), flush=True)
if __name__ == "__main__":
    xla_amp.launch(main, nprocs=1)
"""


@pytest.mark.skipif(PLATFORM == "tpu", reason="a TPU serves one process, which is that of the tests")
def test_one_process_that_was_launched(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "alone.py")], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1, [1.0] * 4]

"""Arrays and functions between JAX and the lazy device: no copies, nothing foreign overwritten, one program a step."""

from __future__ import annotations

import copy
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from calls import jax_events
from contractions import contractions

import xla_amp
from xla_amp import lazy as engine
from xla_amp import lowering
from xla_amp.errors import DeviceError, EngineError, UnsupportedDtypeError
from xla_amp.jax import autocast
from xla_amp.jax.loss_scale import LossScale, value_and_grad
from xla_amp.lazy.interop.arrays import from_jax, to_jax
from xla_amp.lazy.interop.functional import functional
from xla_amp.lazy.interop.torch_function import torch_function
from xla_amp.lazy.programs import execute

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int8", "bool", "complex64", "float8_e5m2"]


def address(array):
    return array.unsafe_buffer_pointer()


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_there_and_back_is_the_same_memory(device, name):
    host = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(getattr(torch, name))
    tensor = host.to(device)
    array = to_jax(tensor)
    assert array.dtype.name == name
    assert address(to_jax(from_jax(array))) == address(array) == address(to_jax(tensor))
    back = from_jax(array)
    assert back.dtype is host.dtype
    np.testing.assert_array_equal(back.cpu().to(torch.complex64), host.to(torch.complex64))


def test_what_was_recorded_is_run_and_nobody_waits(device):
    x = torch.ones(3, device=device)
    y = x * 2
    xla_amp.metrics.reset()
    array = to_jax(y)
    assert [xla_amp.metrics()[name] for name in ("executions", "host_syncs")] == [1, 0]
    np.testing.assert_array_equal(array, [2, 2, 2])


def test_views_and_gradients_and_numbers(device):
    x = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
    np.testing.assert_array_equal(to_jax(x.T), np.arange(6.0).reshape(2, 3).T)
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    assert (torch.ones(2, dtype=torch.bfloat16, device=device) * from_jax(weak)).tolist() == [2.0, 2.0]
    with jax.enable_x64(True):
        assert from_jax(jnp.arange(3)).dtype is torch.int64


@pytest.mark.parametrize("lent", [True, False], ids=["lent", "from outside"])
def test_an_array_that_another_holds_is_never_overwritten(device, lent):
    if lent:
        x = torch.arange(1000.0, device=device)
        held = to_jax(x)
    else:
        held = jnp.arange(1000.0) + 0
        x = from_jax(held.addressable_shards[0].data)  # another object, the same memory
        gc.collect()
    for _ in range(3):
        x.add_(1)
        xla_amp.sync()
    assert not held.is_deleted()
    np.testing.assert_array_equal(held, np.arange(1000.0))
    np.testing.assert_array_equal(x.cpu(), np.arange(1000.0) + 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: to_jax(torch.ones(2)), DeviceError, "got one on cpu"),
        (lambda: from_jax(np.ones(2)), TypeError, "expected a concrete jax.Array, got ndarray"),
        (lambda: jax.jit(from_jax)(jnp.ones(2)), TypeError, "functional"),
        (lambda: from_jax(jax.random.key(0)), UnsupportedDtypeError, "no counterpart in torch"),
        (lambda: from_jax(jnp.ones(2, jnp.int4)), UnsupportedDtypeError, "int4"),
        (lambda: functional(abs), TypeError, r"torch\.nn\.Module, got builtin"),
        (lambda: torch_function(3), TypeError, "JAX function, got int"),
        (lambda: torch_function(lambda x: x)(torch.ones(2)), TypeError, r"lambda.* got one of shape \[2\] on cpu"),
        (lambda: torch_function(lambda x: x)(torch.ones(2, device="jax"), [torch]), TypeError, "takes|hashable"),
        (lambda: torch_function(lambda x: "text")(torch.ones(2, device="jax")), TypeError, "."),
    ],
)
def test_misuse_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_donated_array_is_refused(device):
    x = jnp.arange(4.0) + 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(DeviceError, match="was donated"):
        from_jax(x)


# -- a JAX function inside a torch step -------------------------------------------------------------------------------


def swiglu(x, weights, *, beta):
    gate, up = weights["gate"], weights["up"]
    return jax.nn.silu(beta * (x @ gate)) * (x @ up)


def torch_swiglu(x, weights, *, beta):
    return torch.nn.functional.silu(beta * (x @ weights["gate"])) * (x @ weights["up"])


def recurrent(x, w):
    def step(h, row):
        h = jnp.tanh(row @ w + h)
        return h, h

    return jax.lax.scan(step, jnp.zeros(w.shape[1], x.dtype), x)[1]


def torch_recurrent(x, w):
    h, hs = torch.zeros(w.shape[1], dtype=x.dtype), []
    for row in x:
        h = torch.tanh(row @ w + h)
        hs.append(h)
    return torch.stack(hs)


def normal(shape, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


FUNCTIONS = {
    "swiglu": (
        swiglu,
        torch_swiglu,
        lambda: (normal((5, 4), 0), {"gate": normal((4, 3), 1), "up": normal((4, 3), 2)}),
        {"beta": 1.5},
    ),
    "scan": (recurrent, torch_recurrent, lambda: (normal((6, 4), 3), normal((4, 3), 4)), {}),
    "norm": (lambda x: x / jnp.linalg.norm(x), lambda x: x / torch.linalg.norm(x), lambda: (normal((7,), 5),), {}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jax_function_has_the_gradients_of_float64(device, name):
    fn, reference, make, options = FUNCTIONS[name]
    exact = jax.tree.map(lambda t: t.clone().requires_grad_(), make())
    ours = jax.tree.map(lambda t: t.float().to(device).requires_grad_(), make())
    expected = reference(*exact, **options)
    result = torch_function(fn)(*ours, **options)
    np.testing.assert_allclose(result.detach().cpu(), expected.detach(), rtol=2e-5, atol=2e-6)
    weights = normal(expected.shape, 9)
    (expected * weights).sum().backward()
    (result * weights.float().to(device)).sum().backward()
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(mine.grad.cpu(), theirs.grad, rtol=5e-5, atol=5e-6)


def test_derivatives_of_any_order(device):
    f = torch_function(lambda x, factor: factor * jnp.sin(x))
    x = torch.tensor([0.3, 1.1], device=device, requires_grad=True)
    y, expected = f(x, 2.0), [2 * np.cos([0.3, 1.1]), -2 * np.sin([0.3, 1.1]), -2 * np.cos([0.3, 1.1])]
    for value in expected:
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        np.testing.assert_allclose(y.detach().cpu(), value, rtol=1e-5)


def test_structures_integers_and_constants(device):
    table = jnp.arange(12.0).reshape(4, 3)

    @torch_function
    def look(rows, options, scale=1.0, axis=0):
        picked = options["table"][rows] * scale
        return {"picked": picked, "where": (jnp.argmax(picked, axis), None)}

    rows = torch.tensor([2, 0], device=device)
    out = look(rows, {"table": table}, scale=3.0, axis=1)
    np.testing.assert_array_equal(out["picked"].cpu(), 3 * np.asarray(table)[[2, 0]])
    assert out["where"][0].tolist() == [2, 2]
    assert out["where"][1] is None
    assert out["where"][0].dtype is torch.int32  # JAX's 64-bit types are off
    weight = from_jax(table).requires_grad_()
    out = look(rows, {"table": weight}, scale=2.0, axis=1)
    assert not out["where"][0].requires_grad
    out["picked"].sum().backward()
    assert weight.grad.sum(1).tolist() == [6.0, 0.0, 6.0, 0.0]


def test_a_training_step_with_a_jax_function_is_one_program(device):
    """Loss for loss equal to the same step on the CPU, with one executable, no waiting and no new compilation."""

    def run(where, gated):
        torch.manual_seed(0)
        layer, head = torch.nn.Linear(4, 8), torch.nn.Linear(3, 1)
        weights = torch.nn.ParameterDict({"gate": normal((8, 3), 1).float(), "up": normal((8, 3), 2).float()})
        model = torch.nn.ModuleList([layer, head, weights]).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        x, y = normal((16, 4), 3).float().to(where), normal((16, 1), 4).float().to(where)
        losses, counts = [], []
        for number in range(6):
            xla_amp.metrics.reset()
            optimizer.zero_grad()
            parts = {name: weights[name] for name in ("gate", "up")}
            loss = ((head(gated(layer(x), parts, beta=1.0 + 0.1 * number)) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            xla_amp.sync()
            counts.append(tuple(xla_amp.metrics()[name] for name in ("executions", "host_syncs", "compilations")))
            losses.append(loss.detach())
        return [loss.item() for loss in losses], counts

    ours, counts = run(device, torch_function(swiglu))
    expected, _ = run("cpu", torch_swiglu)
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    assert counts[2:] == [(1, 0, 0)] * 4


def test_autocast_goes_around_the_jax_function(device):
    x = normal((8, 6), 0).float().to(device).requires_grad_()
    w = {"gate": normal((6, 3), 1).float().to(device), "up": normal((6, 3), 2).float().to(device)}
    result = torch_function(autocast(swiglu))(x, w, beta=1.0)
    result.sum().backward()
    xla_amp.sync()
    assert "bf16" in execute.programs()[-1].lower().as_text()
    expected = torch_swiglu(normal((8, 6), 0), {"gate": normal((6, 3), 1), "up": normal((6, 3), 2)}, beta=1.0)
    np.testing.assert_allclose(result.detach().cpu(), expected, atol=3e-2 * float(expected.abs().max()))


# -- a torch module inside a JAX function -----------------------------------------------------------------------------


def dtypes_of_contractions(fn, *args):
    return {dtype for pair in contractions(fn, *args) for dtype in pair}


class Block(torch.nn.Module):
    """An encoder's layer and a projection that is used twice, under two names; the result is a structure."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.out = self.again = torch.nn.Linear(16, 16)

    def forward(self, x):
        return {"y": x + self.again(self.out(self.layer(x))), "length": x.shape[1]}


def block_case():
    torch.manual_seed(1)
    module = Block()
    return module, copy.deepcopy(module).double(), normal((2, 5, 16), 0)


def loss_of(fn):
    return lambda params, x: jnp.mean(fn(params, x)["y"] ** 2)


def exact_loss(exact, x):
    loss = (exact(x)["y"] ** 2).mean()
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in exact.named_parameters()}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("where", ["jax", "cpu"])
def test_a_module_has_the_gradients_of_float64(device, transform, where):
    module, exact, x = block_case()
    params, fn = functional(module.to(where))
    value, grads = transform(jax.value_and_grad(loss_of(fn)))(params, jnp.asarray(x, jnp.float32))
    expected, gradients = exact_loss(exact, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert set(grads) == set(gradients)
    for name in gradients:
        assert grads[name].dtype == jnp.float32
        np.testing.assert_allclose(grads[name], gradients[name], rtol=2e-4, atol=2e-6)


def test_a_module_under_autocast_scaling_and_a_scan(device):
    module, exact, x = block_case()
    params, fn = functional(module.to(device))
    x = jnp.asarray(x, jnp.float32)
    step = value_and_grad(autocast(loss_of(fn)))
    assert dtypes_of_contractions(step, LossScale.dynamic(), params, x) == {"bf16"}
    assert dtypes_of_contractions(value_and_grad(loss_of(fn)), LossScale.dynamic(), params, x) == {"f32"}
    out = jax.jit(step)(LossScale.dynamic(), params, x)
    expected, gradients = exact_loss(exact, torch.from_numpy(np.asarray(x, np.float64)))
    np.testing.assert_allclose(out.value, expected, rtol=2e-2)
    for name in gradients:
        scale = abs(gradients[name]).max() + 1e-3
        np.testing.assert_allclose(out.grads[name], gradients[name], atol=5e-2 * scale)

    def train(params, _):
        grads = jax.grad(loss_of(fn))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss_of(fn)(params, x)

    _, losses = jax.jit(lambda p: jax.lax.scan(train, p, None, length=4))(params)
    assert bool((jnp.diff(losses) < 0).all())


def test_torch_s_own_region_counts_as_well(device, low_of):
    module = torch.nn.Linear(8, 8).to(device)
    params, fn = functional(module)
    assert address(params["weight"]) == address(to_jax(module.weight))  # not copied
    x = jnp.ones((4, 8))
    with xla_amp.autocast(device):
        low = fn(params, x)
    assert f"torch.{low.dtype}" == str(low_of(device))
    assert fn(params, x).dtype == jnp.float32
    with xla_amp.autocast(device):
        found = dtypes_of_contractions(jax.grad(lambda p: fn(p, x).astype(jnp.float32).sum()), params)
    assert found == {"bf16" if low.dtype == jnp.bfloat16 else "f16"}


def test_buffers_are_values_too(device):
    twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    module = copy.deepcopy(twin).to(device)
    params, fn = functional(module)
    x = normal((6, 3), 0).float()
    out, buffers = jax.jit(lambda p, b, x: fn(p, x, buffers=b))(params, fn.buffers, jnp.asarray(x))
    np.testing.assert_allclose(out, twin(x).detach(), rtol=1e-4, atol=1e-5)
    for name, value in twin.named_buffers():
        np.testing.assert_allclose(buffers[name], value, rtol=1e-5, atol=1e-6)
    assert module[1].num_batches_tracked.item() == 0  # pure: the module is as it was


def test_dropout_draws_from_the_key(device):
    module = torch.nn.Dropout(0.5)
    _, fn = functional(module)
    draw = jax.jit(lambda x, key: fn({}, x, rng=key))
    one, same, other = (draw(jnp.ones(256), jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert 0.3 < float((one == 0).mean()) < 0.7
    gradient = jax.jit(jax.grad(lambda x: fn({}, x, rng=jax.random.key(0)).sum()))(jnp.ones(256))
    np.testing.assert_array_equal(gradient, one)
    with pytest.raises(TypeError, match="rng=key"):
        fn({}, jnp.ones(4))


def test_the_device_goes_on_as_if_nothing_had_happened(device):
    x = torch.ones(4, device=device)
    xla_amp.sync()
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3)).to(device)
    torch.manual_seed(5)
    expected = torch.rand(3, device=device).cpu()
    torch.manual_seed(5)
    y = x + 1
    params, fn = functional(module)
    jax.grad(lambda p: fn(p, jnp.ones((2, 4)), rng=jax.random.key(0)).sum())(params)
    np.testing.assert_array_equal(torch.rand(3, device=device).cpu(), expected)
    assert y.tolist() == [2.0] * 4


@pytest.mark.parametrize("look", [lambda x: x.sum() > 0, lambda x: x], ids=["computed", "argument"])
def test_a_module_that_looks_at_values_is_refused(device, look):
    module = torch.nn.Identity()
    module.forward = lambda x: x * look(x).item()
    _, fn = functional(module)
    with pytest.raises(EngineError, match="looked at a value"):
        fn({}, jnp.ones(()))
    assert torch.ones(2, device=device).sum().item() == 2.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fn, p: fn({}, jnp.ones(3)), r"params .* missing \['bias', 'weight'\]"),
        (lambda fn, p: fn({**p, "extra": 1}, jnp.ones(3)), r"not known \['extra'\]"),
        (lambda fn, p: fn(p, jnp.ones(3), buffers={"mean": 1}), r"buffers .* not known \['mean'\]"),
        (lambda fn, p: fn(p, torch.ones(3)), r"takes arrays, got a tensor of shape \[3\] on cpu"),
    ],
)
def test_arguments_that_do_not_fit_the_module_are_named(device, call, words):
    params, fn = functional(torch.nn.Linear(3, 1))
    with pytest.raises(TypeError, match=words):
        call(fn, params)


# -- JAX code of the user's own: its 64-bit switch, its caches and its arrays are left alone ---------------------------


def _switch() -> tuple[bool, Any, Any]:
    return jax.config.jax_enable_x64, jnp.ones(3).dtype, jnp.asarray(1).dtype


def test_the_64_bit_switch_is_left_alone(device: torch.device) -> None:
    before = _switch()
    assert before[1] == jnp.float32
    seen = []
    x = torch.arange(3).to(device).double().requires_grad_()
    assert x.dtype is torch.float64
    seen.append(_switch())
    y = (x * 0.1).sum()
    y.register_hook(lambda g: seen.append(_switch()))
    y.backward()
    seen.append(_switch())
    engine.sync()
    assert x.grad.dtype is torch.float64
    assert x.grad.tolist() == [0.1] * 3  # not rounded to float32 on the way
    seen.append(_switch())
    assert seen == [before] * 4


def test_the_64_bit_switch_survives_an_error(device: torch.device) -> None:
    library = torch.library.Library("lazy_users", "FRAGMENT")
    library.define("breaks(Tensor x) -> Tensor")
    library.impl("breaks", torch.empty_like, "Meta")
    inside = []

    @lowering.register("lazy_users::breaks", override=True)
    def breaks(x: Any) -> Any:
        inside.append(jnp.ones(1).dtype)
        raise ValueError

    kept = torch.ops.lazy_users.breaks(torch.ones(3).to(device))
    with pytest.raises(RuntimeError):
        engine.sync()
    assert set(inside) == {jnp.dtype(jnp.float64)}  # the twin: a lowering does see 64-bit types
    assert _switch()[:2] == (False, jnp.float32)
    del kept


def test_the_users_switch_builds_nothing_anew(device: torch.device) -> None:
    x = torch.ones(3, 19).to(device)

    def run() -> None:
        kept = (x * 2.5).sum(0)
        engine.sync()
        assert kept.shape == (19,)

    def built(events: list[str]) -> list[str]:
        return [event for event in events if "trace" in event or "compile" in event]

    run()
    with jax_events() as events:
        for switch in (
            jax.enable_x64(True),
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
        ):
            with switch:
                run()
        assert built(events) == []
        jax.jit(lambda x: x + 1)(1.0)
        assert built(events) != []  # the twin: JAX reports what it builds


def test_jax_random_state_and_defaults_are_left_alone(device: torch.device) -> None:
    before = {name: getattr(jax.config, name) for name in ("jax_default_prng_impl", "jax_threefry_partitionable")}
    with jax.default_prng_impl("rbg"):
        torch.manual_seed(0)
        a = torch.randn(4, device=device).tolist()
        assert jax.random.key(0).dtype == jax.random.key(1, impl="rbg").dtype
    torch.manual_seed(0)
    assert torch.randn(4, device=device).tolist() == a
    assert {name: getattr(jax.config, name) for name in before} == before

"""Fused optimizer steps against torch's own kernels and optimizers on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import check, run, sample, together, untested

from xla_amp.lowering.training import optim

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def tensors(dtype: torch.dtype, seed: int, *, positive: bool = False) -> list[torch.Tensor]:
    values = [sample(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(((3, 4), (5,)))]
    return [value.abs() for value in values] if positive else values


def options(dtype: torch.dtype) -> dict[str, Any]:
    # torch's bfloat16 kernels round in between (and SGD's reads momentum as if it were float32): float64 instead
    return {"wide": True, "rtol": 2.0**-7, "atol": 2.0**-7} if dtype is BF16 else {}


def scaling(scale: float | None, found_inf: float | None) -> dict[str, torch.Tensor | None]:
    return {
        "grad_scale": None if scale is None else torch.tensor(scale),
        "found_inf": None if found_inf is None else torch.tensor(found_inf),
    }


SCALINGS = [(None, None), (4.0, 0.0), (4.0, 1.0)]


@together("dtype", [F64, F32, BF16], ids=str)
@together(
    ("momentum", "dampening", "nesterov", "first"),
    [(0.0, 0.0, False, False), (0.9, 0.3, False, False), (0.9, 0.0, True, False), (0.9, 0.3, False, True)],
)
def test_sgd(momentum: float, dampening: float, nesterov: bool, first: bool, dtype: torch.dtype) -> None:
    for (scale, found_inf), maximize in zip(SCALINGS, (False, True, False), strict=True):
        if first and found_inf:
            continue  # torch leaves the buffers uninitialized; see below
        buffers = tensors(dtype, 50) if momentum else []
        check(
            "_fused_sgd_",
            *(tensors(dtype, 1), tensors(dtype, 20), buffers),
            weight_decay=0.1,
            momentum=momentum,
            lr=0.1,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
            is_first_step=first,
            **scaling(scale, found_inf),
            **options(dtype),
        )


@together("dtype", [F64, F32, BF16], ids=str)
@together("name", ["_fused_adam_", "_fused_adamw_"])
@together("amsgrad", [False, True])
def test_adam(name: str, amsgrad: bool, dtype: torch.dtype) -> None:
    for (scale, found_inf), step, maximize in zip(SCALINGS, (1, 7, 1000), (False, True, False), strict=True):
        check(
            name,
            *(tensors(dtype, 1), tensors(dtype, 20), tensors(dtype, 50), tensors(dtype, 70, positive=True)),
            tensors(dtype, 90, positive=True) if amsgrad else [],
            [torch.tensor(float(step))] * 2,
            lr=0.01,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=amsgrad,
            maximize=maximize,
            **scaling(scale, found_inf),
            **options(dtype),
        )


@together("dtype", [F64, F32, BF16], ids=str)
def test_adagrad(dtype: torch.dtype) -> None:
    for (scale, found_inf), maximize in zip(SCALINGS, (False, True, False), strict=True):
        check(
            "_fused_adagrad_",
            *(tensors(dtype, 1), tensors(dtype, 20), tensors(dtype, 70, positive=True), [torch.tensor(7.0)] * 2),
            lr=0.01,
            lr_decay=0.1,
            weight_decay=0.1,
            eps=1e-8,
            maximize=maximize,
            **scaling(scale, found_inf),
            **options(dtype),
        )


def test_learning_rate_as_a_tensor() -> None:
    sgd: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "is_first_step": False}
    lr = torch.tensor(0.1)
    check("_fused_sgd_.tensor_lr", tensors(F32, 1), tensors(F32, 20), [], lr=lr, nesterov=False, maximize=False, **sgd)
    adam: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    averages = (tensors(F32, 50), tensors(F32, 70, positive=True), [], [torch.tensor(3.0)] * 2)
    for name in ("_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"):
        check(name, tensors(F32, 1), tensors(F32, 20), *averages, lr=lr, maximize=False, **adam)
    adagrad = (tensors(F32, 70, positive=True), [torch.tensor(3.0)] * 2)
    check(
        "_fused_adagrad_.tensor_lr",
        *(tensors(F32, 1), tensors(F32, 20), *adagrad),
        lr=lr,
        lr_decay=0.0,
        weight_decay=0.0,
        eps=1e-10,
        maximize=False,
    )


def test_every_lowering_is_tested() -> None:
    kernels = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
    assert untested(["optim"], [], elsewhere=[n + end for n in kernels for end in ("", ".tensor_lr")]) == []


def test_skipped_step_changes_nothing_whatever_the_gradient() -> None:
    params, state = tensors(F32, 1), tensors(F32, 50, positive=True)
    grads = [torch.full_like(params[0], torch.inf), torch.full_like(params[1], torch.nan)]
    for flag in (1.0, 2.0):  # a sum of flags over devices counts as well
        written = run(
            "_fused_adam_",
            *(params, grads, state, state, [], [torch.tensor(1.0)] * 2),
            **{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8},
            **{"amsgrad": False, "maximize": False},
            **scaling(4.0, flag),
        )
        for got, want in zip(written, [*params, *grads, *state, *state], strict=True):
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want))


def test_skipped_first_step_leaves_momentum_zero() -> None:
    params, garbage = tensors(F32, 1), [torch.full((3, 4), torch.nan), torch.full((5,), 1e30)]
    written = run(
        "_fused_sgd_",
        *(params, tensors(F32, 20), garbage),
        **{"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0},
        **{"nesterov": False, "maximize": False, "is_first_step": True},
        **scaling(None, 1.0),
    )
    assert all(torch.equal(got, want) for got, want in zip(written[:2], params, strict=True))
    assert all(torch.equal(buffer, torch.zeros_like(buffer)) for buffer in written[4:])


def test_no_decay_keeps_an_infinite_parameter_out_of_the_gradient() -> None:
    param = torch.tensor([torch.inf, 1.0])
    for decay in (0.0, 0):
        check(
            "_fused_sgd_",
            *([param], [torch.ones(2)], [torch.ones(2)]),
            **{"weight_decay": decay, "momentum": 0.9, "lr": 0.1, "dampening": 0.0},
            **{"nesterov": False, "maximize": False, "is_first_step": False},
        )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_bias_correction_keeps_its_digits(platform: str) -> None:
    # 1 - 0.9999**1 in float32 has 10 bits left
    param, grad, zero = jnp.ones(3, jnp.float32), jnp.full(3, 0.7, jnp.float32), jnp.zeros(3, jnp.float32)
    with jax.enable_x64(True):
        options = {"lr": np.float64(1e-3), "beta1": np.float64(0.9), "beta2": np.float64(0.9999), "eps": 0.0}
        betas = {name: options[name] for name in ("lr", "beta1", "beta2")}
        (corrections,) = optim.adam_corrections([jnp.float32(1)], jnp.float32, **betas, platform=platform)
        new = optim.adam_step(param, grad, zero, zero, None, corrections, **options)[0]
    # the first step is lr * sign(grad) whatever the betas are
    np.testing.assert_allclose(np.asarray(new), 1 - 1e-3, rtol=2e-7)
    corrected_in_float32 = np.sqrt(np.float32(1) - np.float32(0.9999))
    assert abs(corrected_in_float32 / np.sqrt(1e-4) - 1) > 5e-5


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_ten_steps_like_the_unfused_optimizer_in_float64(name: str, platform: str) -> None:
    """The reference shares no code with the fused kernels: torch.optim's plain loop over float64 parameters."""
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}
    settings |= {"momentum": 0.9, "dampening": 0.1} if name == "SGD" else {}
    parameter = torch.nn.Parameter(sample(6, dtype=F64))
    optimizer = getattr(torch.optim, name)([parameter], foreach=False, **settings)
    with jax.enable_x64(True):
        param = jnp.asarray(parameter.detach().numpy())
        state = [jnp.zeros(6), jnp.zeros(6)]
        for count in itertools.count(1):
            grad = sample(6, dtype=F64, seed=count)
            parameter.grad = grad.clone()
            optimizer.step()
            arguments = (param, jnp.asarray(grad.numpy()))
            if name == "SGD":
                param, state[0] = optim.sgd_step(*arguments, state[0], first=jnp.asarray(count == 1), **settings)
            elif name == "Adagrad":
                counts, decay = [jnp.float32(count)], settings["weight_decay"]
                ((rate,),) = optim.adagrad_rates(counts, jnp.float64, lr=settings["lr"], platform=platform)
                param, state[0] = optim.adagrad_step(*arguments, state[0], rate, weight_decay=decay)
            else:
                betas = {"lr": settings["lr"], "beta1": 0.9, "beta2": 0.999}
                counts = [jnp.float32(count)]
                (corrections,) = optim.adam_corrections(counts, jnp.float64, **betas, platform=platform)
                param, *state, _ = optim.adam_step(
                    *(*arguments, *state, None, corrections), **settings | betas, decoupled=name == "AdamW"
                )
            np.testing.assert_allclose(np.asarray(param), parameter.detach().numpy(), rtol=1e-9, atol=1e-9)
            if count == 10:
                break

"""Fused optimizer steps and the check of gradients against torch's own kernels on the CPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import check, compare, run, sample, together

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


# -- the check of gradients; the update of the scale is in tests/test_loss_scaling.py ---------------------------------

CHECK = "_amp_foreach_non_finite_check_and_unscale_"


def gradients(dtype: torch.dtype, bad: float | None) -> list[torch.Tensor]:
    grads = [sample(3, 4, dtype=dtype), sample(5, dtype=dtype, seed=1), sample(dtype=dtype, seed=2)]
    if bad is not None:
        grads[1][2] = bad
    return grads


@together("dtype", [BF16, torch.float16, F32, F64], ids=str)
@together("bad", [None, math.nan, -math.inf])
def test_check_and_unscale(dtype: torch.dtype, bad: float | None) -> None:
    for found in (0.0, 1.0):
        check(CHECK, gradients(dtype, bad), torch.tensor([found]), torch.tensor([0.125]))


def test_a_flag_that_is_set_stays_set() -> None:
    grads, found = gradients(torch.float32, None), torch.tensor([1.0])
    assert run(CHECK, grads, found, torch.tensor(1.0))[-1].item() == 1


def test_float64_is_checked_as_float64() -> None:
    check(CHECK, [torch.tensor([1e300], dtype=torch.float64)], torch.tensor([0.0]), torch.tensor([0.5]))


def test_unscaling_rounds_once() -> None:
    # a bfloat16 product of the bfloat16 inverse 0.333984 would be off by up to two places
    grads, found, inverse = [sample(64, dtype=torch.bfloat16)], torch.tensor([0.0]), torch.tensor([1 / 3])
    got = run(CHECK, grads, found, inverse)[0]
    compare(got, (grads[0].double() / 3).to(torch.bfloat16), rtol=0, atol=0)
    assert not torch.equal(grads[0] * inverse.to(torch.bfloat16), got)

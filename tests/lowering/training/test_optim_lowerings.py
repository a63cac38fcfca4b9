"""Fused optimizer steps and the check of gradients against torch's own kernels on the CPU."""

from __future__ import annotations

import itertools
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


OPTIONS: dict[str, dict[str, Any]] = {
    "_fused_sgd_": {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False},
    "_fused_adam_": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False},
    "_fused_adamw_": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False},
    "_fused_adagrad_": {"lr_decay": 0.1, "eps": 1e-8},
}


def step(name: str, dtype: torch.dtype, count: float = 7.0, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    """Lists of tensors and options of a fused step."""
    options = {"lr": 0.01, "weight_decay": 0.1, "maximize": False, **OPTIONS[name], **changes}
    lists = [tensors(dtype, 1), tensors(dtype, 20)]
    if name == "_fused_sgd_":
        return [*lists, tensors(dtype, 50) if options["momentum"] else []], options
    if name != "_fused_adagrad_":
        lists += [tensors(dtype, 50), tensors(dtype, 90, positive=True) if options["amsgrad"] else []]
    return [*lists[:3], tensors(dtype, 70, positive=True), *lists[3:], [torch.tensor(count)] * 2], options


def scaling(scale: float | None, found_inf: float | None) -> dict[str, torch.Tensor | None]:
    return {
        "grad_scale": None if scale is None else torch.tensor(scale),
        "found_inf": None if found_inf is None else torch.tensor(found_inf),
    }


ROWS: list[tuple[str, dict[str, Any]]] = [
    ("_fused_sgd_", {}),
    ("_fused_sgd_", {"momentum": 0.9, "dampening": 0.3}),
    ("_fused_sgd_", {"momentum": 0.9, "nesterov": True}),
    ("_fused_sgd_", {"momentum": 0.9, "dampening": 0.3, "is_first_step": True}),
    *((name, {"amsgrad": amsgrad}) for name in ("_fused_adam_", "_fused_adamw_") for amsgrad in (False, True)),
    ("_fused_adagrad_", {}),
]


def test_as_torch() -> None:
    for name, changes in ROWS:
        for count, maximize, given in ((1.0, False, scaling(None, None)), (1000.0, True, scaling(4.0, 0.0))):
            lists, options = step(name, F64, count, maximize=maximize, **changes, **given)
            check(name, *lists, **options)
        # torch's bfloat16 kernels round in between (and SGD's reads momentum as if it were float32): float64 instead
        for maximize, found_inf in ((True, 0.0), (False, 1.0)):
            if found_inf and changes.get("is_first_step"):
                continue  # torch leaves the buffers uninitialized; see below
            lists, options = step(name, BF16, maximize=maximize, **changes, **scaling(4.0, found_inf))
            check(name, *lists, **options, wide=True, rtol=2.0**-7, atol=2.0**-7)


@together(
    "name", ["_fused_sgd_.tensor_lr", "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr", "_fused_adagrad_.tensor_lr"]
)
def test_learning_rate_as_a_tensor(name: str) -> None:
    lists, options = step(name.partition(".")[0], F32, lr=torch.tensor(0.1))
    check(name, *lists, **options)


def test_skipped_step_changes_nothing_whatever_the_gradient() -> None:
    for flag in (1.0, 2.0):  # a sum of flags over devices counts as well
        (params, grads, *state, counts), options = step("_fused_adam_", F32, amsgrad=True, **scaling(4.0, flag))
        grads = [torch.full_like(params[0], torch.inf), torch.full_like(params[1], torch.nan)]
        written = run("_fused_adam_", params, grads, *state, counts, **options)
        for got, want in zip(written, [*params, *grads, *itertools.chain(*state)], strict=True):
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want))


def test_skipped_first_step_leaves_momentum_zero() -> None:
    garbage = [torch.full((3, 4), torch.nan), torch.full((5,), 1e30)]
    (params, grads, _), options = step("_fused_sgd_", F32, momentum=0.9, is_first_step=True, **scaling(None, 1.0))
    written = run("_fused_sgd_", params, grads, garbage, **options)
    assert all(torch.equal(got, want) for got, want in zip(written[:2], params, strict=True))
    assert all(torch.equal(buffer, torch.zeros_like(buffer)) for buffer in written[4:])


def test_no_decay_keeps_an_infinite_parameter_out_of_the_gradient() -> None:
    for decay in (0.0, 0):
        _, options = step("_fused_sgd_", F32, weight_decay=decay, momentum=0.9)
        check("_fused_sgd_", [torch.tensor([torch.inf, 1.0])], [torch.ones(2)], [torch.ones(2)], **options)


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


CHECK = "_amp_foreach_non_finite_check_and_unscale_"


def gradients(dtype: torch.dtype, bad: float | None) -> list[torch.Tensor]:
    grads = [sample(3, 4, dtype=dtype), sample(5, dtype=dtype, seed=1), sample(dtype=dtype, seed=2)]
    if bad is not None:
        grads[1][2] = bad
    return grads


@together("dtype", [BF16, torch.float16, F32, F64])
@together("bad", [None, math.nan, -math.inf])
def test_check_and_unscale(dtype: torch.dtype, bad: float | None) -> None:
    for found in (0.0, 1.0):
        check(CHECK, gradients(dtype, bad), torch.tensor([found]), torch.tensor([0.125]))


def test_float64_is_checked_as_float64() -> None:
    check(CHECK, [torch.tensor([1e300], dtype=torch.float64)], torch.tensor([0.0]), torch.tensor([0.5]))


def test_unscaling_rounds_once() -> None:
    # a bfloat16 product of the bfloat16 inverse 0.333984 would be off by up to two places
    grads, found, inverse = [sample(64, dtype=torch.bfloat16)], torch.tensor([0.0]), torch.tensor([1 / 3])
    got = run(CHECK, grads, found, inverse)[0]
    compare(got, (grads[0].double() / 3).to(torch.bfloat16), rtol=0, atol=0)
    assert not torch.equal(grads[0] * inverse.to(torch.bfloat16), got)

"""Activations and their gradients against torch on the CPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from harness import check, check_rows, lowering_of, row, run, sample

KINKS = torch.tensor(
    [-5.0, -4.0, -3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 40.0, -40.0, math.inf, math.nan]
)


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """Ordinary numbers, and numbers at which a formula changes."""
    return torch.cat([sample(16, dtype=torch.float64, low=-5, high=5), KINKS.double()]).to(dtype).reshape(4, 8)


def finite(dtype: torch.dtype) -> torch.Tensor:
    # torch's results at NaN and infinity depend on whether its kernel used vector instructions.
    return torch.nan_to_num(inputs(dtype), nan=1.5, posinf=2.5)


def grad(dtype: torch.dtype) -> torch.Tensor:
    return sample(4, 8, dtype=dtype, seed=1)


def forward(*numbers: Any) -> Any:
    return lambda dtype: (inputs(dtype), *numbers)


def tame(*numbers: Any) -> Any:
    return lambda dtype: (finite(dtype), *numbers)


def backward(*numbers: Any) -> Any:
    return lambda dtype: (grad(dtype), finite(dtype), *numbers)


def of_result(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return grad(dtype), torch.sigmoid(finite(torch.float64)).to(dtype)


def glu_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.glu(finite(torch.float64), 1).to(dtype)


def channels(dtype: torch.dtype) -> torch.Tensor:
    return sample(8, dtype=dtype, seed=2).expand(4, 8).contiguous()


BOTH_WAYS: dict[str, tuple[Any, ...]] = {
    "hardshrink": (0.5,),
    "hardswish": (),
    "hardtanh": (-1.0, 3.0),
    "silu": (),
    "softplus": (2.0, 5.0),
    "softshrink": (1.0,),
    "threshold": (0.5, 2.0),
}
"""Activation -> its numbers; the gradients have the same ones, but for those below."""

ROWS = [
    *(row(name, "fb", forward(*numbers), wide=True) for name, numbers in BOTH_WAYS.items()),
    *(
        row(f"{name}_backward", "fb", backward(*numbers), wide=True)
        for name, numbers in BOTH_WAYS.items()
        if name != "threshold"
    ),
    row("elu", "fb", forward(1.5, 2.0, 0.5), wide=True),
    row("elu_backward", "fb", lambda d: (grad(d), 1.5, 2.0, 0.5, False, finite(d)), wide=True),
    row("elu_backward", "fb", lambda d: (grad(d), 1.5, 2.0, 0.5, True, finite(d).clamp(min=-3)), wide=True),
    *(row("gelu", "fb", tame(), approximate=how, wide=True) for how in ("none", "tanh")),
    *(row("gelu_backward", "fb", backward(), approximate=how, wide=True) for how in ("none", "tanh")),
    row("glu_backward", "fb", lambda d: (sample(4, 4, dtype=d, seed=3), finite(d), 1), wide=True),
    row("glu_jvp", "f", lambda d: (glu_of(d), finite(d), sample(4, 8, dtype=d, seed=4), 1), wide=True),
    row("hardsigmoid", "fb", forward(), wide=True),
    row("hardsigmoid_backward", "fb", backward(), wide=True),
    row("leaky_relu", "fb", forward(0.2), wide=True),
    row("leaky_relu_backward", "fb", backward(0.2, False), wide=True),
    row("log_sigmoid_forward", "fb", forward(), wide=True),
    *(
        row(
            "logit_backward",
            "fb",
            lambda d, eps=eps: (grad(d), sample(4, 8, dtype=d, low=-0.5, high=1.5), eps),
            wide=True,
        )
        for eps in (None, 0.1)
    ),
    row("rrelu_with_noise_", "fb", lambda d: (finite(d), torch.zeros_like(finite(d)), 0.125, 0.25, False), wide=True),
    row("mish", "fb", tame(), wide=True),
    row("mish_backward", "fb", backward(), wide=True),
    *(row(f"{name}_backward", "fbc", of_result, wide=True) for name in ("sigmoid", "tanh")),
    *(row("threshold_backward", "fb", backward(number)) for number in (0, 0.5)),
    row("_prelu_kernel", "fb", lambda d: (inputs(d), channels(d)), wide=True),
    row("_prelu_kernel_backward", "fb", lambda d: (grad(d), finite(d), channels(d)), wide=True),
]


def test_as_torch() -> None:
    check_rows(ROWS)


def test_random_slopes() -> None:
    x, noise = sample(1000), torch.zeros(1000)
    y, slope = run("rrelu_with_noise", x, noise, 0.25, 0.5, True)[:2]
    negative = x <= 0
    assert torch.equal(y, x * slope)
    assert torch.equal(slope[~negative], torch.ones_like(slope[~negative]))
    assert 0.25 <= slope[negative].min() < 0.27
    assert 0.48 < slope[negative].max() < 0.5


def barriers(name: str, platform: str, dtype: Any, x: Any, *given: Any) -> list[list[Any]]:
    """What a gradient's program keeps from being recomputed: the dtypes of each barrier."""
    lowering = lowering_of(name)
    assert "platform" in lowering.supplies
    numbers = [jnp.float32(1.0) if isinstance(each, float) else each for each in given]

    def gradient(grad: Any, x: Any) -> Any:
        arguments = (*numbers, x) if name == "elu_backward" else (x, *numbers)
        return lowering.function(grad, *arguments, platform=platform)

    equations = jax.make_jaxpr(gradient)(jax.ShapeDtypeStruct((4, 8), dtype), jax.ShapeDtypeStruct((4, x), dtype)).eqns
    found = [each for each in equations if each.primitive.name == "optimization_barrier"]
    return [[x.aval.dtype for x in each.invars] for each in found]


SAVED: dict[str, tuple[Any, ...]] = {
    "gelu_backward": (8,),
    "elu_backward": (8, 1.0, 1.0, 1.0, False),
    "silu_backward": (8,),
    "glu_backward": (16, 1),
}
COMPARED: dict[str, tuple[Any, ...]] = {
    "hardsigmoid_backward": (8,),
    "hardtanh_backward": (8, 1.0, 1.0),
    "leaky_relu_backward": (8, 1.0, False),
    "threshold_backward": (8, 1.0),
}
"""Gradient -> features of the saved value, and further arguments."""


def test_the_gradient_of_gelu_keeps_its_digits_where_tanh_is_near_one() -> None:
    x = torch.linspace(-9, 9, 2001)
    check("gelu_backward", torch.ones_like(x), x, approximate="tanh", wide=True, rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("name", SAVED)
def test_saved_values_that_a_gradient_widens_stay_low(name: str) -> None:
    for dtype, platform in ((jnp.bfloat16, "tpu"), (jnp.float16, "gpu")):
        assert barriers(name, platform, dtype, *SAVED[name]) == [[dtype]]
    for dtype, platform in ((jnp.bfloat16, "cpu"), (jnp.float32, "tpu")):
        assert barriers(name, platform, dtype, *SAVED[name]) == []


@pytest.mark.parametrize("name", COMPARED)
def test_a_tpu_may_recompute_what_a_gradient_only_compares(name: str) -> None:
    found = [len(barriers(name, platform, jnp.bfloat16, *COMPARED[name])) for platform in ("cpu", "gpu", "tpu")]
    assert found == [0, 1, 0]

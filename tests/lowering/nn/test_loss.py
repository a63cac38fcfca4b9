"""Losses and their gradients against torch on the CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import check, check_rows, lowering_of, row, sample, together, untested

NONE, MEAN, SUM = range(3)
REDUCTIONS = (NONE, MEAN, SUM)


def pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target; differences at and around the kinks of the losses."""
    x, target = sample(4, 5, dtype=dtype), sample(4, 5, dtype=dtype, seed=1)
    x[0, :4] = target[0, :4] + torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=dtype)
    return x, target


def signs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, target = pair(dtype)
    return x, target.sign()


def grad(dtype: torch.dtype, reduction: int, *shape: int) -> torch.Tensor:
    return sample(*shape, dtype=dtype, seed=2) if reduction == NONE else sample(dtype=dtype, seed=2)


def probabilities(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, target = (torch.sigmoid(t.double()).to(dtype) for t in pair(torch.float64))
    x[1, :2] = torch.tensor([0.0, 1.0], dtype=dtype)
    return x, target


def elementwise(name: str, *parameters: float, make: Any = pair) -> list[Any]:
    rows = []
    for reduction in REDUCTIONS:
        rest = (reduction, *parameters)
        rows.append(row(name, "fb", lambda d, rest=rest: (*make(d), *rest), wide=True))
        rows.append(
            row(
                f"{name}_backward",
                "fb",
                lambda d, rest=rest: (grad(d, rest[0], 4, 5), *make(d), *rest),
                wide=True,
            )
        )
    return rows


def with_weight(make: Any, reduction: int, weighted: bool) -> Any:
    return lambda d: (*make(d), sample(5, dtype=d, low=0.1, seed=3) if weighted else None, reduction)


def bce_backward(reduction: int) -> Any:
    return lambda d: (grad(d, reduction, 4, 5), *probabilities(d), sample(5, dtype=d, low=0.1, seed=3), reduction)


def logits(reduction: int) -> Any:
    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        weights = [sample(5, dtype=dtype, low=0.1, seed=seed) for seed in (3, 4)]
        return pair(dtype)[0], probabilities(dtype)[1], *weights, reduction

    return make


# -- classification: two layouts, an ignored class, weights -----------------------------------------------------------

TARGETS = {
    "nll_loss": torch.tensor([1, 4, -100, 0]),
    "nll_loss2d": torch.tensor([[[0, 4, 2], [-100, 1, 1]], [[3, -100, 0], [2, 2, 4]]]),
}


def classified(name: str, dtype: torch.dtype, weighted: bool) -> tuple[Any, ...]:
    target = TARGETS[name]
    x = sample(target.shape[0], 5, *target.shape[1:], dtype=dtype)
    return x, target, sample(5, dtype=dtype, low=0.1, seed=3) if weighted else None


def nll(name: str, reduction: int, weighted: bool) -> list[Any]:
    def backward(dtype: torch.dtype) -> tuple[Any, ...]:
        x, target, weight = classified(name, dtype, weighted)
        total = torch.ops.aten.nll_loss_forward(torch.zeros(4, 5), TARGETS["nll_loss"], None, reduction, -100)[1]
        return grad(dtype, reduction, *target.shape), x, target, weight, reduction, -100, total.to(dtype)

    forward = lambda d: (*classified(name, d, weighted), reduction, -100)  # noqa: E731  (a row's maker)
    return [
        row(f"{name}_forward", "fb", forward, wide=True),
        row(f"{name}_backward", "fb", backward, wide=True),
    ]


LISTED = torch.tensor([[1, 2, -1, 0, 0], [0, -1, 1, 2, 3], [-1, 1, 1, 1, 1], [4, 3, 2, 1, 0]])


ROWS = [
    *elementwise("huber_loss", 1.0),
    *elementwise("huber_loss", 0.7),
    *elementwise("mse_loss"),
    *elementwise("smooth_l1_loss", 1.0),
    *elementwise("smooth_l1_loss", 0.3),
    *elementwise("soft_margin_loss", make=signs),
    row("smooth_l1_loss", "fb", lambda d: (*pair(d), MEAN, 0.0), wide=True),
    *(
        row("binary_cross_entropy", "fb", with_weight(probabilities, reduction, weighted), wide=True)
        for reduction in REDUCTIONS
        for weighted in (False, True)
    ),
    *(row("binary_cross_entropy_backward", "fb", bce_backward(reduction), wide=True) for reduction in REDUCTIONS),
    *(row("binary_cross_entropy_with_logits", "fb", logits(reduction), wide=True) for reduction in REDUCTIONS),
    *(r for name in TARGETS for reduction in REDUCTIONS for w in (False, True) for r in nll(name, reduction, w)),
]


def test_as_torch() -> None:
    check_rows(ROWS)


def test_every_lowering_has_a_row() -> None:
    database = [f"multi_margin_loss{end}" for end in ("", "_backward")]  # torch's, in tests/lazy/op_db
    database += [f"multilabel_margin_loss_{end}" for end in ("forward", "backward")]
    ctc = ("_ctc_loss.Tensor", "_ctc_loss_backward.Tensor")
    assert untested(["loss"], ROWS, elsewhere=[*database, *ctc]) == []


@together("reduction", REDUCTIONS)
def test_one_sample(reduction: int) -> None:
    x, weight = sample(5), sample(5, low=0.1, seed=3)
    for target in (torch.tensor(2), torch.tensor(-100)):
        check("nll_loss_forward", x, target, weight, reduction, -100)
        total = torch.ops.aten.nll_loss_forward(x, target, weight, reduction, -100)[1]
        check("nll_loss_backward", sample(seed=2), x, target, weight, reduction, -100, total)
    check("multi_margin_loss", x, torch.tensor([2]), 1, 1.0, None, reduction)
    check("multilabel_margin_loss_forward", x, LISTED[0], reduction)


def test_all_ignored_is_nan_for_the_mean() -> None:
    target = torch.full((4,), 3)
    for reduction in REDUCTIONS:
        check("nll_loss_forward", sample(4, 5), target, None, reduction, 3)


def test_infinite_log_probability_of_an_ignored_class_stays_out() -> None:
    x = sample(2, 3)
    x[1] = -torch.inf
    check("nll_loss_forward", x, torch.tensor([1, -100]), None, SUM, -100)


def test_broadcast_target() -> None:
    check("mse_loss", sample(4, 5), sample(5, seed=1), MEAN)


def test_halves_are_summed_in_float32() -> None:
    # 4096 ones: a bfloat16 running sum would stop at 256
    ones = torch.ones(4096, dtype=torch.bfloat16)
    check("mse_loss", ones, torch.zeros_like(ones), SUM, wide=True, rtol=0, atol=0)
    assert sum([torch.ones((), dtype=torch.bfloat16)] * 4096).item() == 256


# -- the deferred gradient of a loss over classes ---------------------------------------------------------------------


def both_gradients(dim: int, shape: tuple[int, ...] = (3, 7, 4)) -> tuple[Any, Any]:
    """log_softmax's gradient after nll_loss's, as a function of its output and `write_out`; and an example output."""
    backward, log_softmax_backward = lowering_of("nll_loss2d_backward"), lowering_of("_log_softmax_backward_data")
    rng = np.random.default_rng(0)
    output = jax.nn.log_softmax(jnp.asarray(rng.normal(size=shape), jnp.float32), axis=dim)
    target = jnp.asarray(rng.integers(-1, shape[1], (shape[0], *shape[2:])))
    weight = jnp.asarray(rng.uniform(0.1, 2, shape[1]), jnp.float32)

    def gradient(output: jax.Array, write_out: bool) -> jax.Array:
        one_hot = backward.function(jnp.float32(3), output, target, weight, 1, -1, jnp.float32(9))
        assert (one_hot.shape, one_hot.dtype) == (shape, jnp.float32)  # error messages show them
        grad = one_hot.materialize() if write_out else one_hot
        assert grad.shape == shape
        return log_softmax_backward.function(grad, output, dim, jnp.float32)

    return gradient, output


@pytest.mark.parametrize("dim", [0, 1, -2, 2])
def test_sum_of_one_class_is_its_value(dim: int) -> None:
    gradient, output = both_gradients(dim)
    compiled = jax.jit(gradient, static_argnums=1)
    np.testing.assert_array_equal(compiled(output, False), compiled(output, True))


@pytest.mark.parametrize(("dim", "sums"), [(1, 0), (-2, 0), (2, 1)])
def test_sum_of_one_class_reads_nothing(dim: int, sums: int) -> None:
    gradient, output = both_gradients(dim)
    assert str(jax.make_jaxpr(gradient, static_argnums=1)(output, False)).count("reduce_sum") == sums
    assert str(jax.make_jaxpr(gradient, static_argnums=1)(output, True)).count("reduce_sum") == 1

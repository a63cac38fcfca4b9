"""One rule on every front: what a program was given or wrote as a constant is no overflow until it reaches a result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import xla_amp
import xla_amp.jax

X = np.ones((4, 8), np.float32)
IDS = np.array([1, 2, 0, 3])
NAN, INF = float("nan"), float("inf")


def take(x, ids):
    return jnp.take(x, ids, axis=0)


def cross_entropy(x, ids):
    return optax.softmax_cross_entropy_with_integer_labels(x, ids).mean()


def masked(x):
    return jax.nn.softmax(jnp.where(jnp.arange(8) < 4, x, -jnp.inf), -1)


GIVEN = np.where(np.arange(8) == 0, np.float32(np.nan), X)
# (function, arguments, what is passed on into a result)
JAX = {
    "take": (take, (X, IDS), ""),
    "take out of bounds": (take, (X, IDS + 3), "nan"),
    "cross entropy": (jax.grad(cross_entropy), (X, IDS), ""),
    "mask": (masked, (X,), ""),
    "a NaN that is not chosen": (lambda x: jnp.where(x > 0, x, jnp.nan * x), (X,), ""),
    "a constant": (lambda x: x + jnp.nan, (X,), "nan"),
    "an argument": (lambda x: x * 2, (GIVEN,), "nan"),
    "an argument that is replaced": (lambda x: jnp.nan_to_num(x * 2), (GIVEN,), ""),
}


@pytest.mark.parametrize(("function", "arguments", "passed_on"), JAX.values(), ids=JAX)
def test_what_is_given_or_written(function, arguments, passed_on):
    report = xla_amp.jax.find_overflow(jax.jit(function), *arguments)
    assert report.first is None
    assert (report.passed_on.made if report.passed_on else "") == passed_on
    assert bool(report.results) == bool(passed_on)
    assert report.page().title == ("An inf or NaN" if passed_on else "All is finite")


def given(x):
    return torch.from_numpy(GIVEN).to(x.device)


def returns_nothing(x):
    given(x).mul(2)


# (step on ones, what is passed on into a result, what is made)
TORCH = {
    "mask": (lambda x: torch.softmax(x.masked_fill(torch.arange(8, device=x.device) > 4, -INF), -1), "", ""),
    "masked rows": (lambda x: torch.softmax(torch.full_like(x, -INF), -1), "", "nan"),
    "a NaN that is not chosen": (lambda x: torch.where(x > 0, x, torch.full_like(x, NAN)), "", ""),
    "a tensor of it": (lambda x: torch.where(x > 0, x, torch.tensor(NAN) * x), "", ""),
    "a constant": (lambda x: x + torch.full_like(x, NAN), "nan", ""),
    "an infinity that is clamped": (lambda x: torch.full_like(x, INF).clamp(max=1.0), "", ""),
    "memory that is written": (lambda x: torch.empty_like(x).fill_(1.0) + x, "", ""),
    "an argument": (lambda x: given(x) * 2, "nan", ""),
    "an argument that is replaced": (lambda x: torch.nan_to_num(given(x) * 2), "", ""),
    "nothing is returned": (returns_nothing, "nan", ""),
    "log": (lambda x: (-x).log(), "", "nan"),
    "exp": (lambda x: torch.exp(x * 1e4), "", "inf"),
    "not in the result": (lambda x: torch.where(x > 2, (x - 1).log(), 0.0), "", "inf"),
    "of an infinity": (lambda x: (x - 1) * INF, "", "nan"),
}


@pytest.mark.parametrize(("step", "passed_on", "made"), TORCH.values(), ids=TORCH)
def test_in_torch(device, step, passed_on, made):
    report = xla_amp.find_overflow(step, torch.ones(4, 8, device=device))
    assert (report.first.made if report.first else "") == made
    assert (report.passed_on.made if report.passed_on else "") == passed_on

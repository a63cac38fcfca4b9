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
GIVEN = np.where(np.arange(8) == 0, np.float32(NAN), X)


def take(_, x, ids):
    return jnp.take(x, ids, axis=0)


def cross_entropy(x, ids):
    return optax.softmax_cross_entropy_with_integer_labels(x, ids).mean()


def returns_nothing(_, x):
    x.mul(2)


# (function of torch or jax.numpy and the arguments, these, what is passed on into a result, what is made)
BOTH = {
    "mask": (lambda lib, x: lib.exp(lib.where(x < 0, x, -INF)), (X,), "", ""),
    "a NaN that is not chosen": (lambda lib, x: lib.where(x > 0, x, lib.full_like(x, NAN)), (X,), "", ""),
    "a tensor of it": (lambda lib, x: lib.where(x > 0, x, lib.asarray(NAN) * x), (X,), "", ""),
    "a constant": (lambda lib, x: x + lib.full_like(x, NAN), (X,), "nan", ""),
    "an infinity that is clamped": (lambda lib, x: lib.clip(lib.full_like(x, INF), max=1.0), (X,), "", ""),
    "an argument": (lambda lib, x: x * 2, (GIVEN,), "nan", ""),
    "an argument that is replaced": (lambda lib, x: lib.nan_to_num(x * 2), (GIVEN,), "", ""),
    "log": (lambda lib, x: lib.log(-x), (X,), "", "nan"),
    "exp": (lambda lib, x: lib.exp(x * 1e4), (X,), "", "inf"),
    "not in the result": (lambda lib, x: lib.where(x > 2, lib.log(x - 1), 0.0), (X,), "", "inf"),
    "of an infinity": (lambda lib, x: (x - 1) * INF, (X,), "", "nan"),
}
TORCH = {
    "masked rows": (lambda _, x: torch.softmax(torch.full_like(x, -INF), -1), (X,), "", "nan"),
    "memory that is written": (lambda _, x: torch.empty_like(x).fill_(1.0) + x, (X,), "", ""),
    "nothing is returned": (returns_nothing, (GIVEN,), "nan", ""),
}
JAX = {
    "take": (take, (X, IDS), "", ""),
    "take out of bounds": (take, (X, IDS + 3), "nan", ""),
    "cross entropy": (lambda _, x, ids: jax.grad(cross_entropy)(x, ids), (X, IDS), "", ""),
}
CASES = [
    pytest.param(front, *case, id=f"{name}, {front}")
    for front, cases in (("cpu", BOTH | TORCH), ("xla", BOTH | TORCH), ("jax", BOTH | JAX))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("front", "function", "arguments", "passed_on", "made"), CASES)
def test_what_is_given_written_and_made(front, function, arguments, passed_on, made):
    if front == "jax":
        report = xla_amp.jax.find_overflow(jax.jit(lambda *args: function(jnp, *args)), *arguments)
        assert bool(report.results) == bool(passed_on or (made and function is not BOTH["not in the result"][0]))
    else:
        device = torch.device("cpu") if front == "cpu" else xla_amp.xla_device()
        given = [torch.from_numpy(each).to(device) for each in arguments]
        report = xla_amp.find_overflow(lambda *args: function(torch, *args), *given)
    assert (report.first.made if report.first else "") == made
    assert (report.passed_on.made if report.passed_on else "") == passed_on
    assert report.page().title == ("An inf or NaN" if passed_on or made else "All is finite")


@pytest.mark.parametrize("front", ["cpu", "xla", "jax"])
def test_operands_are_described_before_the_operation(front):
    values = np.array([[-3.0, 0.0, 2.0], [0.5, INF, NAN]], np.float32)
    if front == "jax":
        report = xla_amp.jax.find_overflow(lambda x, y: (jnp.log(-y), x * 2), values, np.float32([4.0, 1.0]))
    else:
        device = torch.device("cpu") if front == "cpu" else xla_amp.xla_device()
        x, y = torch.from_numpy(values).to(device), torch.tensor([4.0, 1.0], device=device)
        report = xla_amp.find_overflow(lambda: (torch.log(-y), x * 2))
    (given,) = report.first.inputs
    assert (given.dtype, given.shape, given.smallest, given.largest) == ("float32", (2,), 1.0, 4.0)
    assert (given.least, given.greatest, given.infinities, given.nans) == (-4.0, -1.0, 0, 0)
    assert "log made nan" in str(report)
    assert "float32 2, -4 to -1, magnitudes 1 to 4" in str(report)

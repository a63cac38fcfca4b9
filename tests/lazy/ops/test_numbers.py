"""Integers and reductions of nothing as torch on the CPU where C++ defines them; 0-d tensors, 1-d for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BASES = (0, 1, -1, 2, -2, 3, 7, -7, 100, 127, -128)
EXPONENTS = (0, 1, 2, 5, 8, 31, 32, 63, 64, 65, 100, 127, -1, -2, -64)


def test_powers_wrap_around(device: torch.device) -> None:
    def powers(where: str) -> dict[torch.dtype, list[torch.Tensor]]:
        found = {}
        for dtype in INTEGERS:
            base = torch.tensor(BASES).to(dtype)[:, None].repeat(1, len(EXPONENTS)).to(where)
            exponent = torch.tensor(EXPONENTS).to(dtype).repeat(len(BASES), 1).to(where)
            found[dtype] = [base**exponent, 3**exponent, *(base**n for n in (0, 3, 17, 64, 127))]
        return found

    assert_same(powers)


def test_small_integers_wrap_around(device: torch.device) -> None:
    """Values that int32 holds; torch converts to int8 and int16 by way of it on every device."""
    x = torch.tensor(
        [0, -1.5, 2.7, 127.9, 128, 129.5, -128.9, -129, 200, 255.5, 257.5, -300, 32768, -32769, 65535, 1e6]
    )
    sources = [x[x.abs() < 60000].half(), x.bfloat16(), x, x.double()]
    assert_same(lambda where: [source.to(where).to(dtype) for source in sources for dtype in INTEGERS])


def test_large_integers_saturate(device: torch.device) -> None:
    """Undefined in C++: x86 gives the least integer; CUDA, ARM and XLA saturate, and NaN is 0."""
    x = torch.tensor([3e9, -3e9, float("inf"), -float("inf"), float("nan")]).to(device)
    limits = torch.iinfo(torch.int32)
    assert x.to(torch.int32).tolist() == [limits.max, limits.min, limits.max, limits.min, 0]
    limits = torch.iinfo(torch.int64)
    assert x.long().tolist() == [3_000_000_000, -3_000_000_000, limits.max, limits.min, 0]


def test_the_median_of_nothing_is_nan(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        nothing = torch.empty(0, 3, dtype=dtype, device=device)
        assert torch.stack([nothing.median(), nothing.nanmedian()]).isnan().all(), dtype


def test_denormals_are_zero(device: torch.device) -> None:
    """XLA:CPU flushes denormals of float32, as README says; copies keep their bits."""
    tiny = torch.tensor([1e-40, -1e-40])
    there = tiny.to(device)
    assert torch.equal(there.clone().cpu(), tiny)
    assert (there == 0).tolist() == [True, True]
    assert (there * 2**20).tolist() == [0, 0]


ACCEPTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.clamp(0, 3),
    "clamp of numbers with a fraction": lambda x: x.clamp(0.5, 3),
    "clamp in place": lambda x: x.clone().clamp_(min=2),
    "clamp by tensors": lambda x: x.clamp(x.new_ones(()), x.new_full((), 3)),
    "linspace": lambda x: torch.linspace(x[0], x[4], 5, device=x.device),
    "linspace of floats": lambda x: torch.linspace(x[0].float(), x[4].float(), 5, device=x.device),
    "soft_margin_loss": lambda x: torch.nn.functional.soft_margin_loss(x.float(), x),
}


def test_what_the_cpu_accepts_is_accepted(device: torch.device) -> None:
    def outcome(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor | str:
        try:
            return call(x)
        except RuntimeError:
            return "refused"

    def outcomes(where: str) -> dict[str, list[torch.Tensor | str]]:
        rows = [torch.arange(5).to(dtype).to(where) for dtype in (torch.int64, torch.int32, torch.uint8)]
        return {name: [outcome(call, x) for x in rows] for name, call in ACCEPTED.items()}

    assert_same(outcomes, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_bernoulli_fills_integers(dtype: torch.dtype, device: torch.device) -> None:
    assert 300 < int(torch.zeros(1000, dtype=dtype, device=device).bernoulli_(0.5).sum()) < 700


Operation = Callable[[torch.Tensor, int], Any]


def _index(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


OPERATIONS: dict[str, Operation] = {
    **{
        name: lambda x, dim, name=name: getattr(torch, name)(x, dim=dim)  # type: ignore[misc]
        for name in (
            *("all", "amax", "aminmax", "any", "argmax", "argsort", "count_nonzero", "cummax", "cummin", "cumprod"),
            "cumsum",
            *("logcumsumexp", "log_softmax", "logsumexp", "max", "mean", "median", "min", "mode", "nansum", "norm"),
            *("prod", "softmax", "sort", "squeeze", "std", "sum", "unsqueeze", "var"),
        )
    },
    "flip": lambda x, dim: x.flip(dim),
    "gather": lambda x, dim: x.gather(dim, _index(x)),
    "index_add": lambda x, dim: x.index_add(dim, _index(x), x),
    "index_copy": lambda x, dim: x.index_copy(dim, _index(x), x * 2),
    "index_fill": lambda x, dim: x.index_fill(dim, _index(x), 5),
    "index_reduce": lambda x, dim: x.index_reduce(dim, _index(x), x * 2, "amax"),
    "index_select": lambda x, dim: x.index_select(dim, _index(x)),
    "kthvalue": lambda x, dim: x.kthvalue(1, dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "scatter": lambda x, dim: x.scatter(dim, _index(x), 7),
    "scatter_add": lambda x, dim: x.scatter_add(dim, _index(x), x),
    "select": lambda x, dim: x.select(dim, 0),
    "topk": lambda x, dim: x.topk(1, dim),
    "topk of none": lambda x, dim: x.topk(0, dim),
    "transpose": lambda x, dim: x.transpose(0, dim),
    "unbind": lambda x, dim: x.unbind(dim),
    "unfold": lambda x, dim: x.unfold(dim, 1, 1),
    "unfold too far": lambda x, dim: x.unfold(dim, 2, 1),
}


def _outcome(operation: Operation, x: torch.Tensor, dim: int) -> Any:
    try:
        return operation(x, dim)
    except (IndexError, RuntimeError) as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:index_reduce")
def test_a_dimension_of_a_number(device: torch.device) -> None:
    assert_same(
        lambda where: {
            name: [_outcome(operation, torch.tensor(2.5).to(where), dim) for dim in (0, -1, 1, -2)]
            for name, operation in OPERATIONS.items()
        }
    )


def test_gradients_through_a_number(device: torch.device) -> None:
    def program(where: str) -> Any:
        x = torch.tensor(0.7, device=where, requires_grad=True)
        (x.flip(0).cumsum(0).sort(0)[0] * x.topk(0)[0] + x.softmax(0)).backward()
        return x.grad

    assert_same(program)

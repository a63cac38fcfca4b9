"""Operations with a dimension on 0-d tensors, which torch treats as tensors of one dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same

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

"""The meaning of a cast, compared with torch's own autocast kernels for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xla_amp.errors import PolicyError
from xla_amp.policy import load
from xla_amp.policy.cast_dtypes import cast_dtypes

LOW, WIDE, HALF = torch.bfloat16, torch.float32, torch.float16


class Seen(TorchDispatchMode):
    """Operands' and result's dtypes of each operation below autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[torch.dtype, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = [item for value in args for item in (value if isinstance(value, list | tuple) else [value])]
        dtypes = tuple(item.dtype for item in flat if isinstance(item, torch.Tensor))
        result = out[0] if isinstance(out, tuple) else out
        self.found.append((func.overloadpacket.__name__, dtypes, result.dtype))
        return out


def _cat(*x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x)


CASES: list[tuple[str, str, str, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = [
    ("mm", "low", "mm", torch.mm, (torch.ones(2, 2), torch.ones(2, 2))),
    ("mm", "low", "mm", torch.mm, (torch.ones(2, 2), torch.ones(2, 2, dtype=LOW))),
    ("mm", "low", "mm", torch.mm, (torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64))),
    ("mse_loss", "fp32", "mse_loss", torch.nn.functional.mse_loss, (torch.ones(2, dtype=LOW), torch.ones(2))),
    ("avg_pool3d", "fp32", "avg_pool3d", lambda x: torch.nn.functional.avg_pool3d(x, 1),
     (torch.ones(1, 1, 1, 1, 1, dtype=LOW),)),
    ("cat", "promote", "cat", _cat, (torch.ones(2, dtype=LOW), torch.ones(2))),
    ("cat", "promote", "cat", _cat, (torch.ones(2, dtype=LOW), torch.ones(2, dtype=LOW))),
    ("stack", "promote", "stack", lambda *x: torch.stack(x), (torch.ones(2), torch.ones(2, dtype=LOW))),
    ("tanh", "keep", "tanh", torch.tanh, (torch.ones(2, dtype=LOW),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cast", "below", "function", "operands"), CASES)
def test_as_torchs_own_kernels(
    name: str, cast: str, below: str, function: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]
) -> None:
    assert load("cpu").decide(name).cast == cast
    with Seen() as seen, torch.autocast("cpu", LOW):
        function(*operands)
    ((_, used, result),) = [entry for entry in seen.found if entry[0] == below]
    given = tuple(x.dtype if x.dtype != torch.float64 else None for x in operands)
    expected = cast_dtypes(cast, given, LOW, WIDE).operands  # type: ignore[arg-type]
    assert used == tuple(x.dtype if e is None else e for x, e in zip(operands, expected, strict=True))
    assert result == used[0]


@pytest.mark.parametrize(
    ("cast", "asks", "operands", "result"),
    [
        ("fp32_out", True, (LOW, None), WIDE),
        ("fp32_append", True, (LOW, None), WIDE),
        ("fp32_out", False, (WIDE, None), None),
        ("fp32_append", False, (WIDE, None), None),
    ],
)
def test_a_float32_result_is_asked_for_or_computed(
    cast: Any, asks: bool, operands: tuple[Any, ...], result: Any
) -> None:
    assert cast_dtypes(cast, (LOW, None), LOW, WIDE, asks_result=asks) == (operands, result)


def test_fp32_out_looks_at_the_first_operand_as_torch_does() -> None:
    assert cast_dtypes("fp32_out", (None, LOW), LOW, WIDE) == ((None, LOW), None)


def test_keep_gives_the_widest_dtype_where_operands_cannot_be_mixed() -> None:
    assert cast_dtypes("keep", (LOW, WIDE), LOW, WIDE).operands == (LOW, WIDE)
    assert cast_dtypes("keep", (LOW, WIDE), LOW, WIDE, mixed=False).operands == (WIDE, WIDE)
    assert cast_dtypes("keep", (LOW, LOW), LOW, WIDE, mixed=False).operands == (LOW, LOW)


def test_float32_is_the_narrowest_that_holds_both_half_types() -> None:
    assert cast_dtypes("promote", (LOW, HALF), LOW, WIDE).operands == (WIDE, WIDE)


def test_a_ban_is_the_fronts_own_error() -> None:
    with pytest.raises(PolicyError, match="no dtypes"):
        cast_dtypes("ban", (LOW,), LOW, WIDE)

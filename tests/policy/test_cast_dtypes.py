"""The meaning of a cast beyond torch's kernels, with which test_kernels.py compares it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xla_amp.errors import PolicyError
from xla_amp.policy.cast_dtypes import cast_dtypes

LOW, WIDE, HALF = torch.bfloat16, torch.float32, torch.float16


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

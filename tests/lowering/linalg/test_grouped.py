"""Grouped matrix products against torch's loop over groups on the CPU, in all four forms, with empty groups."""

from __future__ import annotations

import torch
from harness import check, sample, together

ROWS = {
    "rows": ((12, 8), (3, 8, 16), [2, 7, 12]),
    "rows_with_an_empty_group": ((12, 8), (3, 8, 16), [0, 7, 12]),
    "contracted": ((8, 16), (16, 8), [8, 8, 16]),
    "columns": ((3, 8, 8), (8, 16), [4, 8, 16]),
    "one_each": ((3, 8, 8), (3, 8, 16), None),
}


@together("dtype", [torch.float32, torch.bfloat16], ids=str)
@together("name", ROWS)
def test_as_torch(name: str, dtype: torch.dtype) -> None:
    left, right, ends = ROWS[name]
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    operands = sample(*left, dtype=dtype, seed=0), sample(*right, dtype=dtype, seed=1)
    tolerance = {"rtol": 2**-8, "atol": 2**-8} if dtype is torch.bfloat16 else {}
    check("_grouped_mm", *operands, offsets, **tolerance)


def test_rows_after_the_last_group_are_zero() -> None:
    import jax.numpy as jnp

    from xla_amp.lowering.linalg.contraction import grouped_mm

    product = grouped_mm(jnp.ones((8, 4)), jnp.ones((2, 4, 4)), jnp.array([2, 5]), platform="cpu")
    assert product[:, 0].tolist() == [4, 4, 4, 4, 4, 0, 0, 0]

"""Elementwise operations against PyTorch on the CPU: special values, numbers beside half types, and edges."""

from __future__ import annotations

import math
from typing import Any

import harness
import pytest
import scipy.special
import torch
from harness import Row, check, check_rows, finish, row, run, sample, tables

from xla_amp.lowering.math import arithmetic, elementwise

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, math.inf, -math.inf, math.nan])
"""Special cases of elementwise functions: zeros, halves (rounding), infinities, NaN."""
LEFT, RIGHT = (grid.flatten() for grid in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))

ONE = [*elementwise.FLOAT, *elementwise.SAME, *elementwise.ROUNDING, *elementwise.PREDICATES]
ONE = [name for name in [*ONE, "relu", "frac"] if name != "bitwise_not"]


def at_special_values(name: str) -> Row:
    kinds = "fi" if name in elementwise.FLOAT else "f"
    return row(name, kinds, lambda d: (SPECIAL if d.is_floating_point else torch.tensor([1, 2, 0]),))


TABLES = (arithmetic.LINEAR, arithmetic.ARITHMETIC, arithmetic.FLOAT, arithmetic.COMPARISONS, arithmetic.LOGICAL)
TWO = [name for table in TABLES for names in table for name in names]
OF_TENSORS = [name for name in TWO if name.partition(".")[2] in ("", "Tensor", "Tensor_Tensor")]
NO_SPECIAL_PAIRS = {"gcd", "igamma", "igammac", "lcm", "special_zeta"}


def with_number(name: str) -> Row:
    """Of a tensor and a number: the database's calls have numbers as tensors."""
    integers = any(name in names for names in arithmetic.BITWISE)
    number_first = name == "pow.Scalar" or name.partition(".")[2] in ("Scalar_Tensor", "Scalar_Self", "self_scalar")

    def operands(dtype: torch.dtype) -> tuple[Any, Any]:
        x = sample(4, 5, dtype=dtype).abs() % 7 + 1
        number = 2.3 if dtype.is_floating_point else 2
        return (number, x) if number_first else (x, number)

    return row(name, "iu" if integers else "f" if name.startswith("special_") else "fb", operands)


OF_NUMBERS = [name for name in TWO if name not in OF_TENSORS]
OF_NUMBERS += [name for names in arithmetic.BITWISE for name in names if "." in name and not name.endswith(".Tensor")]


def _without_zero(dtype: torch.dtype) -> torch.Tensor:
    x = sample(4, 5, dtype=dtype, seed=3)
    return x if dtype.is_floating_point else torch.where(x == 0, torch.ones_like(x), x)


def _positive(dtype: torch.dtype, least: int = 1) -> torch.Tensor:
    return sample(4, 5, dtype=dtype).abs() + least


INF = math.inf
ENDS = torch.tensor(
    [[INF, INF, INF, 1.0, 0.0, 0.0, INF, 2.0, INF], [1.0, 0.0, INF, INF, 1.0, 0.0, 1e30, INF, math.nan]]
)
ROUNDED = torch.tensor([0.1, 0.2, 2.3, 4.5])
SUMS = ("add", "sub", "rsub")

ROWS = [
    # sums
    *(row(f"{name}.Scalar", "fb", lambda d: (sample(4, 5, dtype=d), 0.3, 0.7)) for name in SUMS),
    row("add.Tensor", "fbi", lambda d: (sample(4, 5, dtype=d), sample(dtype=torch.float64))),  # 0-d does not promote
    row("add.Tensor", "i", lambda d: (sample(4, 5, dtype=d), sample(4, 5, dtype=torch.bfloat16))),
    # division
    *(row("div.Tensor_mode", "f", lambda d: (LEFT, RIGHT), rounding_mode=mode) for mode in ("floor", "trunc")),
    *(
        row("div.Scalar_mode", "bi", lambda d: (sample(4, 5, dtype=d), -1.7), rounding_mode=mode)
        for mode in ("floor", "trunc", None)
    ),
    row("floor_divide_.Tensor", "fi", lambda d: (sample(4, 5, dtype=d), _without_zero(d))),
    # powers
    *(
        row("pow.Tensor_Scalar", "b", lambda d, exponent=exponent: (_positive(d, least=0), exponent))
        for exponent in (4, -3, 1.1, 40)
    ),
    *(row("pow.Tensor_Scalar", "f", lambda d, e=e: (SPECIAL, e)) for e in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 2.5, -3)),
    *(row("pow.Tensor_Scalar", "i", lambda d, e=e: (sample(4, 5, dtype=d), e)) for e in (0, 1, 2, 3, 11, 2.0, True)),
    row("pow.Tensor_Tensor", "i", lambda d: (torch.tensor([1, -1, -1, 2, 0, 3]), torch.tensor([-3, -3, -2, -1, 3, 4]))),
    row("pow_.Tensor", "f", lambda d: (_positive(d), sample(5, dtype=d))),
    # a number beside a half tensor is rounded to it where torch rounds it
    *(
        row(f"{name}.Scalar", "bh", lambda d: (ROUNDED.to(d), 0.1))
        for name in ("add", "copysign", "div", "eq", "floor_divide", "fmod", "ge", "lt", "mul", "remainder")
    ),
    row("remainder.Scalar_Tensor", "bh", lambda d: (2.3, ROUNDED.to(d))),
    *(  # also to float16's subnormal numbers
        row(f"{name}.Scalar", "h", lambda d: (torch.tensor([6e-8, 1.2e-7, 3e-5, 0.0, -3e-5], dtype=d), 3e-5))
        for name in ("eq", "fmod", "ge", "lt", "remainder")
    ),
    *(row(f"__{side}shift__.Tensor", "u", lambda d: (sample(4, 5, dtype=d), _positive(d) % 7)) for side in "lr"),
    *(row(f"__i{side}shift__.Tensor", "iu", lambda d: (_positive(d), _positive(d) % 7)) for side in "lr"),
    *(row(f"__i{side}shift__.Scalar", "iu", lambda d: (_positive(d), 2)) for side in "lr"),
    row("_add_relu.Tensor", "f", lambda d: (sample(4, 5, dtype=d), sample(4, 5, dtype=d, seed=2)), alpha=-2),
    # infinite shapes; far and at the poles
    *(row(name, "fd", lambda d: (ENDS[0].to(d), ENDS[1].to(d))) for name in ("igamma", "igammac")),
    row("polygamma", "f", lambda d: (1, torch.tensor([math.inf, -math.inf, 0.0, 1e30, math.nan, 1e10, 2.5], dtype=d))),
    *(row("polygamma", "f", lambda d, n=n: (n, torch.tensor([0.0, 1e12, 1e5, 0.5], dtype=d))) for n in (2, 3)),
    # one tensor and constants
    row("angle", "f", lambda d: (SPECIAL,)),
    row("frexp.Tensor", "fdhb", lambda d: (torch.cat([SPECIAL, torch.tensor([3e38, -7e-30])]).to(d),), rtol=0, atol=0),
    row("hash_tensor", "fdhbiut", lambda d: (sample(3, 4, dtype=d),)),
    # clamping
    row("clamp", "fi", lambda d: (sample(4, 5, dtype=d), 2, 1)),
    row("clamp", "i", lambda d: (sample(4, 5, dtype=d), -1.5)),
    row("clamp", "f", lambda d: (SPECIAL,), max=1),
    row("clamp", "f", lambda d: (SPECIAL, math.nan, 1.0)),
    row("clamp.Tensor", "f", lambda d: (LEFT, RIGHT)),
    *(row(f"clamp_{end}", "f", lambda d: (SPECIAL, 0.5)) for end in ("min", "max")),
    *(row(f"clamp_{end}.Tensor", "f", lambda d: (LEFT, RIGHT)) for end in ("min", "max")),
    # three tensors
    row("where.self", "bi", lambda d: (sample(4, 1) > 0, sample(4, 5, dtype=d), sample(5, seed=1))),
    row("where.self", "f", lambda d: (sample(4, 1) > 0, sample(4, 5), sample(dtype=torch.float64))),
    row("masked_fill.Scalar", "t", lambda d: (sample(4, 1, dtype=d), sample(4, 5) > 0, 1)),
    row("lerp.Scalar", "f", lambda d: (torch.tensor([1e8]), torch.tensor([1.0]), 1.0)),  # meets the end exactly
    row("mul.Tensor", "fhb", lambda d: (SPECIAL.to(d), torch.arange(len(SPECIAL)) % 3 == 0)),  # infinity times False
    *(
        row(name, "fd", lambda d: (sample(4, dtype=d), torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]).to(d)))
        for name in ("complex", "polar")
    ),
]


@tables(
    special_values=map(at_special_values, ONE),
    special_pairs=[row(n, "f", lambda d: (LEFT, RIGHT)) for n in sorted(set(OF_TENSORS) - NO_SPECIAL_PAIRS)],
    two_dtypes=[
        row(n, "b", lambda d: (sample(4, dtype=d), 1 + sample(4, dtype=torch.uint8)))
        for n in sorted({*OF_TENSORS} - {*NO_SPECIAL_PAIRS, "heaviside"})
    ],
    numbers=map(with_number, OF_NUMBERS),
    others=ROWS,
)
def test_rows(rows):
    check_rows(rows)


def test_erfcx_where_its_series_begins():
    """SciPy is the reference; JAX 0.10 gives 0 around 26.6."""
    x = torch.cat([torch.tensor([-3.0, 0.0, 9.99, 10.01, 26.6, 1e3]), torch.tensor([torch.inf, torch.nan])])
    for dtype, rtol in ((torch.float32, 2e-6), (torch.float64, 4e-13)):
        want = torch.from_numpy(scipy.special.erfcx(x.double().numpy())).to(dtype)
        harness.compare(run("special_erfcx", x.to(dtype))[0], want, rtol=rtol, atol=0, where="special_erfcx")


def rounds_in_between(x):
    total = x[..., 0] * 0
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return [total]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda x: [x.sum(1) * 1.01], "Mismatched elements"),
        (lambda x: [x.sum(1)[:1]], "shape"),
        (lambda x: [x.sum(1), x], "2 results"),
        (lambda x: [x.sum(1).float()], "dtype"),
        (rounds_in_between, "Mismatched elements"),
    ],
)
def test_a_wrong_result_is_noticed(wrong, complaint, monkeypatch):
    called, x = harness.called, sample(3, 200, dtype=torch.bfloat16)
    check("sum.dim_IntList", x, [1], wide=True)
    finish()
    monkeypatch.setattr(harness, "called", lambda *call: called(*call) if call[3] == "cpu" else wrong(x.to(call[3])))
    check("sum.dim_IntList", x, [1], wide=True)
    with pytest.raises(AssertionError, match=complaint):
        finish()

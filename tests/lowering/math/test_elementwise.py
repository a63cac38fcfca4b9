"""Elementwise operations of one, two and three tensors against PyTorch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import harness
import jax
import pytest
import torch
from harness import Row, check, check_rows, finish, row, sample, tables, untested

from xla_amp.lowering.math import arithmetic, elementwise

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, math.inf, -math.inf, math.nan])
"""Special cases of elementwise functions: zeros, halves (rounding), infinities, NaN."""
LEFT, RIGHT = (grid.flatten() for grid in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))

DOMAIN: dict[str, tuple[float, float]] = {
    "acos": (-0.99, 0.99),
    "acosh": (1.1, 4.0),
    "asin": (-0.99, 0.99),
    "atanh": (-0.95, 0.95),
    "digamma": (0.2, 6.0),
    "erfinv": (-0.95, 0.95),
    "lgamma": (0.2, 6.0),
    "log": (0.1, 9.0),
    "log10": (0.1, 9.0),
    "log1p": (-0.9, 9.0),
    "log2": (0.1, 9.0),
    "reciprocal": (0.2, 3.0),
    "rsqrt": (0.1, 9.0),
    "special_entr": (0.01, 3.0),
    "special_ndtri": (0.02, 0.98),
    "sqrt": (0.0, 9.0),
    "tan": (-1.3, 1.3),
}
"""Ranges where a function is finite and well conditioned; the others use [-3, 3)."""

ONE: dict[str, str] = {
    **dict.fromkeys(elementwise.FLOAT, "fdb"),
    "special_log_ndtr": "fd",  # torch has these two for float32 and float64 only
    "special_ndtri": "fd",
    **dict.fromkeys(elementwise.SAME, "fbiu"),
    "relu": "fbiu",
    "_conj_physical": "fbc",
    "bitwise_not": "iut",
    "sgn": "fbitc",
    "sign": "fbit",
    **dict.fromkeys(elementwise.ROUNDING, "fbi"),
    "frac": "fb",
    **dict.fromkeys(elementwise.PREDICATES, "fbit"),
}
NO_SPECIAL_VALUES = {"bitwise_not"}


def in_domain(name: str) -> Row:
    low, high = DOMAIN.get(name, (-3.0, 3.0))
    return row(name, ONE[name], lambda d: (sample(5, 7, dtype=d, low=low, high=high),))


def at_special_values(name: str) -> Row:
    kinds = "fi" if name in elementwise.FLOAT else "f"
    return row(name, kinds, lambda d: (SPECIAL if d.is_floating_point else torch.tensor([1, 2, 0]),))


@tables(in_domain=map(in_domain, ONE), at_special_values=map(at_special_values, set(ONE) - NO_SPECIAL_VALUES))
def test_one_operand(rows):
    check_rows(rows)


def test_relu_keeps_a_half_result_on_gpu() -> None:
    x = sample(5, 7, dtype=torch.bfloat16)
    check("relu", x, platform="gpu")

    def barriers(dtype: str, platform: str) -> int:
        x = jax.ShapeDtypeStruct((4,), dtype)
        return str(jax.make_jaxpr(lambda x: elementwise.relu(x, platform=platform))(x)).count("optimization_barrier")

    assert barriers("bfloat16", "gpu") == barriers("float16", "gpu") == 1
    assert barriers("float32", "gpu") == barriers("bfloat16", "tpu") == barriers("bfloat16", "cpu") == 0


def test_float16_and_booleans_take_the_same_ways():
    check("exp", sample(5, 7, dtype=torch.float16))
    check("neg", sample(5, 7, dtype=torch.float16))
    check("sqrt", torch.tensor([True, False]))


def _integers_without_zero(dtype: torch.dtype) -> torch.Tensor:
    x = sample(4, 5, dtype=dtype, seed=3)
    return x if dtype.is_floating_point else torch.where(x == 0, torch.ones_like(x), x)


def _positive(dtype: torch.dtype, seed: int = 0, least: int = 1) -> torch.Tensor:
    return sample(4, 5, dtype=dtype, seed=seed).abs() + least


Operands = Callable[[torch.dtype], tuple[Any, Any]]


def _plain(dtype: torch.dtype) -> tuple[Any, Any]:
    return sample(4, 5, dtype=dtype), sample(5, dtype=dtype, seed=3)


PAIRS: dict[str, tuple[str, Operands]] = {
    "__lshift__": ("iu", lambda d: (sample(4, 5, dtype=d), _positive(d) % 7)),
    "__rshift__": ("iu", lambda d: (sample(4, 5, dtype=d), _positive(d) % 7)),
    "bitwise_and": ("iut", _plain),
    "bitwise_left_shift": ("iu", lambda d: (sample(4, 5, dtype=d), _positive(d) % 7)),
    "bitwise_or": ("iut", _plain),
    "bitwise_right_shift": ("iu", lambda d: (sample(4, 5, dtype=d), _positive(d) % 7)),
    "bitwise_xor": ("iut", _plain),
    "floor_divide": ("fbi", lambda d: (sample(4, 5, dtype=d), _integers_without_zero(d))),
    "fmod": ("fbi", lambda d: (sample(4, 5, dtype=d), _integers_without_zero(d))),
    "gcd": ("i", _plain),
    "hypot": ("fb", _plain),
    "igamma": ("f", lambda d: (_positive(d, least=0), _positive(d, 1, 0))),
    "igammac": ("f", lambda d: (_positive(d, least=0), _positive(d, 1, 0))),
    "lcm": ("i", _plain),
    "logaddexp": ("fdb", _plain),
    "logaddexp2": ("fdb", _plain),
    "nextafter": ("fdb", _plain),
    "pow": ("fdb", lambda d: (_positive(d, least=0), sample(4, 5, dtype=d))),
    "remainder": ("fbi", lambda d: (sample(4, 5, dtype=d), _integers_without_zero(d))),
    "special_xlog1py": ("fd", lambda d: (sample(4, 5, dtype=d), _positive(d, 2))),
    "special_zeta": ("fd", lambda d: (_positive(d), _positive(d, 2))),
}
"""Operands of operations that do not accept any two.  Default kinds: float32, bfloat16, int64."""
NO_SPECIAL_PAIRS = {"gcd", "igamma", "igammac", "lcm", "special_zeta"}

TABLES = (arithmetic.LINEAR, arithmetic.ARITHMETIC, arithmetic.FLOAT, arithmetic.COMPARISONS, arithmetic.LOGICAL)
OF_FLOATS = [name for table in TABLES for names in table for name in names]
TWO = [*OF_FLOATS, *(name for names in arithmetic.BITWISE for name in names), "div.Tensor", "div.Scalar", "nextafter"]


def pair(name: str) -> Row:
    base, _, overload = name.partition(".")
    kinds, make = PAIRS.get(base, ("fbi", _plain))

    def operands(dtype: torch.dtype) -> tuple[Any, Any]:
        x, y = make(dtype)
        number = 2.3 if dtype.is_floating_point else True if dtype is torch.bool else 2
        if name == "pow.Scalar" or overload in ("Scalar_Tensor", "Scalar_Self", "self_scalar"):
            return number, y
        return x, number if overload in ("Scalar", "Tensor_Scalar", "Scalar_Other", "other_scalar") else y

    return row(name, kinds, operands)


WITHOUT_NUMBERS = [n for n in OF_FLOATS if n.partition(".")[2] in ("", "Tensor", "Tensor_Tensor")]


AT_SPECIAL_PAIRS = [row(n, "f", lambda d: (LEFT, RIGHT)) for n in sorted(set(WITHOUT_NUMBERS) - NO_SPECIAL_PAIRS)]


ROWS = [
    # sums
    *(row(f"{name}.Tensor", "fbi", _plain, alpha=2) for name in ("add", "sub", "rsub")),
    *(row(f"{name}.Tensor", "fbi", _plain) for name in ("add", "sub", "rsub")),
    *(row(f"{name}.Tensor", "fb", _plain, alpha=0.3) for name in ("add", "sub", "rsub")),
    *(row(f"{name}.Scalar", "fb", lambda d: (sample(4, 5, dtype=d), 0.3, 0.7)) for name in ("add", "sub", "rsub")),
    *(row(f"{name}.Scalar", "i", lambda d: (sample(4, 5, dtype=d), 3, 2)) for name in ("add", "sub", "rsub")),
    row("add.Tensor", "t", _plain),
    row("add.Tensor", "fbi", lambda d: (sample(4, 5, dtype=d), sample(dtype=torch.float64))),  # 0-d does not promote
    row("add.Tensor", "i", lambda d: (sample(4, 5, dtype=d), sample(4, 5, dtype=torch.bfloat16))),
    # division
    *(
        row("div.Tensor_mode", kinds, lambda d: (sample(4, 5, dtype=d), _integers_without_zero(d)), rounding_mode=mode)
        for kinds, mode in (("fbi", "floor"), ("fbi", "trunc"), ("fi", None))
    ),
    *(row("div.Tensor_mode", "f", lambda d: (LEFT, RIGHT), rounding_mode=mode) for mode in ("floor", "trunc")),
    *(
        row("div.Scalar_mode", "fbi", lambda d: (sample(4, 5, dtype=d), -1.7), rounding_mode=mode)
        for mode in ("floor", "trunc", None)
    ),
    row("floor_divide_.Tensor", "fi", lambda d: (sample(4, 5, dtype=d), _integers_without_zero(d))),
    # powers
    *(
        row("pow.Tensor_Scalar", "fb", lambda d, exponent=exponent: (_positive(d, least=0), exponent))
        for exponent in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 4, 7.0, 2.5, -3, 1.1, 40)
    ),
    *(row("pow.Tensor_Scalar", "f", lambda d, e=e: (SPECIAL, e)) for e in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 4, 2.5, -3)),
    *(row("pow.Tensor_Scalar", "i", lambda d, e=e: (sample(4, 5, dtype=d), e)) for e in (0, 1, 2, 3, 11, 2.0, True)),
    row("pow.Tensor_Tensor", "i", lambda d: (torch.tensor([1, -1, -1, 2, 0, 3]), torch.tensor([-3, -3, -2, -1, 3, 4]))),
    *(row("pow_.Scalar", "fb", lambda d, e=e: (_positive(d, least=0), e)) for e in (2, 2.5)),
    row("pow_.Tensor", "f", lambda d: (_positive(d), sample(5, dtype=d))),
    row("linalg_cross", "fbi", lambda d: (sample(4, 3, dtype=d), sample(1, 3, dtype=d))),
    row("linalg_cross", "f", lambda d: (sample(3, 4, dtype=d), sample(3, 4, dtype=d, seed=2)), dim=0),
    # a number beside a half tensor is rounded to it where torch rounds it
    *(
        row(name, "bh", lambda d: (torch.tensor([0.1, 0.2, 2.3, 4.5], dtype=d), 0.1))
        for name in (
            "add.Scalar",
            "copysign.Scalar",
            "div.Scalar",
            "eq.Scalar",
            "floor_divide.Scalar",
            "fmod.Scalar",
            "ge.Scalar",
            "lt.Scalar",
            "mul.Scalar",
            "remainder.Scalar",
        )
    ),
    row("remainder.Scalar_Tensor", "bh", lambda d: (2.3, torch.tensor([0.1, 0.2, 2.3, 4.5], dtype=d))),
    # one tensor and constants
    *(row("logit", "fb", lambda d, eps=eps: (sample(50, dtype=d, low=0.05, high=0.95), eps)) for eps in (None, 0.1)),
    *(row("logit", "f", lambda d, eps=eps: (SPECIAL, eps)) for eps in (None, 0.1)),
    *(row("round.decimals", "fb", lambda d: (sample(50, dtype=d, low=-30, high=30),), decimals=n) for n in (0, 2, -1)),
    row("angle", "fic", lambda d: (sample(5, dtype=d),)),
    row("angle", "f", lambda d: (SPECIAL,)),
    row("nan_to_num", "fb", lambda d: (SPECIAL.to(d),)),
    row("nan_to_num", "fb", lambda d: (SPECIAL.to(d), 1.0, 2.0, 3.0)),
    row("nan_to_num", "i", lambda d: (sample(5, dtype=d),)),
    *(row("polygamma", "f", lambda d, n=n: (n, _positive(d, least=0) + 0.3)) for n in (0, 1, 2)),
    # clamping
    row("clamp", "fb", lambda d: (sample(4, 5, dtype=d), -1.1, 1.3)),
    row("clamp", "fi", lambda d: (sample(4, 5, dtype=d), 2, 1)),
    row("clamp", "i", lambda d: (sample(4, 5, dtype=d), -1.5)),
    row("clamp", "f", lambda d: (SPECIAL,), max=1),
    row("clamp", "f", lambda d: (SPECIAL, math.nan, 1.0)),
    row("clamp.Tensor", "fb", lambda d: (sample(4, 5, dtype=d), sample(5, dtype=d), sample(4, 1, dtype=d))),
    row("clamp.Tensor", "f", lambda d: (LEFT, RIGHT)),
    *(row(f"clamp_{end}", "f", lambda d: (SPECIAL, 0.5)) for end in ("min", "max")),
    *(row(f"clamp_{end}.Tensor", "f", lambda d: (LEFT, RIGHT)) for end in ("min", "max")),
    # three tensors
    row("where.self", "fbi", lambda d: (sample(4, 1) > 0, sample(4, 5, dtype=d), sample(5, seed=1))),
    row("where.self", "f", lambda d: (sample(4, 1) > 0, sample(4, 5), sample(dtype=torch.float64))),
    row("masked_fill.Scalar", "fbit", lambda d: (sample(4, 1, dtype=d), sample(4, 5) > 0, 1)),
    row("masked_fill.Tensor", "fbi", lambda d: (sample(4, 1, dtype=d), sample(4, 5) > 0, torch.tensor(3).to(d))),
    *(
        row(name, "fdb", lambda d: (sample(4, 5, dtype=d), sample(5, dtype=d), sample(4, 1, dtype=d)), value=0.3)
        for name in ("addcmul", "addcdiv")
    ),
    row("addcmul", "fi", lambda d: (sample(4, dtype=d), sample(4, dtype=d, seed=1), sample(4, dtype=d, seed=2))),
    row("addcdiv", "f", lambda d: (sample(4, dtype=d), sample(4, dtype=d, seed=1), sample(4, dtype=d, seed=2))),
    *(row("lerp.Scalar", "fdb", lambda d, w=w: (sample(4, 5, dtype=d), sample(5, dtype=d), w)) for w in (0.2, 0.7)),
    row("lerp.Scalar", "f", lambda d: (torch.tensor([1e8]), torch.tensor([1.0]), 1.0)),  # meets the end exactly
    row("lerp.Tensor", "fb", lambda d: (sample(4, 5, dtype=d), sample(5, dtype=d), sample(4, 1, dtype=d))),
]


@tables(pairs=map(pair, sorted(TWO)), at_special_pairs=AT_SPECIAL_PAIRS, others=ROWS)
def test_rows(rows):
    check_rows(rows)


OTHERS = (
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask",
    "frexp.Tensor",
    "hash_tensor",
)
"""Tested in test_quantization.py and test_bits.py."""


def test_every_operation_is_tested():
    assert untested(("elementwise", "arithmetic"), ROWS, elsewhere=[*ONE, *TWO, *OTHERS]) == []


# -- the harness itself -----------------------------------------------------------------------------------------------


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


def test_an_operation_without_a_row_is_noticed():
    assert "exp" in untested(("elementwise",), ROWS)

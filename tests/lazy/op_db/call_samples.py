"""Random calls of operations on the lazy device and on the CPU: values, dtypes, shapes and errors must be alike.

Operands have random shapes (also 0-d and empty), dtypes (also different ones in one call), layouts (transposed,
strided, expanded) and special values.

    python tests/lazy/op_db/call_samples.py [calls] [seed ...]    # exits with 1 if one differs without an error
"""

from __future__ import annotations

import dataclasses
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

import xla_amp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 127.0, 1e4, float("inf"), float("-inf"), float("nan"))
NUMBERS = (0, 1, -1, 2, 3, 7, -5, 0.5, -1.5, 2.0, True, False)
SHAPES = ((), (1,), (3,), (0,), (2, 3), (3, 1), (2, 0), (4, 5), (2, 3, 4), (1, 3, 1), (2, 1, 3, 2))

UNARY = (
    "abs", "acos", "acosh", "angle", "argsort", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil",
    "conj_physical", "cos", "cosh", "deg2rad", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix",
    "flatten", "floor", "frac", "i0", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "lgamma",
    "log", "log10", "log1p", "log2", "logical_not", "logit", "nan_to_num", "neg", "nonzero", "positive", "rad2deg",
    "ravel", "real", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc",
    "sinh", "sqrt", "square", "t", "tan", "tanh", "trunc", "unique",
)  # fmt: skip
BINARY = (
    "add", "atan2", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "copysign", "div", "eq", "float_power", "floor_divide", "fmax", "fmin", "fmod", "ge", "gt", "heaviside", "hypot",
    "isclose", "le", "logaddexp", "logical_and", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul",
    "ne", "nextafter", "pow", "remainder", "rsub", "sub", "true_divide", "xlogy",
)  # fmt: skip
REDUCTIONS = (
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "max", "mean", "median", "min",
    "nanmean", "nansum", "norm", "prod", "std", "sum", "var",
)  # fmt: skip
SCANS = (
    "cummax", "cummin", "cumprod", "cumsum", "diff", "flip", "fliplr", "logcumsumexp", "sort", "softmax",
    "log_softmax", "unbind",
)  # fmt: skip
TERNARY = ("addcdiv", "addcmul", "clamp", "lerp", "where")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call: `function` of the operands, which are moved to the device."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                flat = value.detach().flatten().tolist()
                return f"{value.dtype}{list(value.shape)}/{value.stride()}{flat[:6]}".replace("torch.", "")
            return repr(value)

        parts = [*(text(operand) for operand in self.operands), *(f"{k}={v}" for k, v in self.options.items())]
        return f"{self.name}({', '.join(parts)})"


def _tensor(rng: random.Random, dtype: torch.dtype | None = None, shape: Any = None) -> torch.Tensor:
    dtype = dtype or rng.choice(DTYPES)
    shape = rng.choice(SHAPES) if shape is None else shape
    count = 1
    for extent in shape:
        count *= extent
    if dtype is torch.bool:
        values: list[Any] = [rng.random() < 0.5 for _ in range(count)]
    elif dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        extremes = (limits.min, limits.max, 0, 1)
        values = [
            rng.choice(extremes) if rng.random() < 0.1 else rng.randint(max(-9, limits.min), 9) for _ in range(count)
        ]
    else:
        values = [rng.choice(SPECIAL) if rng.random() < 0.2 else rng.uniform(-4, 4) for _ in range(count)]
    tensor = torch.tensor(values, dtype=dtype).reshape(shape)
    layout = rng.randrange(4)
    if layout == 1 and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == 2 and tensor.dim():
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if layout == 3 and tensor.dim() and tensor.shape[0] > 1:
        return tensor[:1].expand(tensor.shape)
    return tensor


def _drawn(rng: random.Random) -> Call | None:
    kind = rng.choice(
        ("unary", "binary", "binary", "number", "reduction", "scan", "ternary", "cast", "index", "inplace")
    )
    x = _tensor(rng)
    dim = rng.randint(-3, 2)
    options: dict[str, Any] = {}
    operands: tuple[Any, ...] = (x,)
    if kind == "unary":
        name = rng.choice(UNARY)
    elif kind in ("binary", "inplace"):
        name = rng.choice(BINARY)
        other = rng.choice((x.shape, x.shape, (), x.shape[-1:]))
        operands = (x, _tensor(rng, rng.choice((x.dtype, None)), other))
    elif kind == "number":
        name, number = rng.choice(BINARY), rng.choice(NUMBERS)
        operands = rng.choice(((x, number), (x, number), (number, x)))
    elif kind == "reduction":
        name = rng.choice(REDUCTIONS)
        if rng.random() < 0.6:
            options["dim"] = dim
            if rng.random() < 0.5:
                options["keepdim"] = True
        if name in ("sum", "prod", "mean", "nansum") and rng.random() < 0.3:
            options["dtype"] = rng.choice(DTYPES)
    elif kind == "scan":
        name = rng.choice(SCANS)
        options = {} if name in ("fliplr", "diff") else {"dims": (dim,)} if name == "flip" else {"dim": dim}
        if name == "sort":
            options |= {"descending": rng.random() < 0.5, "stable": True}
    elif kind == "ternary":
        name = rng.choice(TERNARY)
        operands = tuple(_tensor(rng, rng.choice((x.dtype, x.dtype, None)), x.shape) for _ in range(3))
        if name == "where":
            operands = (_tensor(rng, torch.bool, x.shape), *operands[1:])
    elif kind == "cast":
        target = rng.choice(DTYPES)
        return Call(name=f"to {target}", function=lambda x: x.to(target), operands=(x,), options={})
    else:
        name = rng.choice(("gather", "index_select", "take", "take_along_dim", "repeat_interleave", "index"))
        extent = x.shape[dim] if x.dim() and -x.dim() <= dim < x.dim() else x.numel()
        index = torch.tensor([rng.randint(-1, extent) for _ in range(3)])
        if name == "index":
            return Call(name=name, function=lambda x, i: x[i], operands=(x, index), options={})
        operands = {"take": (x, index), "gather": (x, dim, index), "index_select": (x, dim, index)}.get(
            name, (x, index.clamp(min=0), dim)
        )
    if kind == "inplace":
        method = name + "_"
        if not hasattr(torch.Tensor, method):
            return None

        def in_place(x: torch.Tensor, *rest: Any) -> Any:
            x = x.clone()
            return getattr(x, method)(*rest)

        return Call(name=method, function=in_place, operands=operands, options={})
    return Call(name=name, function=getattr(torch, name), operands=operands, options=options)


def calls(seed: int, count: int) -> Iterator[Call]:
    """`count` random calls."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        call = _drawn(rng)
        if call is not None:
            made += 1
            yield call


def _moved(value: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise TypeError("not strided")
            whole = leaf.new_empty(0).set_(leaf.untyped_storage()).to(device) if leaf.numel() else None
            return (
                leaf.to(device)
                if whole is None
                else whole.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
            )
        return device if leaf == "cpu" or isinstance(leaf, torch.device) else leaf

    return tree_map(move, value)


def _run(call: Call, operands: Any, options: Any) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return call.function(*operands, **options)
        except Exception as error:
            return error


def _read(value: Any) -> Any:
    if isinstance(value, Exception):
        return value
    try:
        return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
    except Exception as error:
        return error


TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex64: 5e-5,
    torch.complex128: 1e-8,
}
"""Relative and absolute error of each dtype; others are exact."""


def _difference(wanted: Any, got: Any) -> str:
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        if isinstance(wanted, Exception) and isinstance(got, type(wanted)):
            return ""
        if isinstance(wanted, Exception) and isinstance(got, Exception):
            return f"class: {type(wanted).__name__} there, {type(got).__name__}: {got}"[:200]
        side = "accepts" if isinstance(wanted, Exception) else "refuses"
        return f"{side}: {wanted if isinstance(wanted, Exception) else got!r}"[:200]
    theirs, ours = (tree_flatten(value)[0] for value in (wanted, got))
    if len(theirs) != len(ours):
        return "another number of results"
    for a, b in zip(theirs, ours, strict=True):
        if not isinstance(a, torch.Tensor):
            if a != b and a == a:
                return f"value: {a} there, {b}"
            continue
        if a.dtype is not b.dtype or a.shape != b.shape:
            return f"form: {a.dtype}{list(a.shape)} there, {b.dtype}{list(b.shape)}"
        if a.dtype in TOLERANCE:
            wide = torch.complex128 if a.dtype.is_complex else torch.float64
            bound = TOLERANCE[a.dtype]
            same = torch.isclose(a.to(wide), b.to(wide), rtol=bound, atol=bound, equal_nan=True)
        else:
            same = a == b
        if not bool(same.all()):
            where = int((~same).flatten().nonzero()[0])
            return f"value: {a.flatten()[where].item()} there, {b.flatten()[where].item()} (element {where})"
    return ""


def compare(seed: int, count: int, device: torch.device, batch: int = 8) -> Iterator[tuple[Call, str]]:
    """(call, how it differs or the empty string) of random calls; `batch` calls are recorded before a value is read."""
    pending: list[tuple[Call, Any, Any]] = []

    def finish() -> Iterator[tuple[Call, str]]:
        for call, wanted, got in pending:
            yield call, _difference(wanted, _read(got))
        pending.clear()

    for call in calls(seed, count):
        try:
            operands, options = _moved((call.operands, call.options), device)
        except Exception:  # a dtype or layout that the device does not have
            continue
        got = _run(call, operands, options)
        pending.append((call, _run(call, call.operands, call.options), got))
        if len(pending) == batch:
            yield from finish()
    yield from finish()


REASONS: tuple[tuple[str, str, str], ...] = (
    ("cummax|cummin", "refuses: IndexError", "torch ignores a dimension out of range if there are no elements"),
    (
        "floor_divide_?|remainder_?|fmod_?",
        "accepts: RuntimeError.'ZeroDivisionError",
        "a program cannot raise for a value",
    ),
    (
        "gather|index|index_select|take|take_along_dim",
        "refuses: (IndexError|RuntimeError)",
        "torch checks no index of none",
    ),
    ("to torch.int(32|64)", "value", "undefined in C++: torch gives the least integer, XLA the nearest and 0 for NaN"),
    ("argsort", "value", "the order of equal elements is not defined"),
    ("true_divide_?|div_?", "value: nan there, 0.0", "XLA turns a boolean times a number into a selection"),
    ("index_select", "class: RuntimeError there, IndexError", "the CPU raises either, by the tensor's layout"),
    ("max|median|min", "class: IndexError there", "of no elements: torch looks at sizes first, both refuse"),
    (
        "median",
        "(refuses: NotImpl|value: -9223372036854775808 there, 0)",
        "of no elements: torch gives NaN in any dtype",
    ),
    ("take_along_dim", "accepts: RuntimeError.'ZeroDivisionError", "of no elements"),
    (
        "logical_(and|or|xor)_?",
        "accepts: NotImplementedError.*ComplexHalf",
        "torch promotes float16 to complex32, for which the CPU has no kernel",
    ),
)
"""(operation, difference, reason), both as regular expressions."""


def reason(call: Call, difference: str) -> str:
    """Why a call may differ, or the empty string."""
    for name, pattern, why in REASONS:
        if re.fullmatch(name, call.name) and re.match(pattern, difference):
            return why
    found = {leaf.dtype for leaf in tree_flatten(call.operands)[0] if isinstance(leaf, torch.Tensor)}
    if difference.startswith("value") and found & {torch.float16, torch.bfloat16} and found & set(INTEGERS):
        return "an integer beside a half type: torch rounds it to the half type first"
    special = any(
        leaf.dtype.is_complex and not bool(torch.isfinite(leaf).all())
        for leaf in tree_flatten(call.operands)[0]
        if isinstance(leaf, torch.Tensor)
    )
    return "infinite complex numbers: torch and XLA multiply them differently" if special else ""


def main(arguments: list[str]) -> int:
    """Prints the calls that differ and a summary; returns the exit status."""
    count = int(arguments[0]) if arguments else 1000
    seeds = [int(text) for text in arguments[1:]] or [0]
    device, kinds, silent = xla_amp.xla_device(), Counter[str](), 0
    for seed in seeds:
        for call, difference in compare(seed, count, device):
            kinds[difference.partition(":")[0] or "alike"] += 1
            if difference and not reason(call, difference):
                silent += not difference.startswith(("accepts", "refuses", "class"))
                print(f"seed {seed}  {call}\n    {difference}", flush=True)
    print(f"{sum(kinds.values())} calls: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    return int(silent > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

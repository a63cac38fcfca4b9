"""Entries of torch's own operator database on the lazy device beside the CPU: outputs and gradients.

All samples of some entries are recorded before anything runs, forward and backward together: one executable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map

from xla_amp import lazy as engine
from xla_amp.errors import XlaAmpError

ENTRIES: dict[str, OpInfo] = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
"""All entries by name, ``"add"`` or ``"linalg.norm.subgradients_at_zero"``."""
Close = Callable[[torch.Tensor, torch.Tensor], str]
"""What differs between two tensors, in words, or the empty string."""
LOW = 2.0**-5
"""Bound of half types: on the CPU some operations round in between."""
DOUBLE = 1e-8
"""Bound of 64-bit types, which float32 in between would miss."""
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Bounds of a number's error: relative to itself, and relative to the greatest of its tensor (of at least 1).  Rounding
to a half type costs 5e-4 or more."""

BOUNDS = dict.fromkeys((torch.bfloat16, torch.float16), (LOW, LOW))
BOUNDS |= dict.fromkeys((torch.float64, torch.complex128), (DOUBLE, DOUBLE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """One sample that did not come out as on the CPU."""

    sample: int
    stage: str
    """``"raises"`` (no result), or ``"differs"`` (a result that is not the CPU's)."""
    message: str


def samples(
    op: OpInfo, count: int | None, dtype: torch.dtype = torch.float32, least: int = 0
) -> list[tuple[int, SampleInput]]:
    """(number, sample): all of an entry's in a dtype, or the `count` that have the most forms of arguments together.

    With `least`, fewer where another one would add fewer forms.  Of an entry without float32 its first dtype instead;
    of one without another dtype none.
    """
    torch.manual_seed(0)
    if dtype not in op.dtypes and op.dtypes:
        if dtype is not torch.float32:
            return []
        dtype = sorted(op.dtypes, key=str)[0]
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse samples: "in beta state"
        found = list(enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)))
    if count is None or len(found) <= count:
        return found
    forms = {number: _forms(sample) for number, sample in found}
    chosen: list[int] = []
    for _ in range(count):
        best = max(forms, key=lambda number: len(forms[number]))
        if chosen and len(forms[best]) < least:
            break
        chosen.append(best)
        seen = forms.pop(best)
        forms = {number: left - seen for number, left in forms.items()}
    return [each for each in found if each[0] in chosen]


def _forms(sample: SampleInput) -> set[Hashable]:
    """What is special about each argument of a sample: flags, words, signs, ranks."""

    def form(leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype, leaf.dim(), not leaf.numel()
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            return type(leaf), leaf > 0, leaf < 0
        return str(leaf)

    leaves, _ = tree_flatten_with_path((sample.input, sample.args, sample.kwargs), is_leaf=lambda x: x is None)
    return {(path, form(leaf)) for path, leaf in leaves}


def _moved(value: Any, device: torch.device, gaps: bool) -> Any:
    """`value` with fresh leaf tensors on `device`; every mention of the CPU names `device` too.

    With `gaps` each tensor that has its memory for itself is every second element of a wider one.
    """
    leaves: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in leaves:
                leaves[id(leaf)] = _fresh(leaf.detach(), device, gaps).requires_grad_(leaf.requires_grad)
            return leaves[id(leaf)]
        if isinstance(leaf, torch.device) or (leaf == "cpu" and isinstance(leaf, str)):
            return device
        return leaf

    return tree_map(move, value)


def _fresh(leaf: torch.Tensor, device: torch.device, gaps: bool) -> torch.Tensor:
    """A copy on `device`; of a part of a larger memory, the same part of a copy of all of it (``as_strided``)."""
    whole = leaf
    if leaf.layout is torch.strided and leaf.untyped_storage().nbytes() > leaf.nbytes and not leaf.is_conj():
        whole = leaf.new_empty(0).set_(leaf.untyped_storage())
    copied = whole.clone() if device.type == "cpu" else whole.to(device)
    if gaps and whole is leaf and leaf.layout is torch.strided and leaf.dim():
        return torch.stack((copied, copied), -1)[..., 0].detach()
    return copied if whole is leaf else copied.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset()).detach()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """Numbers that are all different, the same for every device."""
    return torch.cos(torch.arange(1.0, output.numel() + 1)).reshape(output.shape).to(output.dtype)


def evaluate(op: OpInfo, sample: SampleInput, device: torch.device, gaps: bool = False) -> dict[str, Any]:
    """Outputs and gradients of one sample on `device` (not yet read)."""
    arguments = _moved((sample.input, sample.args, sample.kwargs), device, gaps)
    given, args, kwargs = arguments
    torch.manual_seed(0)
    output = op(given, *args, **kwargs)
    processed = sample.output_process_fn_grad(output)
    gradients: list[torch.Tensor | None] = []
    leaves = [leaf for leaf in _tensors(arguments) if leaf.requires_grad]
    roots = [x for x in _tensors(processed) if x.requires_grad]
    if op.supports_autograd and leaves and roots:
        weights = [_cotangent(root).to(device) for root in roots]
        gradients = list(torch.autograd.grad(roots, leaves, weights, allow_unused=True))
    plain = [leaf for leaf in tree_flatten(processed)[0] if not isinstance(leaf, torch.Tensor)]
    return {"outputs": _tensors(processed), "gradients": gradients, "numbers": plain}


def difference(got: dict[str, Any], want: dict[str, Any], close: Close) -> str:
    """What differs, in words, or the empty string."""
    if len(got["outputs"]) != len(want["outputs"]) or len(got["gradients"]) != len(want["gradients"]):
        return f"{len(got['outputs'])} outputs and {len(got['gradients'])} gradients instead of " + (
            f"{len(want['outputs'])} and {len(want['gradients'])}"
        )
    for kind in ("outputs", "gradients"):
        for i, (x, y) in enumerate(zip(got[kind], want[kind], strict=True)):
            if x is None or y is None:
                if x is not y:
                    return f"{kind}[{i}] is {'absent' if x is None else 'there'}, unlike the CPU's"
                continue
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return f"{kind}[{i}] is {x.dtype} {list(x.shape)}, expected {y.dtype} {list(y.shape)}"
            if said := close(x.detach().cpu(), y.detach()):
                return f"{kind}[{i}]: {said}"
    for x, y in zip(got["numbers"], want["numbers"], strict=True):
        if type(x) is not type(y) or (not isinstance(x, (torch.device, torch.Generator)) and x != y and x == x):
            return f"number {x!r} instead of {y!r}"
    return ""


def near(factor: float) -> Close:
    """Comparison at `factor` times the usual bounds (`LOW` of half types); integers and booleans must be equal."""

    def close(x: torch.Tensor, y: torch.Tensor) -> str:
        finite = y[y.isfinite()].abs() if y.is_floating_point() or y.is_complex() else y.new_empty(0)
        greatest = float(finite.max()) if finite.numel() else 0.0
        exact = not (y.is_floating_point() or y.is_complex())
        relative, absolute = BOUNDS.get(y.dtype, (RELATIVE, ABSOLUTE))
        rtol, atol = (0.0, 0.0) if exact else (factor * relative, factor * absolute * max(greatest, 1))
        try:
            torch.testing.assert_close(x, y, equal_nan=True, rtol=rtol, atol=atol)
        except AssertionError as error:
            return " ".join(str(error).split())
        return ""

    return close


def same_moments(x: torch.Tensor, y: torch.Tensor) -> str:
    """Comparison of means: ten standard errors apart at most, as some drop whole features."""
    a, b = ((z.abs() if z.is_complex() else z).double() for z in (x, y))
    if a.numel() < 8 or not bool(a.isfinite().all() and b.isfinite().all()):
        return ""
    bound = 10 * float(((a.var() + b.var()) / a.numel()).sqrt()) + 1e-6
    apart = abs(float(a.mean() - b.mean()))
    return "" if apart <= bound else f"means {apart:.3g} apart, more than {bound:.3g}"


def anything(x: torch.Tensor, y: torch.Tensor) -> str:
    """Comparison of nothing but what was compared before it: dtype and shape."""
    return ""


def _accepts(op: OpInfo, sample: SampleInput) -> bool:
    """Whether the CPU has kernels for the sample and its gradient, which it lacks of some in some dtypes."""
    try:
        evaluate(op, sample, torch.device("cpu"))
    except Exception:
        return False
    return True


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What came of an entry."""

    ran: int = 0
    """Samples."""
    failed: list[Failure] = dataclasses.field(default_factory=list)


def outcomes(
    ops: Mapping[str, OpInfo],
    device: torch.device,
    count: int | None,
    closeness: Callable[[str, SampleInput], Close],
    dtype: torch.dtype = torch.float32,
    least: int = 0,
) -> dict[str, Outcome]:
    """The outcome of each entry by the comparison that `closeness` gives for its samples; one program for all.

    Operands of the second sample have gaps on the device; those of the first where `least` leaves no second.
    """
    found = {name: Outcome() for name in ops}
    recorded: list[tuple[str, int, Close, dict[str, Any], dict[str, Any]]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated operations warn on every device
        for name, op in ops.items():
            chosen = samples(op, count, dtype, least)
            gapped = 1 if least and len(chosen) == 1 else 2
            for number, sample in chosen:
                if dtype is not torch.float32 and not _accepts(op, sample):
                    continue
                found[name].ran += 1
                try:
                    of_memory = name.startswith(("as_strided", "view_as_complex"))  # they see what is between elements
                    got = evaluate(op, sample, device, gaps=found[name].ran == gapped and not of_memory)
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"
                    found[name].failed.append(Failure(sample=number, stage="raises", message=message))
                    continue
                want = evaluate(op, sample, torch.device("cpu"))
                recorded.append((name, number, closeness(name, sample), got, want))
        with contextlib.suppress(XlaAmpError):  # the values that it concerns raise it when they are read
            engine.sync()
        for name, number, close, got, want in recorded:
            try:
                stage, said = "differs", difference(got, want, close)
            except Exception as error:
                stage, said = "raises", f"{type(error).__name__}: {error}"
            if said:
                found[name].failed.append(Failure(sample=number, stage=stage, message=said))
    return found

"""Entries of torch's own operator database on the lazy device beside the CPU: outputs and gradients, in float32.

All samples of an entry are recorded before anything runs, forward and backward together, so that an entry costs one
executable (or a few: `BATCH`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

from xla_amp import lazy as engine

ENTRIES: dict[str, OpInfo] = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
"""All entries by name, ``"add"`` or ``"linalg.norm.subgradients_at_zero"``."""
BATCH = 8
"""Samples to one executable."""
Close = Callable[[torch.Tensor, torch.Tensor], str]
"""What differs between two tensors, in words, or the empty string."""
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Bounds of a number's error: relative to itself, and relative to the greatest of its tensor (of at least 1).  Rounding
to a half type costs 5e-4 or more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """One sample that did not come out as on the CPU."""

    sample: int
    stage: str
    """``"raises"`` (no result), or ``"differs"`` (a result that is not the CPU's)."""
    message: str


def samples(op: OpInfo, count: int | None) -> list[tuple[int, SampleInput]]:
    """(number, sample): all of an entry's, or `count` of them evenly spaced from the first on."""
    torch.manual_seed(0)
    dtype = torch.float32 if torch.float32 in op.dtypes or not op.dtypes else sorted(op.dtypes, key=str)[0]
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse samples: "in beta state"
        found = list(enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)))
    if count is None or len(found) <= count:
        return found
    return [found[i * len(found) // count] for i in range(count)]


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with fresh leaf tensors on `device`; every mention of the CPU names `device` too."""
    leaves: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in leaves:
                leaves[id(leaf)] = _fresh(leaf.detach(), device).requires_grad_(leaf.requires_grad)
            return leaves[id(leaf)]
        if isinstance(leaf, torch.device) or (leaf == "cpu" and isinstance(leaf, str)):
            return device
        return leaf

    return tree_map(move, value)


def _fresh(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`; of a part of a larger memory, the same part of a copy of all of it (``as_strided``)."""
    whole = leaf
    if leaf.layout is torch.strided and leaf.untyped_storage().nbytes() > leaf.nbytes and not leaf.is_conj():
        whole = leaf.new_empty(0).set_(leaf.untyped_storage())
    copied = whole.clone() if device.type == "cpu" else whole.to(device)
    return copied if whole is leaf else copied.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset()).detach()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """Numbers that are all different, the same for every device."""
    return torch.cos(torch.arange(1.0, output.numel() + 1)).reshape(output.shape).to(output.dtype)


def evaluate(op: OpInfo, sample: SampleInput, device: torch.device) -> dict[str, Any]:
    """Outputs and gradients of one sample on `device` (not yet read)."""
    arguments = _moved((sample.input, sample.args, sample.kwargs), device)
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
    """Comparison at `factor` times the usual bounds; integers and booleans must be equal."""

    def close(x: torch.Tensor, y: torch.Tensor) -> str:
        finite = y[y.isfinite()].abs() if y.is_floating_point() or y.is_complex() else y.new_empty(0)
        greatest = float(finite.max()) if finite.numel() else 0.0
        exact = not (y.is_floating_point() or y.is_complex())
        rtol, atol = (0.0, 0.0) if exact else (factor * RELATIVE, factor * ABSOLUTE * max(greatest, 1))
        try:
            torch.testing.assert_close(x, y, equal_nan=True, rtol=rtol, atol=atol)
        except AssertionError as error:
            return " ".join(str(error).split())
        return ""

    return close


def same_moments(x: torch.Tensor, y: torch.Tensor) -> str:
    """Comparison of means: six standard errors apart at most."""
    a, b = ((z.abs() if z.is_complex() else z).double() for z in (x, y))
    if a.numel() < 8 or not bool(a.isfinite().all() and b.isfinite().all()):
        return ""
    bound = 6 * float(((a.var() + b.var()) / a.numel()).sqrt()) + 1e-6
    apart = abs(float(a.mean() - b.mean()))
    return "" if apart <= bound else f"means {apart:.3g} apart, more than {bound:.3g}"


def anything(x: torch.Tensor, y: torch.Tensor) -> str:
    """Comparison of nothing but what was compared before it: dtype and shape."""
    return ""


def failures(
    op: OpInfo,
    device: torch.device,
    count: int | None,
    closeness: Callable[[SampleInput], Close],
) -> tuple[int, list[Failure]]:
    """(samples that were run, those that failed by the comparison that `closeness` gives for them)."""
    chosen = samples(op, count)
    failed: list[Failure] = []
    for start in range(0, len(chosen), BATCH):
        failed += _batch(op, device, chosen[start : start + BATCH], closeness)
    return len(chosen), failed


def _batch(
    op: OpInfo, device: torch.device, chosen: list[tuple[int, SampleInput]], closeness: Callable[[SampleInput], Close]
) -> list[Failure]:
    found: list[Failure] = []
    recorded: list[tuple[int, SampleInput, dict[str, Any], dict[str, Any]]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated operations warn on every device
        for number, sample in chosen:
            try:
                got = evaluate(op, sample, device)
            except Exception as error:
                found.append(Failure(sample=number, stage="raises", message=f"{type(error).__name__}: {error}"))
                continue
            recorded.append((number, sample, got, evaluate(op, sample, torch.device("cpu"))))
        try:
            engine.sync()
        except Exception as error:
            if len(chosen) > 1:
                return [failure for one in chosen for failure in _batch(op, device, [one], closeness)]
            return [Failure(sample=chosen[0][0], stage="raises", message=f"sync: {type(error).__name__}: {error}")]
        for number, sample, got, want in recorded:
            try:
                said = difference(got, want, closeness(sample))
            except Exception as error:
                found.append(Failure(sample=number, stage="raises", message=f"read: {type(error).__name__}: {error}"))
                continue
            if said:
                found.append(Failure(sample=number, stage="differs", message=said))
    return found

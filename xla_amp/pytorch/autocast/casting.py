"""Apply a cast to the arguments of one operation.

A *prepare* function is made once per operation and cast.  It takes the positional and keyword arguments from torch's
dispatcher (trailing defaults left out) and returns the function to call and its arguments.  It runs on every recorded
operation, so it looks only at arguments that hold tensors by the schema, and reads the device only where the dtype
needs a cast.

Eligible tensors are torch's: floating, not float64, on the region's device.

Unlike torch's casts of weights, casts are not cached: a step uses most weights once, XLA merges equal casts, and a cast
that is not cached cannot be stale after an in-place update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from xla_amp.common.types import Cast
from xla_amp.errors import PolicyError
from xla_amp.policy import op_catalog
from xla_amp.policy.cast_dtypes import CastDtypes, cast_dtypes

Arguments: TypeAlias = Sequence[Any]
Keywords: TypeAlias = Mapping[str, Any]
Prepared: TypeAlias = tuple[Callable[..., Any], Arguments, Keywords]
Prepare: TypeAlias = Callable[[Arguments, Keywords], Prepared]

ELIGIBLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype is not torch.float64
)
CAST_FROM: Mapping[torch.dtype, frozenset[torch.dtype]] = MappingProxyType({to: ELIGIBLE - {to} for to in ELIGIBLE})
"""Target dtype -> eligible dtypes that must be cast to reach it."""

_BANNED = MappingProxyType(
    {
        # torch's text, which users and code may recognise.
        "binary_cross_entropy": (
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
            "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
            "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
            "safe to autocast."
        ),
    }
)


class Operands:
    """Positions of the tensor arguments of one operation, from its schema."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.name = str(operator).removeprefix("aten.").removesuffix(".default")
        self.arguments = list(operator._schema.arguments)
        kinds = [_kind(argument) for argument in self.arguments]
        positional = [(i, k) for i, (k, a) in enumerate(zip(kinds, self.arguments, strict=True)) if not a.kwarg_only]
        self.tensors = tuple(index for index, kind in positional if kind == "tensor")
        self.lists = tuple(index for index, kind in positional if kind == "list")
        if any(a.name == "running_mean" for a in self.arguments):
            # The running statistics are updated in place, so casting them would lose the update. Kernels want weight
            # and bias in the dtype of the statistics, so these are not cast either.
            self.tensors = self.tensors[:1]
        self.keywords = tuple(a.name for a, kind in zip(self.arguments, kinds, strict=True) if a.kwarg_only and kind)

    def all(self, arguments: Arguments, keywords: Keywords) -> list[torch.Tensor]:
        """The tensors among the arguments, in order, those in lists included."""
        values = [arguments[index] for index in sorted(self.tensors + self.lists) if index < len(arguments)]
        values += [keywords[name] for name in self.keywords if name in keywords]
        flat = [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]
        return [item for item in flat if isinstance(item, torch.Tensor)]


@functools.cache
def operands(operator: Any) -> Operands:
    """`Operands` of an operator, made once: reading a schema takes about 30 us."""
    return Operands(operator)


def _kind(argument: Any) -> str:
    text = str(argument.real_type)
    if "Tensor" not in text or argument.is_out:
        return ""
    return "list" if "List[" in text else "tensor"


def make(cast: Cast, operands: Operands, device_type: str) -> Prepare:
    """The prepare function that gives `operands`' operation the cast.

    Args:
        cast: the policy's.
        operands: of the operation.
        device_type: of the region.

    Raises:
        PolicyError: the operation has no ``dtype`` argument or overload that the cast needs.
    """
    if cast == "ban":
        return _ban(operands)
    if cast == "fp32_append":
        return _fp32_append(operands, device_type)
    if cast == "fp32_out":
        return _fp32_out(operands, device_type)
    if cast == "fp32_inside":
        return _fp32_inside(operands, device_type)
    if cast == "low_fp32_out":
        raise PolicyError(
            f"cast 'low_fp32_out' for {operands.name}: torch has no differentiable product of low operands with a "
            "float32 result; JAX and StableHLO follow this rule. Give it 'low' or 'fp32'"
        )
    if cast == "promote":
        return _promote(operands, device_type)
    if cast == "keep":
        return _keep(operands)
    if cast == "low" and operands.name in _LOOKUPS:
        return _low_after(operands, device_type)
    return _to(operands, device_type, cast)


def _keep(operands: Operands) -> Prepare:
    call = _entry(operands.operator)
    return lambda arguments, keywords: (call, arguments, keywords)


def _ban(operands: Operands) -> Prepare:
    name = operands.name

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        raise RuntimeError(
            _BANNED.get(name)
            or f"{name} is banned under autocast by the policy in force. Call it outside the region, or allow it with "
            f"xla_amp.policy.override({{{name!r}: 'keep'}})"
        )

    return prepare


def dtypes_after(cast: Cast, dtypes: tuple[torch.dtype | None, ...], device_type: str) -> CastDtypes[torch.dtype]:
    """The dtypes of an operation on torch: it promotes mixed operands itself, and takes an argument ``dtype``.

    The low dtype is read from torch each time, because a `torch.autocast` inside our region may have changed it.
    """
    return cast_dtypes(cast, dtypes, torch.get_autocast_dtype(device_type), torch.float32)


def _to(operands: Operands, device_type: str, kind: Cast) -> Prepare:
    """Casts to one dtype, whatever the operands have."""
    call = _entry(operands.operator)
    cast = _caster(operands, device_type)
    low = torch.get_autocast_dtype
    one = (torch.float32,)

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        target: Any = cast_dtypes(kind, one, low(device_type), torch.float32).operands[0]
        return call, *cast(arguments, keywords, target)

    return prepare


_LOOKUPS = frozenset({"embedding"})
"""Operations that copy rows of a table: cast afterwards, which gives the same values with fewer elements, and a
gradient that adds up in the table's dtype."""


def _low_after(operands: Operands, device_type: str) -> Prepare:
    call = _entry(operands.operator)

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        if not _eligible(arguments[0], device_type):
            return call, arguments, keywords
        return functools.partial(_cast_back, call, torch.get_autocast_dtype(device_type), False), arguments, keywords

    return prepare


def _promote(operands: Operands, device_type: str) -> Prepare:
    call = _entry(operands.operator)
    cast = _caster(operands, device_type)
    tensors, lists = operands.tensors, operands.lists

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        first = None
        count = len(arguments)
        values = [arguments[index] for index in tensors if index < count]
        for index in lists:
            values += arguments[index]
        for value in values:
            dtype = getattr(value, "dtype", None)  # neither None nor a number has one
            if dtype is first:
                continue
            if dtype in ELIGIBLE and value.device.type == device_type:
                if first is not None:
                    target: Any = dtypes_after("promote", (first, dtype), device_type).operands[0]
                    return call, *cast(arguments, keywords, target)
                first = dtype
        return call, arguments, keywords

    return prepare


def _fp32_out(operands: Operands, device_type: str) -> Prepare:
    call = _entry(operands.operator)
    dtype_arguments = [(i, a.kwarg_only) for i, a in enumerate(operands.arguments) if a.name == "dtype"]
    if not dtype_arguments or 0 not in operands.tensors:
        raise PolicyError(
            f"cast 'fp32_out' for {operands.name}: the operation has no argument `dtype` after a first tensor; "
            "give it 'fp32'"
        )
    position, keyword_only = dtype_arguments[0]
    wide = dtypes_after("fp32_out", (torch.float32,), device_type).result

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        if not _eligible(arguments[0], device_type) or keywords.get("dtype") is not None:
            return call, arguments, keywords
        if keyword_only or len(arguments) <= position:
            return call, arguments, {**keywords, "dtype": wide}
        if arguments[position] is not None:
            return call, arguments, keywords
        return call, [*arguments[:position], wide, *arguments[position + 1 :]], keywords

    return prepare


def _fp32_append(operands: Operands, device_type: str) -> Prepare:
    call = _entry(operands.operator)
    names = [argument.name for argument in operands.arguments]
    packet = operands.operator.overloadpacket
    siblings = [getattr(packet, overload) for overload in packet.overloads()]
    matching = [s for s in siblings if [a.name for a in s._schema.arguments] == [*names, "dtype"]]
    if not matching or 0 not in operands.tensors:
        raise PolicyError(
            f"cast 'fp32_append' for {operands.name}: no overload takes the same arguments and a `dtype`; "
            "give it 'fp32'"
        )
    sibling = _entry(matching[0])
    wide = dtypes_after("fp32_append", (torch.float32,), device_type).result
    defaults = [argument.default_value if argument.has_default_value() else None for argument in operands.arguments]

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        if not _eligible(arguments[0], device_type):
            return call, arguments, keywords
        return sibling, [*arguments, *defaults[len(arguments) :]], {**keywords, "dtype": wide}

    return prepare


_MIXED = frozenset({"cpu", "jax"})
"""Device types whose kernels compute in float32 for low operands, and read float32 parameters beside them."""
_UNIFORM = frozenset({"cuda", "xpu"})
"""The same, but their norms want parameters in the dtype of the input."""


_COMPOSED = frozenset({"logsumexp", "rms_norm", "special_logsumexp"})
"""Operations that torch composes of others: the gradient of a logsumexp would use its rounded result."""


def _fp32_inside(operands: Operands, device_type: str) -> Prepare:
    """The kernel's own float32 where it has that; elsewhere the operands are cast, and the result is cast back.

    Tensors that autograd saves have the input's dtype, but for statistics and parameters.
    """
    if problem := op_catalog.unfit([operands.name], "fp32_inside"):
        raise PolicyError(problem)
    call = _entry(operands.operator)
    cast = _caster(operands, device_type)
    own_kernel = device_type in _MIXED | _UNIFORM and operands.name not in _COMPOSED
    parameters = len(operands.tensors) > 1

    def prepare(arguments: Arguments, keywords: Keywords) -> Prepared:
        index = operands.tensors[0] if _eligible(arguments[operands.tensors[0]], device_type) else -1
        if index < 0:
            return call, arguments, keywords
        given = arguments[index].dtype
        if given is torch.float32:
            return call, *cast(arguments, keywords, given)
        if not own_kernel:
            arguments, keywords = cast(arguments, keywords, torch.float32)
        elif parameters and device_type in _UNIFORM:
            arguments, keywords = cast(arguments, keywords, given)
        return functools.partial(_cast_back, call, given, not own_kernel), arguments, keywords

    return prepare


def _cast_back(call: Callable[..., Any], dtype: torch.dtype, saves_float32: bool, *args: Any, **kwargs: Any) -> Any:
    """``call(...)`` with its first result in `dtype`, and large float32 tensors saved for the backward pass, too."""
    size = max(value.numel() for value in args if isinstance(value, torch.Tensor))

    def pack(saved: torch.Tensor) -> tuple[torch.Tensor, bool]:
        narrowed = saved.dtype is torch.float32 and saved.numel() >= size
        return (saved.to(dtype) if narrowed else saved), narrowed

    def unpack(packed: tuple[torch.Tensor, bool]) -> torch.Tensor:
        saved, narrowed = packed
        return saved.to(torch.float32) if narrowed else saved

    with contextlib.ExitStack() as stack:
        # The hooks of torch.utils.checkpoint stay in force.
        if saves_float32 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            with contextlib.suppress(RuntimeError):  # torch.func allows none
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        result = call(*args, **kwargs)
    return (result[0].to(dtype), *result[1:]) if isinstance(result, tuple) else result.to(dtype)


def _eligible(value: Any, device_type: str) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in ELIGIBLE and value.device.type == device_type


_BINDINGS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        f"aten.{name}.default": getattr(torch, name)
        for name in (
            *("conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm", "addmm", "baddbmm"),
            *("batch_norm", "group_norm", "layer_norm"),
        )
    }
    | {"aten.linear.default": torch.nn.functional.linear}
)
"""Frequent operations -> torch's Python binding, which parses arguments in half the time of the operator handle.  Not
for all operations: a binding reads a default such as ``reduction=Mean`` as 0, which has another meaning."""


def _entry(operator: Any) -> Callable[..., Any]:
    """The callable that reaches the operator with the least overhead."""
    return _BINDINGS.get(str(operator), operator)


def _caster(
    operands: Operands, device_type: str
) -> Callable[[Arguments, Keywords, torch.dtype], tuple[Arguments, Keywords]]:
    tensors, lists, names = operands.tensors, operands.lists, operands.keywords

    def cast(arguments: Arguments, keywords: Keywords, target: torch.dtype) -> tuple[Arguments, Keywords]:
        sources = CAST_FROM[target]
        count = len(arguments)

        def one(value: Any) -> Any:
            # Neither None nor a number (`x + 1` is an add.Tensor) has a dtype.
            if getattr(value, "dtype", None) in sources and value.device.type == device_type:
                return value.to(target)
            return value

        prepared: Any = arguments
        for index in tensors:
            if index < count and (result := one(value := arguments[index])) is not value:
                if prepared is arguments:
                    prepared = list(arguments)
                prepared[index] = result
        if lists:
            prepared = list(prepared)
            for index in lists:
                if index < count and prepared[index] is not None:
                    prepared[index] = [one(value) for value in prepared[index]]
        if names and keywords:
            named = {name: keywords[name] for name in names if name in keywords}
            cast_ = {n: [one(v) for v in x] if isinstance(x, list | tuple) else one(x) for n, x in named.items()}
            keywords = {**keywords, **cast_}
        return prepared, keywords

    return cast

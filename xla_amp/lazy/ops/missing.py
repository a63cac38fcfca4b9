"""Run an operation without a kernel: by its functional variant, by PyTorch's decomposition, or on the CPU.

A decomposition records the operations that it is made of.  It is what ``torch.export.default_decompositions()`` has, so
an operation that no program runs often needs no lowering.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from xla_amp.common import config, events
from xla_amp.errors import DeviceError, MissingLoweringError
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.ops.checks import argument_rules
from xla_amp.lazy.ops.operators import functional_arguments, functional_variant
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io, transfer
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback of the device's dispatch key.

    Raises:
        MissingLoweringError: torch has no decomposition either, and the CPU is not allowed.
    """
    for attempt in (_into_out, _decomposed):
        result = attempt(operator, args, kwargs)
        if result is not NotImplemented:
            return result
    if config.fallback() == "cpu":
        return _on_cpu(operator, args, kwargs)
    name = str(operator).removesuffix(".default")
    raise MissingLoweringError(
        f"the operation {name} has no lowering for the lazy XLA device. Either give it one:\n"
        f'    @xla_amp.lowering.register("{_registered_name(operator)}")\n'
        "    def lowering(*jax_arrays): ...\n"
        "or set XLA_AMP_FALLBACK=cpu to run it on the CPU (each call then waits for the device)"
    )


def _registered_name(operator: Any) -> str:
    """The name under which `xla_amp.lowering.register` takes the operator: that of its functional variant.

    The in-place and ``out=`` variants are derived from it.
    """
    schema = functional_variant(operator)._schema
    name: str
    library, _, name = schema.name.partition("::")
    overload: str = schema.overload_name
    return ("" if library == "aten" else f"{library}::") + name + (f".{overload}" if overload else "")


def refuse_xla(operator: Any, *args: Any, **kwargs: Any) -> None:
    """The fallback of torch_xla's dispatch key, where torch_xla is not installed.

    Raises:
        DeviceError: always; it says how the device is written.
    """
    raise DeviceError(
        f"torch has the device 'xla' with torch_xla only ({operator}): write xla_amp.xla_device() or {DEVICE_TYPE!r} "
        "for the lazy XLA device"
    )


# -- torch's decompositions -------------------------------------------------------------------------------------------


@functools.cache
def _decompositions() -> Mapping[Any, Any]:
    """Operator -> decomposition.  A plain dict: the `get` of torch's table finds nothing."""
    found = torch.export.default_decompositions()
    return {operator: found[operator] for operator in found}


def decomposition(functional: Any) -> Any:
    """Torch's decomposition of a functional variant, which refuses what torch's kernels refuse; None without one."""
    found = _decompositions().get(functional)
    if found is None:
        return None
    defaults = {argument.name: argument.default_value for argument in functional._schema.arguments}

    def checked(*args: Any, **kwargs: Any) -> Any:
        argument_rules.check(functional, defaults | dict(zip(defaults, args, strict=False)) | kwargs)
        return found(*args, **kwargs)

    return checked


def _decomposed(operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator, or an in-place one by its functional variant; NotImplemented without a decomposition."""
    functional = functional_variant(operator)
    composed = decomposition(functional)
    if composed is None or any(argument.is_out for argument in operator._schema.arguments):
        return NotImplemented
    if functional is operator:
        return composed(*args, **kwargs)
    argument_rules.check_inplace(functional, args, kwargs)
    return args[0].copy_(composed(*args, **kwargs))


def _into_out(operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator with ``out=`` tensors by its functional variant; NotImplemented without one.

    For overloads without a kernel: those of factories (`arange`), of sizes that depend on data (`nonzero`), and of
    decompositions.
    """
    wanted = functional_arguments(operator)
    names = [argument.name for argument in operator._schema.arguments if argument.is_out]
    packet = operator.overloadpacket
    for candidate in (getattr(packet, overload) for overload in packet.overloads() if names):
        extra = [name for name, _ in functional_arguments(candidate)[len(wanted) :]]
        same = functional_arguments(candidate)[: len(wanted)] == wanted
        # Torch's own functional variant may call this one.
        ours = candidate.has_kernel_for_dispatch_key("PrivateUse1")
        function = candidate if ours else decomposition(candidate)
        if function is None or not same or extra not in ([], _FACTORY):
            continue
        options = dict(kwargs)
        outs = [options.pop(name) for name in names]
        found = function(*args, **options, **({"dtype": outs[0].dtype, "device": outs[0].device} if extra else {}))
        results = found if isinstance(found, tuple) else (found,)
        name = operator._schema.name.partition("::")[2]
        argument_rules.check_out(name, [result.dtype for result in results], [out.dtype for out in outs])
        for out, result in zip(outs, results, strict=True):
            if out.shape != result.shape and not (name in _KEEP_SHAPE and out.numel() == result.numel()):
                out.resize_(result.shape)
            out.copy_(result.view(out.shape))
        return tuple(outs) if isinstance(found, tuple) else outs[0]
    return NotImplemented


_FACTORY = ["dtype", "layout", "device", "pin_memory"]
"""Last arguments of operations that make a tensor."""
_KEEP_SHAPE = ("arange", "linspace", "logspace", "range")
"""Operations that fill an ``out=`` tensor of the right number of elements, whatever its shape."""


# -- on the CPU -------------------------------------------------------------------------------------------------------

_fell_back: set[str] = set()


def _on_cpu(operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs `operator` on CPU copies and copies written arguments back (counted, and warned of once)."""
    from xla_amp.torch_common.trees import tree_map

    name = str(operator)
    metrics.fallbacks += 1
    if name not in _fell_back:
        _fell_back.add(name)
        events.warn(f"{name} has no lowering and runs on the CPU (XLA_AMP_FALLBACK=cpu)")

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return tensor_io.to_host(value).clone() if tensor_io.is_lazy(value) else value  # which torch may resize

    # torch passes a number that it has wrapped in a tensor as the number.
    args = tuple(
        torch.tensor(value) if isinstance(value, Number) and isinstance(argument.type, torch.TensorType) else value
        for argument, value in zip(operator._schema.arguments, args, strict=False)
    )
    cpu_args, cpu_kwargs = tree_map(down, (args, dict(kwargs)))
    result = operator(*cpu_args, **cpu_kwargs)
    aliases: dict[int, Any] = {}
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        ours = args[index] if index < len(args) else kwargs.get(argument.name)
        theirs = cpu_args[index] if index < len(cpu_args) else cpu_kwargs.get(argument.name)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, (list, tuple)) else [(ours, theirs)]
        for mine, other in pairs:
            if isinstance(mine, torch.Tensor):
                with trace.lock:
                    tensor_io.copy(mine if mine.shape == other.shape else tensor_io.resize(mine, other.shape), other)
                aliases[id(other)] = mine

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return aliases[id(value)] if id(value) in aliases else transfer.to_device(value)

    return tree_map(up, result)

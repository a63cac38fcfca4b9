"""Instructions from outside: a JAX function as one operation of the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from xla_amp.errors import UnsupportedDtypeError
from xla_amp.lazy.dtypes import TO_TORCH
from xla_amp.lazy.graph.trace import Instruction, record, spec, trace
from xla_amp.lazy.runtime.execute import flush_if_full
from xla_amp.lazy.tensors import tensor_io


def instruction(
    name: str, function: Callable[..., Sequence[Any]], results: Sequence[Any], inputs: int, floats: int = 0
) -> Instruction:
    """An instruction that runs a JAX function.

    Args:
        name: for errors.
        function: ``function(arrays, numbers)``, called when a program is built; gives one array per result.
        results: a `jax.ShapeDtypeStruct` for each result.
        inputs: how many tensors it takes.
        floats: how many Python numbers it takes as data, each a 0-d float64.

    Raises:
        UnsupportedDtypeError: torch has no counterpart of a result's dtype.
    """
    outs = []
    for result in results:
        dtype = TO_TORCH.get(result.dtype) if isinstance(result.dtype, np.dtype) else None
        if dtype is None:
            raise UnsupportedDtypeError(
                f"{name}: a value of dtype {result.dtype} has no counterpart in torch; convert it inside the function"
            )
        outs.append(spec(tuple(result.shape), dtype))

    def emit(context: Any, inputs: Any, floats: Any, *_: Any) -> Sequence[Any]:
        return function(inputs, floats)

    return Instruction(name, emit, tuple(outs), inputs, floats)


def append(run: Instruction, tensors: Sequence[torch.Tensor], floats: Sequence[float] = ()) -> list[torch.Tensor]:
    """Records an instruction on these tensors and numbers; returns a fresh tensor for each result."""
    with trace.lock:
        flush_if_full()
        numbers, _ = tensor_io.operands(tensors)
        trace.floats.extend(floats)
        first = record(run, *numbers)
        return [tensor_io.new_tensor(of, first + place) for place, of in enumerate(run.outs) if of is not None]

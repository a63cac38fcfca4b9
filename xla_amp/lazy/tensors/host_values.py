"""Values of tensors that the host knows, or computes from what was uploaded; reading them does not end the step.

``metrics.host_values`` counts those that are computed (`xla_amp.lazy.programs.host_eval`).
"""

from __future__ import annotations

import numpy as np
import torch

from xla_amp.lazy.base.dtypes import to_torch
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.programs import execute, host_eval, mesh
from xla_amp.lazy.programs.metrics import metrics
from xla_amp.lazy.tensors import tensor_io


def value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the lazy device as a CPU tensor, or None if it depends on the device."""
    if host_eval.host() is None or execute.flush_begins.listeners or mesh.active is not None:
        return None  # an observed step must count this as a read
    result = None
    with trace.lock:
        buffer = tensor_io.buffer_of(tensor)
        if buffer.number < 0:
            result = copy_of(tensor)
        elif host_eval.may_know(buffer, tensor.is_floating_point()):
            number, value_spec = tensor_io.read(tensor)
            if (known := host_eval.known(number)) is not None:
                result = to_torch(known.copy()).view(value_spec.shape)
    if result is not None:
        metrics.host_values += 1
    return result


def copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of `tensor` from the host's copy of an upload, or None."""
    found = host_eval.copy_of(tensor_io.buffer_of(tensor))
    # What a program computed is read-only, which torch warns of.
    return None if found is None else tensor_io.window(to_torch(np.require(found, requirements="W")), tensor)

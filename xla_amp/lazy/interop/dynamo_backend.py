"""``torch.compile(model, backend="xla_amp")``: Dynamo's graphs run on the lazy device as they are.

The device records the operations of a graph, their backward pass and their casts as it does without `torch.compile`.
A function of this package ends a graph, and Python runs it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch.utils.checkpoint import checkpoint

from xla_amp.engines import base
from xla_amp.errors import DeviceError
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend: a function that runs `graph`, Dynamo's graph of torch functions.

    Raises:
        ValueError: ``mode`` or ``options`` of `torch.compile` are given.
        DeviceError: the graph has parameters, and they are on another device.
    """
    if options:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"torch.compile(..., backend='xla_amp', {given}): expected neither mode nor options, which are inductor's. "
            "Leave them out; XLA's own options are in XLA_AMP_COMPILER_OPTIONS"
        )
    base.require_lazy("torch.compile(backend='xla_amp')", "torch.compile(backend='openxla')")
    parameters = [x for x in inputs if isinstance(x, torch.nn.Parameter)]
    if parameters and not any(x.device.type == DEVICE_TYPE for x in parameters):
        raise DeviceError(
            f"torch.compile(backend='xla_amp'): expected a model on the device {DEVICE_TYPE!r}, got parameters on "
            f"{parameters[0].device}; move it with model.to(xla_amp.xla_device()) first"
        )

    tag = torch.ops.higher_order.tag_activation_checkpoint  # leaves random numbers to inductor
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=tag):
                node.target = _checkpoint
            part.recompile()

    def run(*arguments: Any) -> Any:
        step_marker.before_forward(graph)
        return graph.forward(*arguments)

    return run


def _checkpoint(body: torch.fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """Runs a checkpointed part, again in the backward pass with the random numbers of the forward pass."""
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *arguments, **{**options, "use_reentrant": False})


def _end_graphs_at_functions_of_this_package() -> None:
    """And of JAX.  Except for `forward_hook`, which Dynamo must read and which does nothing then."""
    for package in ("jax", "jaxlib"):
        trace_rules.add(package)
    folder, prefix = Path(__file__).parents[2], "xla_amp."
    for inlined in ("lazy", "steps", "forward_hook"):
        for module in pkgutil.iter_modules([str(folder)]):
            if module.name != inlined:
                trace_rules.add(prefix + module.name)
        folder, prefix = folder / inlined, f"{prefix}{inlined}."


_end_graphs_at_functions_of_this_package()
step_marker.keep_hook()

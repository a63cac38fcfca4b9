"""``torch.compile(model, backend="xla_amp")``: Dynamo's graphs on the lazy device.

AOTAutograd makes one functional graph of the forward pass and one of the backward pass.  Each is recorded once
(`recorded_graph`) and then appended to the trace as a whole, so Python's part of a step shrinks to two calls, while the
step remains one program with the same operations as without `torch.compile`.

Casts are decided while AOTAutograd traces.  Dynamo guards on torch's autocast state, but not on the rules of
`xla_amp.policy`; so the graphs are made again for other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_module_simplified, make_boxed_func  # type: ignore[import-untyped]

from xla_amp import policy as policies
from xla_amp.backends import base
from xla_amp.errors import DeviceError, PolicyError
from xla_amp.lazy.interop.recorded_graph import recorded
from xla_amp.lazy.programs import pjrt
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import generator
from xla_amp.policy import Policy, regions
from xla_amp.policy.load import default_name

Compiled = Callable[..., Any]


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
    """The backend: a function that records `graph`.

    Args:
        graph: Dynamo's graph of torch functions.
        inputs: example arguments, fake tensors among them.
        **options: ``mode`` and ``options`` of `torch.compile`, which must be left out.

    Raises:
        ValueError: an option.
        DeviceError: the graph has parameters, and they are on another device.
        PolicyError: autocast is on, by rules for modules, which a graph does not have.
    """
    if options:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"torch.compile(..., backend='xla_amp', {given}): expected neither mode nor options, which are inductor's. "
            "Leave them out; XLA's own options are in XLA_AMP_COMPILER_OPTIONS"
        )
    base.require_lazy("torch.compile(backend='xla_amp')", "torch.compile(backend='openxla')")
    _require_parameters_here(inputs)
    if not _has_region(graph):
        return _trace(graph, inputs)
    rules = _rules()
    made = {rules: _trace(graph, inputs, rules)}

    def call(*arguments: Any) -> Any:
        rules = _rules()
        compiled = made.get(rules)
        if compiled is None:
            compiled = made[rules] = _trace(graph, arguments, rules)
        return compiled(*arguments)

    return call


def _require_parameters_here(inputs: Sequence[Any]) -> None:
    parameters = [x for x in inputs if isinstance(x, torch.nn.Parameter)]
    if parameters and not any(x.device.type == DEVICE_TYPE for x in parameters):
        raise DeviceError(
            f"torch.compile(backend='xla_amp'): expected a model on the device {DEVICE_TYPE!r}, got parameters on "
            f"{parameters[0].device}; move it with model.to(xla_amp.xla_device()) first"
        )


def _has_region(graph: torch.fx.GraphModule) -> bool:
    """Whether autocast is on in a part of the graph."""
    inside = any(node.target is torch.amp.autocast_mode._enter_autocast for node in graph.graph.nodes)
    return inside or torch.is_autocast_enabled(DEVICE_TYPE)


def _rules() -> Policy:
    region = regions.current(DEVICE_TYPE)
    return policies.resolve(default_name(pjrt.platform())) if region is None else region.policy


def _trace(graph: torch.fx.GraphModule, inputs: Sequence[Any], rules: Policy | None = None) -> Compiled:
    """The graph through AOTAutograd."""
    if rules is not None and rules.by_module:
        raise PolicyError(
            f"torch.compile(backend='xla_amp'): the policy {rules.name!r} has rules for modules, and a compiled graph "
            "has operations only. Use xla_amp.compile(step), or rules without module patterns"
        )
    backward = torch.compiler.disable(_backward)
    compiled = aot_module_simplified(
        graph, list(inputs), fw_compiler=_forward, bw_compiler=backward, inference_compiler=_backward
    )
    disabled: Compiled = torch.compiler.disable(compiled)
    return disabled


class _GraphInterpreter(torch.fx.Interpreter):
    """Runs a graph of ATen operations on tensors of the device, which are row-major where torch's would not be."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation.

        A traced view may be one of strides that only torch's own devices have.  Random states around an operation,
        for checkpointed parts of a model, are those of the device's generator.
        """
        if target is torch.ops.higher_order.run_and_save_rng_state:
            return generator.get_rng_state(), super().call_function(args[0], args[1:], kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            now = generator.state()
            generator.set_rng_state(args[0])
            result = super().call_function(args[1], args[2:], kwargs)
            generator.set_state(*now)
            return result
        target = torch.ops.aten.reshape.default if target in _VIEWS else target
        return super().call_function(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        """A result that the device does not compute is None here, and a tensor where AOTAutograd saves it."""
        result = super().run_node(n)
        if result is None and isinstance(n.meta.get("val"), torch.Tensor):
            return torch.zeros(0, device=DEVICE_TYPE)
        return result


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _backward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    boxed: Compiled = make_boxed_func(recorded(_GraphInterpreter(graph).run))
    return boxed


def _forward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    run = recorded(_GraphInterpreter(graph).run)

    def begin(*arguments: Any) -> Any:
        step_marker.graph_begins()
        return run(*arguments)

    boxed: Compiled = make_boxed_func(begin)
    return boxed


step_marker.keep_hook()

"""`find_overflow`: find the operation of a training step that produces the first inf or NaN."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from xla_amp.common import arguments, compiling, events, progress
from xla_amp.errors import StepError
from xla_amp.pytorch.autocast import operation_recorder
from xla_amp.tools.overflow.dispatch_modes import Magnitudes, Operands, is_floating
from xla_amp.tools.overflow.report import MOST, OverflowReport, Producer
from xla_amp.torch_common.trees import tree_leaves
from xla_amp.training.reader import reachable
from xla_amp.training.step_state import restored


def find_overflow(
    step: Callable[..., Any],
    *args: Any,
    objects: Iterable[Any] = (),
    **kwargs: Any,
) -> OverflowReport:
    """Finds the operation that produces the first inf or NaN of a training step.  Leaves all state as it was.

    Runs the step once if all is finite, otherwise twice; each run is one program of the lazy device.  The first finds
    operations with nonfinite results, forward, backward and update; the second examines their operands.  What autocast
    casts for an operation has the name of that.  Each run is undone: tensors that operations wrote to,
    `.grad`, random generators, and the attributes of modules, optimizers, schedulers and scalers that `step` reaches
    through its arguments, its closure, the globals that it names, or the object whose method it is.

    Only torch operations are watched: not what the step computes in NumPy, or in JAX, for which
    `xla_amp.jax.find_overflow` does the same.  What the step was given or wrote as a constant (a mask filled with
    ``-inf``) is no overflow until it reaches a gradient or what the step returns; a NaN computed from an infinity is.

    Args:
        step: one iteration of a training loop: forward, backward, and optionally the optimizer.  Every call must do
            the same, so pass the batch as an argument; do not let it draw from an iterator.
        *args: for `step`.
        **kwargs: for `step`.
        objects: further modules, optimizers, schedulers and scalers that the step changes.

    Raises:
        StepError: the second run differs from the first, or the step runs no torch operation.
        TypeError: `step` is not callable.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([300.0]))
        >>> def step(x):
        ...     (x.half() * weight.half()).sum().backward()
        >>> report = find_overflow(step, torch.tensor([300.0]))
        >>> report.first.place.operation, report.first.made, report.first.inputs[0].largest
        ('mul.Tensor', 'inf', 300.0)
    """
    arguments.require_function("find_overflow(step)", step, "one iteration of a training loop, as a function")
    step = uncompiled(step)
    found = [*reachable(step, (*args, *kwargs.values())), *objects]
    with progress.shown("find_overflow", first=3), compiling.for_few_runs(), operation_recorder.recording():
        return _find(functools.partial(step, *args, **kwargs), found)


def _find(run: Callable[[], Any], found: list[Any]) -> OverflowReport:
    scale = _scale(found)
    progress.tell("looking at what every operation reads and makes", 1, 2)
    watch = Magnitudes()
    with (
        restored(found),
        _gradients(_parameters(found), watch) as gradients,
        events.decided.subscribed(watch.name_casts),
        events.undecided.subscribed(watch.name_casts),
        watch,
    ):
        returned = run()
        given_back = [watch.magnitude(leaf) for leaf in map(_as_tensor, tree_leaves(returned)) if is_floating(leaf)]
    if not watch.count:
        raise StepError(_NO_OPERATIONS)
    computed, is_bad = watch.read([*gradients.values(), *given_back])
    made = [each for each in computed if each.produced]
    # Without gradient and result, any operation may be what the step is for.
    passed_on = [each for each in computed if each.made] if any(is_bad) or not is_bad else []
    producers: tuple[Producer, ...] = ()
    if wanted := made[:MOST] or passed_on[:1]:
        progress.tell("looking at the operands of those that made an inf or NaN", 2, 2)
        operands = Operands(wanted)
        with restored(found), operands:
            run()
        producers = operands.producers()
        if operands.count != watch.count or len(producers) != len(wanted):
            raise StepError(_DIVERGED.format(watch.count, operands.count))
    names = [*gradients, *(f"result {number}" for number in range(len(given_back)))]
    bad = [name for name, each in zip(names, is_bad, strict=True) if each]
    return OverflowReport(
        producers=producers if made else (),
        passed_on=producers[0] if producers and not made else None,
        nonfinite_gradients=tuple(name for name in bad if name in gradients),
        results=tuple(name for name in bad if name not in gradients),
        not_watched=() if is_bad else ("what the step is for: it returns no number and reaches no parameter",),
        scale=scale,
        operations=watch.count,
    )


def uncompiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind `xla_amp.compile`, whose replays dispatch no operations."""
    if isinstance(step, functools.partial):
        return functools.partial(uncompiled(step.func), *step.args, **step.keywords)
    if isinstance(step, types.MethodType):
        return functools.partial(uncompiled(step.__func__), step.__self__)
    return step.__wrapped__ if getattr(step, "replays_without_operations", False) else step  # type: ignore[attr-defined]


_NO_OPERATIONS = (
    "find_overflow: the step ran no torch operation, so nothing was watched. For a JAX function: "
    "xla_amp.jax.find_overflow(function, *args)"
)
_DIVERGED = (
    "find_overflow: two runs of the step differ ({} operations, then {}). Pass the batch as an argument instead of "
    "drawing it from an iterator, and pass objects that the step changes as objects="
)


@contextlib.contextmanager
def _gradients(parameters: Mapping[str, torch.nn.Parameter], watch: Magnitudes) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the largest magnitude of each parameter's gradient, after its last accumulation."""
    found: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def record(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and is_floating(gradient):
                found[name] = watch.magnitude(gradient)

        return record

    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    handles = [parameter.register_post_accumulate_grad_hook(hook(name)) for name, parameter in trained.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _parameters(found: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """Parameters by their names in modules, otherwise by their position in an optimizer."""
    modules = [value for value in found if isinstance(value, torch.nn.Module)]
    # Largest module first: submodules may be reachable too.
    modules.sort(key=lambda value: -sum(1 for _ in value.modules()))
    named = [each for module in modules for each in module.named_parameters()]
    for optimizer in (value for value in found if isinstance(value, torch.optim.Optimizer)):
        for number, group in enumerate(optimizer.param_groups):
            named += [(f"param_groups[{number}]['params'][{place}]", p) for place, p in enumerate(group["params"])]
    result: dict[str, torch.nn.Parameter] = {}
    for parameter, name in {id(p): (p, name) for name, p in reversed(named)}.values():
        result[name if name not in result else f"{name} (another model's, {len(result)})"] = parameter
    return dict(reversed(result.items()))


def _scale(found: Iterable[Any]) -> float | None:
    scalers = [value for value in found if isinstance(value, torch.amp.GradScaler) and value.is_enabled()]
    return float(scalers[0].get_scale()) if scalers else None


def _as_tensor(leaf: Any) -> Any:
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else leaf

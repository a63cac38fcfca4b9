"""`find_overflow`: which operation of a training step made the first inf or NaN, and which gradients become zero."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xla_amp.diagnose import tables
from xla_amp.diagnose.dispatch_modes import Gradients, Inputs, Magnitudes, Operand, Place, Producer, Widened
from xla_amp.diagnose.state_restore import reachable, unchanged
from xla_amp.errors import XlaAmpError
from xla_amp.pytorch.autocast import module_paths

__all__ = ["Operand", "OverflowReport", "Place", "Producer", "StepError", "Underflow", "find_overflow"]


class StepError(XlaAmpError, RuntimeError):
    """A step that cannot be examined: it does something else each time that it is called."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Underflow:
    """A parameter with gradients that are zero at the present scale and would not be in float32."""

    parameter: str
    lost: int
    """How many values."""
    of: int
    """How many are not zero in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OverflowReport:
    """What `find_overflow` found; ``print(report)`` says it in words, `to_json` for programs."""

    producers: tuple[Producer, ...]
    """Operations that made an inf or a NaN from values without it, in order; at most five."""
    nonfinite_gradients: tuple[str, ...]
    """Parameters whose gradients were not finite."""
    underflow: tuple[Underflow, ...]
    """Those with gradients that became zero, most of them first."""
    underflow_note: str
    """Why nothing can be said about underflow, or empty."""
    scale: float | None
    """The loss scale; None without a scaler."""
    operations: int
    """How many operations the step ran."""
    protected: tuple[str, ...]
    """What was put back besides tensors: classes of the objects that the step reaches."""

    @property
    def first(self) -> Producer | None:
        """The operation that made the first inf or NaN; None for a finite step."""
        return self.producers[0] if self.producers else None

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        scale = "no scaler" if self.scale is None else f"loss scale {self.scale:g}"
        lines = [f"{self.operations} operations, {scale}"]
        if self.first is None:
            lines.append("every result was finite")
        else:
            lines += ["first inf or NaN:", *(f"  {line}" for line in _described(self.first))]
            if len(self.producers) > 1:
                lines.append("later ones that did not come of it alone:")
                lines += [f"  {_headline(producer)}" for producer in self.producers[1:]]
        if self.nonfinite_gradients:
            lines.append(f"gradients that were not finite ({len(self.nonfinite_gradients)}): " + _some(self))
        if self.underflow:
            lines.append("gradients that are zero at this scale and not in float32:")
            rows = [(u.parameter, f"{u.lost:,}", f"{u.of:,}", f"{u.lost / u.of:.1%}") for u in self.underflow[:20]]
            table = tables.plain(("parameter", "lost", "of", "share"), rows, numeric=("lost", "of", "share"))
            lines += [f"  {line}" for line in table.splitlines()]
        lines.append(self.underflow_note or ("" if self.underflow else "no gradient underflows to zero at this scale"))
        return "\n".join(line for line in lines if line)


def find_overflow(step: Callable[..., Any], *args: Any, objects: Iterable[Any] = (), **kwargs: Any) -> OverflowReport:
    """Runs a training step three times or so and tells where its first inf or NaN came from.  Changes nothing.

    The first run notes the largest magnitude of every operation's result, forward, backward and update; the second
    looks at the inputs of the suspects; the third, in float32, tells which gradients are zero only for want of range.
    After each, everything is put back: tensors that operations wrote to, `.grad`, random generators, and the
    attributes of modules, optimizers, schedulers and scalers that `step` reaches through its arguments, its closure,
    the globals that it names, or the object whose method it is.

    An infinity that the program asks for (a mask filled with ``-inf``) is no find; a NaN made of it is.

    Args:
        step: what a training loop does in one iteration: forward, backward, and the optimizer if you like.  It must
            do the same each time, so give it its batch as an argument and do not let it draw from an iterator.
        args, kwargs: for `step`.
        objects: more modules, optimizers, schedulers and scalers that it changes, where it reaches them otherwise.

    Raises:
        StepError: the second run did something else than the first.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([300.0]))
        >>> def step(x):
        ...     (x.half() * weight.half()).sum().backward()
        >>> report = find_overflow(step, torch.tensor([300.0]))
        >>> report.first.place.operation, report.first.made, report.first.inputs[0].largest
        ('mul.Tensor', 'inf', 300.0)
    """
    step = _recorded(step)
    found = [*reachable(step, (*args, *kwargs.values())), *objects]
    parameters = _parameters(found)
    low, wide = Gradients(parameters), Gradients(parameters)
    magnitudes = Magnitudes()
    scale = _scale(found)
    modules = module_paths.acquire()
    try:
        with unchanged(found), low.watched(), magnitudes:
            step(*args, **kwargs)
        magnitudes.read()
        producers: list[Producer] = []
        suspects = list(magnitudes.bad.items())
        while suspects and not producers:
            inputs = Inputs(dict(suspects[:_AT_A_TIME]))
            with unchanged(found), Gradients(parameters).watched(), inputs:
                step(*args, **kwargs)
            if inputs.diverged is not None or inputs.count != magnitudes.count:
                raise StepError(_DIVERGED.format(magnitudes.count, inputs.count))
            producers, suspects = inputs.producers(), suspects[_AT_A_TIME:]
        note = ""
        try:
            with unchanged(found), wide.watched(), Widened():
                step(*args, **kwargs)
        except Exception as error:  # whatever a model does in another dtype than it was written for
            note = f"underflow is not known: the step in float32 failed with {type(error).__name__}: {error}"
    finally:
        module_paths.release(modules)
    if not parameters:
        note = "underflow is not known: the step reaches no module and no optimizer; name them with objects="
    return OverflowReport(
        producers=tuple(producers[:5]),
        nonfinite_gradients=tuple(name for name, count in low.bad.items() if int(count)),
        underflow=() if note else _underflow(low, wide),
        underflow_note=note,
        scale=scale,
        operations=magnitudes.count,
        protected=tuple(type(value).__name__ for value in found),
    )


def _recorded(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step behind `xla_amp.compile`, whose replays show no operations."""
    if isinstance(step, functools.partial):
        return functools.partial(_recorded(step.func), *step.args, **step.keywords)
    return step.__wrapped__ if getattr(step, "replays_without_operations", False) else step  # type: ignore[attr-defined]


_AT_A_TIME = 16
"""Operations looked at closely in one run.  What comes after the first inf is mostly its consequence, so one run does,
but for models with many infinities that are meant."""
_DIVERGED = (
    "find_overflow: the step did not do the same twice ({} operations, then {}). Give it its batch as an argument "
    "instead of letting it draw from an iterator, and pass what it changes besides tensors as objects="
)


def _parameters(found: Iterable[Any]) -> dict[str, torch.nn.Parameter]:
    """By the names that modules give them, else by their place in an optimizer."""
    named: dict[int, tuple[str, torch.nn.Parameter]] = {}
    found = list(found)
    modules = [value for value in found if isinstance(value, torch.nn.Module)]
    # A model comes before its parts: they may be reachable too.
    for module in sorted(modules, key=lambda value: -sum(1 for _ in value.modules())):
        for name, parameter in module.named_parameters():
            named.setdefault(id(parameter), (name, parameter))
    for optimizer in (value for value in found if isinstance(value, torch.optim.Optimizer)):
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                name = names[place] if names else f"param_groups[{number}]['params'][{place}]"
                named.setdefault(id(parameter), (name, parameter))
    result: dict[str, torch.nn.Parameter] = {}
    for name, parameter in named.values():
        result[name if name not in result else f"{name} (another model's, {len(result)})"] = parameter
    return result


def _scale(found: Iterable[Any]) -> float | None:
    scalers = [value for value in found if isinstance(value, torch.amp.GradScaler) and value.is_enabled()]
    return float(scalers[0].get_scale()) if scalers else None


def _underflow(low: Gradients, wide: Gradients) -> tuple[Underflow, ...]:
    counts = []
    for name, zero in low.zero.items():
        nonzero = wide.nonzero.get(name)
        if nonzero is not None:
            lost, of = torch.stack([(zero & nonzero).sum(), nonzero.sum()]).tolist()
            if lost:
                counts.append(Underflow(parameter=name, lost=lost, of=of))
    return tuple(sorted(counts, key=lambda entry: -entry.lost / entry.of))


def _headline(producer: Producer) -> str:
    place = producer.place
    what = f"{place.operation} made {producer.made} in the {place.phase} pass"
    if place.gradient_of:
        what += f" (gradient of {place.gradient_of})"
    if place.module:
        what += f", module {place.module}"
    return what + (f", {place.location}" if place.location else "")


def _described(producer: Producer) -> list[str]:
    lines = [_headline(producer)]
    for operand in producer.inputs:
        extra = f", {operand.infinities:,} inf" if operand.infinities else ""
        extra += f", {operand.nans:,} NaN" if operand.nans else ""
        shape = "x".join(map(str, operand.shape)) or "scalar"
        sizes = f"{operand.smallest:.3g} to {operand.largest:.3g}" if operand.largest else "all zero"
        lines.append(f"{operand.name}: {operand.dtype} {shape}, magnitudes {sizes}{extra}")
    largest = torch.finfo(getattr(torch, producer.result)).max
    if producer.made == "inf":
        lines.append(f"result: {producer.result}, which holds magnitudes up to {largest:.3g}")
    return lines


def _some(report: OverflowReport) -> str:
    names = report.nonfinite_gradients
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

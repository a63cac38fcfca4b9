"""`find_overflow`: find the operation of a training step that produces the first inf or NaN, and gradient underflow."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xla_amp.backends import module_paths
from xla_amp.backends.places import Place
from xla_amp.backends.step_state import reachable, restored
from xla_amp.common import arguments
from xla_amp.errors import StepError
from xla_amp.report.document import Column, Document, Finding, Row, State, Table
from xla_amp.tools.monitor import kept as kept_step
from xla_amp.tools.overflow.dispatch_modes import (
    GradientRecorder,
    NonfiniteResults,
    OperandStatistics,
    SkipHalfCasts,
    nonfinite,
)
from xla_amp.tools.overflow.report import FoundProducers, Producer, ProducerOperand, findings, reached, table

__all__ = ["OverflowReport", "Place", "Producer", "ProducerOperand", "StepError", "Underflow", "find_overflow"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Underflow:
    """A parameter with gradient values that are zero at the current loss scale and nonzero in float32."""

    parameter: str
    lost: int
    """Number of such values."""
    of: int
    """Number of values that are nonzero in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OverflowReport(FoundProducers):
    """The result of `find_overflow`; ``print(report)`` for people, `to_json` for programs."""

    producers: tuple[Producer, ...]
    """Operations that produced an inf or NaN from operands without it, in order; at most five."""
    passed_on: Producer | None
    """If there is none, and a gradient or what the step returns is not finite: the first operation that passed on an
    inf or NaN which the step was given or wrote as a constant."""
    nonfinite_gradients: tuple[str, ...]
    """Parameters with nonfinite gradients."""
    underflow: tuple[Underflow, ...]
    """Parameters with underflowing gradients, largest share first."""
    underflow_note: str
    """Why underflow is unknown, or empty."""
    scale: float | None
    """The loss scale; None without a scaler."""
    operations: int
    """Number of operations that the step ran."""
    protected: tuple[str, ...]
    """Classes of the objects that were restored besides tensors."""

    def document(self) -> Document:
        """The report for people: `xla_amp.report` writes it as a page or as text."""
        found = findings(self.producers, self.passed_on, "no torch operation made one")
        if self.nonfinite_gradients:
            answer = f"{len(self.nonfinite_gradients)}: {_some(self)}"
            found.append(Finding("Which gradients were not finite?", answer, "risk"))
        lost = f"zero at this scale and nonzero in float32: values of {len(self.underflow)} of the parameters"
        answer = self.underflow_note or (lost if self.underflow else "no gradient underflows to zero at this scale")
        state: State = "could" if self.underflow or self.underflow_note else "low"
        found.append(Finding("Which gradients underflow?", answer, state))
        columns = (
            Column("parameter", "name"),
            Column("lost", "count", meaning="Values that are zero, and nonzero in float32"),
            Column("of", "count", meaning="Values that are nonzero in float32"),
            Column("share", "share"),
        )
        rows = tuple(Row((u.parameter, u.lost, u.of, u.lost / u.of)) for u in self.underflow)
        return Document(
            title="A step with an inf or NaN" if self.producers or self.passed_on else "A finite step",
            kind="find_overflow",
            facts=(
                ("operations", f"{self.operations:,}"),
                ("loss scale", "no scaler" if self.scale is None else f"{self.scale:g}"),
            ),
            findings=tuple(found),
            tables=(
                table(self.producers, self.passed_on),
                Table(title="Gradients that underflow", columns=columns, rows=rows, ranked=True),
            ),
        )


def find_overflow(
    step: Callable[..., Any],
    *args: Any,
    objects: Iterable[Any] = (),
    kept: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> OverflowReport:
    """Finds the operation that produces the first inf or NaN of a training step.  Leaves all state restoring.

    Runs the step about three times.  The first run finds operations with nonfinite results, forward, backward and
    update; the second examines their operands; the third, in float32, finds gradients that underflow to zero.  Each
    run is undone: tensors that operations wrote to, `.grad`, random generators, and the attributes of modules,
    optimizers, schedulers and scalers that `step` reaches through its arguments, its closure, the globals that it
    names, or the object whose method it is.

    Only torch operations are watched: not what the step computes in NumPy, or in JAX, for which
    `xla_amp.jax.find_overflow` does the same.  What the step was given or wrote as a constant (a mask filled with
    ``-inf``) is no overflow until it reaches a gradient or what the step returns; a NaN computed from an infinity is.

    Args:
        step: one iteration of a training loop: forward, backward, and optionally the optimizer.  Every call must do
            the same, so pass the batch as an argument; do not let it draw from an iterator.
        *args: for `step`.
        **kwargs: for `step`.
        objects: further modules, optimizers, schedulers and scalers that the step changes.
        kept: the folder of a bad step that `xla_amp.monitor` kept, ``"run/step-40000"``: the step runs in the state
            before it, with its random state, and with its batch unless arguments are given.

    Raises:
        StepError: the second run differs from the first, the step runs no torch operation, or it does not reach a
            model, optimizer and scaler that the kept state fits.
        FileError: `kept` is no kept step.

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
    if kept is not None:
        with restored(found):
            batch = kept_step.restore(kept, found)
            return find_overflow(step, *(args or batch), objects=objects, **kwargs)
    parameters = _parameters(found)
    low, wide = GradientRecorder(parameters), GradientRecorder(parameters)
    results = NonfiniteResults()
    scale = _scale(found)
    modules = module_paths.acquire()
    try:
        with restored(found), low.recording(), results:
            returned = step(*args, **kwargs)
        results.read()
        given_back = nonfinite(returned)
        if not results.count:
            raise StepError(_NO_OPERATIONS)
        producers: list[Producer] = []
        passed_on: list[Producer] = []
        suspects = list(results.nonfinite.items())
        while suspects and not producers:
            inputs = OperandStatistics(dict(suspects[:_SUSPECTS_PER_RUN]))
            with restored(found), GradientRecorder(parameters).recording(), inputs:
                step(*args, **kwargs)
            if inputs.diverged is not None or inputs.count != results.count:
                raise StepError(_DIVERGED.format(results.count, inputs.count))
            (producers, given), suspects = inputs.producers(), suspects[_SUSPECTS_PER_RUN:]
            passed_on += given
        note = ""
        try:
            with restored(found), wide.recording(), SkipHalfCasts():  # type: ignore[no-untyped-call]
                step(*args, **kwargs)
        except Exception as error:  # a model can raise anything in another dtype
            note = f"underflow is unknown: the step in float32 failed with {type(error).__name__}: {error}"
    finally:
        module_paths.release(modules)
    bad = tuple(name for name, count in low.nonfinite.items() if int(count))
    seen = bool(given_back or low.nonfinite)  # otherwise any operation may have made what the step is for
    first = passed_on[0] if passed_on else None
    if not parameters:
        note = "underflow is unknown: the step reaches no module and no optimizer; pass them as objects="
    return OverflowReport(
        producers=tuple(producers[:5]),
        passed_on=reached(producers, first, finite=seen and not bad and not any(given_back)),
        nonfinite_gradients=bad,
        underflow=() if note else _underflow(low, wide),
        underflow_note=note,
        scale=scale,
        operations=results.count,
        protected=tuple(type(value).__name__ for value in found),
    )


def uncompiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind `xla_amp.compile`, whose replays dispatch no operations."""
    if isinstance(step, functools.partial):
        return functools.partial(uncompiled(step.func), *step.args, **step.keywords)
    return step.__wrapped__ if getattr(step, "replays_without_operations", False) else step  # type: ignore[attr-defined]


_SUSPECTS_PER_RUN = 16
"""Operations examined in one run.  Most operations after the first inf only propagate it, so one run suffices unless a
model has many intended infinities."""
_NO_OPERATIONS = (
    "find_overflow: the step ran no torch operation, so nothing was watched. For a JAX function: "
    "xla_amp.jax.find_overflow(function, *args)"
)
_DIVERGED = (
    "find_overflow: two runs of the step differ ({} operations, then {}). Pass the batch as an argument instead of "
    "drawing it from an iterator, and pass objects that the step changes as objects="
)


def _parameters(found: Iterable[Any]) -> dict[str, torch.nn.Parameter]:
    """Parameters by their names in modules, otherwise by their position in an optimizer."""
    named: dict[int, tuple[str, torch.nn.Parameter]] = {}
    found = list(found)
    modules = [value for value in found if isinstance(value, torch.nn.Module)]
    # Largest module first: submodules may be reachable too.
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


def _underflow(low: GradientRecorder, wide: GradientRecorder) -> tuple[Underflow, ...]:
    counts = []
    for name, zero in low.zero.items():
        nonzero = wide.nonzero.get(name)
        if nonzero is not None:
            lost, total = torch.stack([(zero & nonzero).sum(), nonzero.sum()]).tolist()
            if lost:
                counts.append(Underflow(parameter=name, lost=lost, of=total))
    return tuple(sorted(counts, key=lambda entry: -entry.lost / entry.of))


def _some(report: OverflowReport) -> str:
    names = report.nonfinite_gradients
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

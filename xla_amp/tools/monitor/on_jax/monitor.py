"""`monitor`: statistics of a JAX training run, computed inside the step's own executable; the first bad step is kept.

The step returns one more small array: the sums of each layer, and the step's loss, scale and flags.  It is read while
later steps run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.common.types import RANGES, VALUE_KINDS, Dtype, ValueKind
from xla_amp.errors import StepError
from xla_amp.jax import compat
from xla_amp.jax.modules import scopes
from xla_amp.jax.observations import SCALARS
from xla_amp.policy import module_patterns
from xla_amp.tools.monitor.history import Statistics, StepRecord, Sums, ValueKey
from xla_amp.tools.monitor.on_jax import collect, kept_step
from xla_amp.tools.monitor.on_jax.collect import Observed, Wanted
from xla_amp.tools.monitor.run import SAMPLE, BaseMonitor, Options

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NUMBERS: Final = (*SCALARS, "norm2")


def monitor(
    step: Callable[_P, _R],
    *,
    history: int = 64,
    directory: str | Path | None = None,
    layers: str | Iterable[str] = "*",
    kinds: Iterable[ValueKind] = VALUE_KINDS,
    sample: int = SAMPLE,
    low: Dtype | None = None,
    save_state: bool = False,
    sinks: Iterable[Callable[[StepRecord], object]] = (),
    first_step: int = 0,
) -> Monitor[_P, _R]:
    """A training step that records statistics of its layers, and keeps the first bad step; call it like `step`.

    Recorded are the activations of each name scope (modules of Flax, Equinox and Haiku, ``jax.named_scope``), and what
    `observe` marks: gradients, weights, updates, loss, loss scale.  `xla_amp.jax.value_and_grad` marks gradients, loss
    and scale itself.  All of it is part of the step's executable, through ``jit``, loops, ``remat`` and ``shard_map``,
    and no call waits for the device.  In a loop the values of all iterations count together, and of
    calls of a scope that feed the next one directly, the last.  What only the backward
    pass computes and the inside of functions with custom derivatives are not recorded.

    Args:
        step: a function of pytrees, under `jax.jit` or not.  It is compiled as a whole; arguments that its own
            ``jax.jit`` donates are donated.
        history: sampled steps that `Monitor.history` holds.
        directory: gets ``history.jsonl`` and the folder of the first bad step (`xla_amp.tools.monitor.bad_step`); None
            keeps no bad step.
        layers: patterns as in rules for modules, ``"*.attn"``; a layer that one names and all layers in it.
        kinds: of ``"activation"``, ``"gradient"``, ``"weight"`` and ``"update"``.
        sample: statistics in each `sample`-th step; 1 for every step, which is one executable.  Otherwise there are
            two, one with statistics and one without, in which also the norm of the gradients is left out where the
            step tells whether it was skipped.
        low: low dtype that underflow and headroom refer to; None is float16 if the step computes in it, else bfloat16,
            else float32.
        save_state: keep all arguments of a bad step, also those that the step would have been given by donation; they
            are not donated then, which takes memory for a second copy.
        sinks: functions that are called with each `StepRecord`, in order.
        first_step: number of the first step, of a run that goes on.

    Raises:
        ValueError: a number is out of its range, or a name of `kinds` or `low` is unknown; when it is called, if a
            pattern matches no layer.
        StepError: when it is called: the step has nothing to record.

    Example:
        >>> def step(w, x):
        ...     with jax.named_scope("layer"):
        ...         y = x @ w
        ...     return w - 0.1, jnp.mean(y)
        >>> step = monitor(step, sample=1)
        >>> w, loss = step(jnp.ones((2, 2)), jnp.ones((1, 2)))
        >>> step.read().steps[0].statistics[Key("layer", "activation")].amax
        2.0
    """
    options = Options(
        history=history,
        directory=directory,
        layers=layers,
        kinds=kinds,
        sample=sample,
        low=low,
        save_state=save_state,
        sinks=sinks,
        first_step=first_step,
    )
    return Monitor(step, options)


class _Layout(NamedTuple):
    """What the numbers of a row mean."""

    keys: tuple[ValueKey, ...]
    scalars: tuple[str, ...]
    low: Dtype

    def record(self, step: int, row: Any) -> StepRecord:
        """The record of a step."""
        values = np.asarray(row, np.float64)
        fields = len(Sums._fields)
        sums = {key: Sums(*values[i * fields : (i + 1) * fields].tolist()) for i, key in enumerate(self.keys)}
        scalars = dict(zip(self.scalars, values[len(self.keys) * fields :].tolist(), strict=True))
        norm2 = scalars.get("norm2")
        return StepRecord(
            step=step,
            loss=scalars.get("loss"),
            loss_scale=scalars.get("loss_scale"),
            skipped=bool(scalars.get("skipped", 0.0)),
            gradient_norm=None if norm2 is None else float(np.sqrt(norm2)),
            statistics=Statistics.of_layers(sums, self.low, scalars.get("loss_scale")),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Programs:
    """The compiled step for arguments of some types."""

    sampled: Callable[..., tuple[Any, Any]]
    plain: Callable[..., tuple[Any, Any]]
    layouts: dict[bool, _Layout]
    """By whether the step is sampled; known once it was traced."""
    trees: dict[bool, Callable[[Sequence[Any]], Any]]
    """Arrays -> what the function returned."""
    dynamic: tuple[bool, ...]
    donated: tuple[bool, ...]
    """Of the dynamic leaves."""


@dataclasses.dataclass
class _Waiting:
    """A step whose row has not been read."""

    number: int
    row: Any
    layout: _Layout
    sampled: bool
    kept: Mapping[int, Any] | None
    """Its arguments, while it may turn out bad."""

    def ready(self) -> bool:
        return bool(self.row.is_ready())

    def record(self) -> tuple[StepRecord, Dtype]:
        return self.layout.record(self.number, self.row), self.layout.low


class Monitor(BaseMonitor, Generic[_P, _R]):
    """A step that records; `monitor` makes it.

    Args:
        step: a function.
        options: of `monitor`.
        donate: whether arguments are donated that the step's own ``jax.jit`` donates.
    """

    front = "jax"

    def __init__(self, step: Callable[_P, _R], options: Options, *, donate: bool = True) -> None:
        if not callable(step):
            raise TypeError(f"monitor() expects a function, got {step!r} ({type(step).__name__})")
        super().__init__(options, lambda: (jax.process_index(), jax.process_count()))
        self.__wrapped__ = step
        self._step = step
        self._donate = donate and not options.save_state
        self._programs: dict[Any, _Programs] = {}

    def __repr__(self) -> str:
        return f"xla_amp.jax.monitor({getattr(self._step, '__qualname__', self._step)!s})"

    # -- for users -----------------------------------------------------------------------------------------------

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        call = kept_step.PureCall(self._step, args, kwargs)
        programs = self._programs.get(call.key)
        if programs is None:
            programs = self._programs[call.key] = self._build(call, args, kwargs)
        sampled = self._is_sampled(self._next_step)
        values = list(itertools.compress(call.leaves, programs.dynamic))
        kept = None
        if self._looks_for_bad_step:
            dynamic = [index for index, each in enumerate(programs.dynamic) if each]
            gone = set(itertools.compress(dynamic, programs.donated))
            kept = {index: leaf for index, leaf in enumerate(call.leaves) if index not in gone}
        outs, row = (programs.sampled if sampled else programs.plain)(*values)
        row.copy_to_host_async()
        self._waiting.append(_Waiting(self._next_step, row, programs.layouts[sampled], sampled, kept))
        self._next_step += 1
        self._collect(wait=False)
        result: _R = call.finish(programs.trees[sampled](outs))
        return result

    # -- programs ------------------------------------------------------------------------------------------------

    def _wanted(self, closed: Any, sampled: bool) -> Wanted:
        low, kinds = self._options.low or _low_of(closed.jaxpr), tuple(self._options.kinds)
        return Wanted(layers=tuple(self._options.layers), kinds=kinds if sampled else (), zero=RANGES[low].zero)

    def _build(self, call: kept_step.PureCall, args: Any, kwargs: Any) -> _Programs:
        dynamic, donated = _dynamic(self._step, call.leaves, args, kwargs)
        if not self._donate:
            donated = (False,) * len(donated)
        layouts: dict[bool, _Layout] = {}
        trees: dict[bool, Callable[[Sequence[Any]], Any]] = {}

        def compiled(sampled: bool) -> Callable[..., tuple[Any, Any]]:
            def run(*values: Any) -> tuple[Any, Any]:
                closed, arrays, trees[sampled] = _trace(call, dynamic, values)
                outs, found = collect.evaluate(closed, arrays, self._wanted(closed, sampled))
                found = _without_common_root(found)
                if sampled:
                    self._check(found)
                names = tuple(name for name in _NUMBERS if name in found.scalars)
                layouts[sampled] = _Layout(tuple(found.sums), names, self._options.low or _low_of(closed.jaxpr))
                parts = [*found.sums.values(), *(found.scalars[name].reshape(1) for name in names)]
                return outs, jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.float32)

            run.__name__ = f"monitored_{getattr(self._step, '__name__', 'step')}"
            return cast(
                "Callable[..., tuple[Any, Any]]",
                jax.jit(run, donate_argnums=[index for index, each in enumerate(donated) if each]),
            )

        return _Programs(
            sampled=compiled(True),
            plain=compiled(False),
            layouts=layouts,
            trees=trees,
            dynamic=dynamic,
            donated=donated,
        )

    def _check(self, found: Observed) -> None:
        layers = {key.layer for key in found.sums}
        if not layers and not found.scalars and self._options.layers == ("*",):
            raise StepError(
                "monitor(): the step has no name scopes and marks no values: nothing is recorded. Use modules, "
                "jax.named_scope, or xla_amp.jax.observe"
            )
        for pattern in self._options.layers:
            if pattern != "*" and not any(module_patterns.selects(pattern, layer) for layer in layers):
                raise ValueError(f"monitor(layers={pattern!r}): no layer of the step matches")

    # -- the bad step --------------------------------------------------------------------------------------------

    def _write(self, folder: Path, waiting: _Waiting) -> Mapping[str, Any]:
        return kept_step.write(folder, waiting.kept or {})

    def _versions(self) -> dict[str, str]:
        return {"jax": jax.__version__}


def _trace(
    call: kept_step.PureCall, dynamic: Sequence[bool], values: Sequence[Any]
) -> tuple[Any, list[Any], Callable[[Sequence[Any]], Any]]:
    """The program of a call, its arguments, and a function from its arrays to what the step returns."""
    avals = [compat.typeof(value) for value in values]
    static: list[Any] = []
    trees: list[Any] = []

    def flat(*inside: Any) -> list[Any]:
        rest = iter(inside)
        leaves = [next(rest) if each else leaf for leaf, each in zip(call.leaves, dynamic, strict=True)]
        outs, tree = jax.tree.flatten(call.run(leaves))
        static[:] = [None if compat.is_array(out) else out for out in outs]
        trees[:] = [tree]
        return [out for out in outs if compat.is_array(out)]

    with compat.retraced(), scopes.named():
        closed = compat.trace(flat, avals)

    def result(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        return jax.tree.unflatten(trees[0], [next(rest) if each is None else each for each in static])

    return closed, list(values), result


def _dynamic(step: Any, leaves: Sequence[Any], args: Any, kwargs: Any) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which leaves are traced, and which of these are donated."""
    arrays = tuple(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)
    numbers = tuple(
        array or isinstance(leaf, bool | int | float | complex) for leaf, array in zip(leaves, arrays, strict=True)
    )
    if not compat.is_jit(step):
        return numbers, (False,) * sum(numbers)
    donated = compat.donated_arguments(step, args, kwargs)
    for dynamic in (numbers, arrays):
        if len(donated) == sum(dynamic):
            return dynamic, donated
    return arrays, (False,) * sum(arrays)


def _low_of(jaxpr: Any) -> Dtype:
    found = set(_dtypes(jaxpr))
    return "float16" if "float16" in found else "bfloat16" if "bfloat16" in found else "float32"


def _dtypes(jaxpr: Any) -> Iterable[str]:
    for eqn in jaxpr.eqns:
        yield from (str(getattr(var.aval, "dtype", "")) for var in eqn.outvars)
        for inner in compat.sub_jaxprs(eqn.params):
            yield from _dtypes(inner)


def _without_common_root(found: Observed) -> Observed:
    """Paths without the scope of the outermost module, if parameters have none: Flax linen opens one for it."""
    activations = {key.layer for key in found.sums if key.kind == "activation"}
    others = {key.layer for key in found.sums if key.kind != "activation"}
    roots = {layer.partition(".")[0] for layer in activations}
    if len(roots) != 1 or not others or any(layer.partition(".")[0] in roots for layer in others):
        return found
    (root,) = roots
    renamed = {
        ValueKey(key.layer.removeprefix(root).removeprefix("."), key.kind) if key.kind == "activation" else key: row
        for key, row in found.sums.items()
    }
    return found._replace(sums=renamed)

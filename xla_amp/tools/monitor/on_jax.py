"""`statistics` and `monitor` for JAX: a pure function whose arrays the step returns, and an object that reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.jax.loss_scale import LossScale, is_inexact
from xla_amp.tools.monitor.history import HostMonitor, StepRecord


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Numbers of a step, on the device: a pytree, which a jitted step returns; `statistics` makes it."""

    numbers: jax.Array
    """float32 (names)."""
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """``gradient_norm``, ``loss``, ``loss_scale``, ``skipped``; ``nonfinite/PATH`` of a gradient, which is 1 or 0; and
    ``largest/PATH`` of a layer."""


def statistics(
    grads: Any, *, loss: Any = None, loss_scale: Any = None, skipped: Any = None, layers: Any = None
) -> Statistics:
    """Norm of the gradients, and which are not finite, with what else a `monitor` records of a step.

    A pure function: call it in the step, and return what it returns.

    Args:
        grads: a pytree of unscaled gradients, as `xla_amp.jax.value_and_grad` returns them.
        loss: () unscaled.
        loss_scale: the `LossScale` that the step used, or its value.
        skipped: () bool: whether the step took the old state, as ``~out.finite`` or ``~state.finite`` of
            `skip_nonfinite`.  None: nothing guards the update.
        layers: a pytree of results of layers, such as Flax's ``intermediates``, whose largest magnitudes are recorded.

    Example:
        >>> found = statistics({"w": jnp.array([3.0, 4.0])}, loss=1.0)
        >>> found.names, found.numbers.tolist()
        (('gradient_norm', 'loss', 'nonfinite/w'), [5.0, 1.0, 0.0])
    """
    gradients = {
        path: jnp.abs(each.astype(jnp.promote_types(each.dtype, np.float32))) for path, each in _floating(grads).items()
    }
    squares = {f"nonfinite/{path}": jnp.sum(each * each).astype(np.float32) for path, each in gradients.items()}
    scale = loss_scale.value if isinstance(loss_scale, LossScale) else loss_scale
    found = {"gradient_norm": jnp.sqrt(sum(squares.values())), "loss": loss, "loss_scale": scale, "skipped": skipped}
    found |= {path: ~jnp.isfinite(each) for path, each in squares.items()}
    found |= {f"largest/{path}": jnp.max(jnp.abs(each), initial=0) for path, each in _floating(layers).items()}
    known = {name: jnp.asarray(value, np.float32).reshape(()) for name, value in found.items() if value is not None}
    return Statistics(numbers=jnp.stack(list(known.values())), names=tuple(known))


def _floating(tree: Any) -> dict[str, jax.Array]:
    """Path with dots -> leaf, for the floating-point leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves if is_inexact(leaf)}
    return {path: jnp.asarray(leaf) for path, leaf in named.items()}


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A step whose numbers have not been read."""

    step: int
    statistics: Statistics

    def ready(self) -> bool:
        return bool(self.statistics.numbers.is_ready())  # type: ignore[attr-defined]  # JAX's stubs lack it

    def record(self) -> StepRecord:
        with jax.transfer_guard_device_to_host("allow"):  # the monitor's own copy, whatever the program forbids itself
            numbers = np.asarray(self.statistics.numbers).tolist()
        return StepRecord.of(self.step, dict(zip(self.statistics.names, numbers, strict=True)))


class Monitor(HostMonitor):
    """Records a run in JAX: `record` takes what `statistics` returned in each step.

    Args:
        sinks: functions that are called with each `StepRecord`, in order.

    Example:
        >>> recorder = monitor()
        >>> for loss in (1.0, 0.5):
        ...     recorder.record(statistics({"w": jnp.ones(4)}, loss=loss))
        >>> recorder.read().of("loss")
        [1.0, 0.5]
    """

    find = "xla_amp.jax.find_overflow(step, *arguments)"

    def __init__(self, *, sinks: Iterable[Callable[[StepRecord], object]] = ()) -> None:
        super().__init__(sinks)

    def record(self, statistics: Statistics) -> None:
        """Takes the numbers that a step has returned; they are read later, when they have arrived.

        Raises:
            TypeError: `statistics` is something else.
        """
        if not isinstance(statistics, Statistics) or isinstance(statistics.numbers, jax.core.Tracer):
            raise TypeError(
                "monitor.record(statistics): expected what xla_amp.jax.statistics(grads, ...) returned in "
                f"the step, after it and outside of jax.jit; got {type(statistics).__name__}"
            )
        with jax.transfer_guard_device_to_host("allow"):
            statistics.numbers.copy_to_host_async()
        self._waiting.append(_Waiting(self._next_step, statistics))
        self._next_step += 1
        self._collect(wait=False)


monitor = Monitor

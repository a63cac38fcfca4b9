"""`statistics` and `monitor` for JAX: a pure function whose arrays the step returns, and an object that reads them.

The arrays of the first bad step are in ``DIRECTORY/step-N``, which Orbax writes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_amp.errors import FileError, MissingLibraryError, StepError
from xla_amp.jax.loss_scale import LossScale, is_inexact
from xla_amp.tools.monitor.history import StepRecord
from xla_amp.tools.monitor.host_monitor import HostMonitor


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
            `skip_nonfinite`.  None: nothing guards the update, so no bad step can be kept.
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
    arguments: tuple[Any, ...]

    def ready(self) -> bool:
        return bool(self.statistics.numbers.is_ready())  # type: ignore[attr-defined]  # JAX's stubs lack it

    def record(self) -> StepRecord:
        with jax.transfer_guard_device_to_host("allow"):  # the monitor's own copy, whatever the program forbids itself
            numbers = np.asarray(self.statistics.numbers).tolist()
        return StepRecord.of(self.step, dict(zip(self.statistics.names, numbers, strict=True)))


class Monitor(HostMonitor):
    """Records a run in JAX: `record` takes what `statistics` returned in each step.

    Args:
        directory: gets the first bad step for ``find_overflow(step, *arguments, kept=...)``.  Until one is kept,
            `record` waits for its step.  Needs Orbax.
        sinks: functions that are called with each `StepRecord`, in order.

    Raises:
        MissingLibraryError: there is a directory, and Orbax is not installed.

    Example:
        >>> recorder = monitor()
        >>> for loss in (1.0, 0.5):
        ...     recorder.record(statistics({"w": jnp.ones(4)}, loss=loss))
        >>> recorder.read().of("loss")
        [1.0, 0.5]
    """

    find = "xla_amp.jax.find_overflow(step, *arguments{})"

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        sinks: Iterable[Callable[[StepRecord], object]] = (),
    ) -> None:
        super().__init__(directory, sinks)
        if directory is not None:
            _checkpointer().close()

    def record(self, statistics: Statistics, *arguments: Any) -> None:
        """Takes the numbers of a step; without a directory they are read later, when they have arrived.

        Args:
            statistics: what the step has returned.
            *arguments: of the step, which are kept if it was bad: its state as the step returned it, which is the state
                before it if it was skipped, and its batch.

        Raises:
            TypeError: `statistics` is something else.
        """
        if not isinstance(statistics, Statistics) or isinstance(statistics.numbers, jax.core.Tracer):
            raise TypeError(
                "monitor.record(statistics, *arguments): expected what xla_amp.jax.statistics(grads, ...) returned in "
                f"the step, after it and outside of jax.jit; got {type(statistics).__name__}"
            )
        if "skipped" not in statistics.names and self._guarded:
            self._says_unguarded("Call xla_amp.jax.statistics(..., skipped=~finite) where the step takes the old state")
        with jax.transfer_guard_device_to_host("allow"):
            statistics.numbers.copy_to_host_async()
        self._waiting.append(_Waiting(self._next_step, statistics, arguments if self._keeps else ()))
        self._next_step += 1
        self._collect(wait=self._keeps)

    def _save(self, folder: Path, waiting: _Waiting, record: StepRecord) -> None:
        if not waiting.arguments:
            raise ValueError("monitor.record(statistics, *arguments) was given no arguments")

        def before(value: Any) -> Any:
            if not isinstance(value, LossScale):
                return value
            return dataclasses.replace(value, value=jnp.full_like(value.value, record.loss_scale or 1.0))

        arguments = jax.tree.map(before, waiting.arguments, is_leaf=lambda value: isinstance(value, LossScale))
        arrays = [_data(leaf) for leaf in jax.tree.leaves(arguments) if _is_array(leaf)]
        with _checkpointer() as checkpointer:
            checkpointer.save(folder.absolute(), arrays, force=True)


monitor = Monitor


def load(path: str | os.PathLike[str], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """`arguments` with the values of a kept step.

    Args:
        path: ``DIRECTORY/step-N``.
        arguments: of the step, in shape and dtype as in the run; their values do not matter.

    Raises:
        FileError: there is no kept step.
        StepError: `arguments` are not like those of the step.
    """
    leaves, tree = jax.tree.flatten(tuple(arguments))
    given = [_data(leaf) for leaf in leaves if _is_array(leaf)]
    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in given]
    with _checkpointer() as checkpointer:
        try:
            found = checkpointer.metadata(Path(path).absolute())  # a tree, and in later versions an object that has it
            kept = _types(jax.tree.leaves(getattr(found, "item_metadata", found)))
        except Exception as error:  # Orbax raises anything for files of another kind
            raise FileError(f"{path}: no step of xla_amp.jax.monitor is kept here: {error!r}") from error
        if not kept:
            raise FileError(f"{path}: no step of xla_amp.jax.monitor is kept here")
        if kept != _types(given):
            raise StepError(
                f"find_overflow(step, *arguments, kept={os.fspath(path)!r}): pass the step's arguments, in any values; "
                f"expected {', '.join(kept)}, got {', '.join(_types(given)) or 'none'}"
            )
        values = iter(checkpointer.restore(Path(path).absolute(), like))
    restored = [_restored(leaf, next(values)) if _is_array(leaf) else leaf for leaf in leaves]
    return tuple(jax.tree.unflatten(tree, restored))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _types(arrays: Sequence[Any]) -> list[str]:
    return [f"{array.dtype}{list(array.shape)}" for array in arrays]


def _data(leaf: Any) -> jax.Array:
    """The numbers of a random key; another array itself."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.asarray(leaf)


def _restored(leaf: Any, value: Any) -> Any:
    if not getattr(leaf, "committed", False):
        value = jnp.asarray(np.asarray(value))  # Orbax commits it to a device, which JAX does not mix with a mesh
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if is_key else value


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint  # type: ignore[import-untyped]
    except ImportError:
        needs = "xla_amp.jax.monitor(directory=...) keeps the first bad step with Orbax"
        raise MissingLibraryError(f"{needs}: pip install 'xla-amp[checkpoint]'") from None
    return orbax.checkpoint.StandardCheckpointer()

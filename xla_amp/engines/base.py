"""The engine protocol, and the engine in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from xla_amp import engines
from xla_amp.common import arguments, config
from xla_amp.common.types import LAZY as LAZY
from xla_amp.errors import EngineError

DEVICE_TYPES = (LAZY, "xla")
"""The engines' device types, as torch names them."""


class Metrics(Protocol):
    """Exact event counts of an engine; calling it returns a dict of integers by name.

    Every engine counts executions, compilations, host_syncs, device_to_host, host_to_device, operations and fallbacks;
    an engine may count more.
    """

    def __call__(self) -> dict[str, int]:
        """All counters by name, since start or the last `reset`."""

    def reset(self) -> None:
        """Sets every counter to zero."""

    def report(self) -> str:
        """The counters as an aligned text table."""


@runtime_checkable
class Read(Protocol):
    """A value on its way to the host."""

    def ready(self) -> bool:
        """Whether `value` returns at once."""

    def value(self) -> torch.Tensor | None:
        """The value on the CPU; None if the step that was to compute it failed.  Waits unless it is `ready`."""


class Processes(Protocol):
    """The processes that train together, one device each, and their collectives."""

    def world_size(self) -> int:
        """Number of processes."""

    def ordinal(self) -> int:
        """Rank of this process, from 0."""

    def local_ordinal(self) -> int:
        """Rank of this process on its host, from 0."""

    def collective(
        self, name: str, tensors: Sequence[torch.Tensor], groups: Any, **options: Any
    ) -> Sequence[torch.Tensor]:
        """New tensors: the collective `name` of each over all processes, or those of each group.

        Names and options are as in `xla_amp.pytorch.distributed.xm_collectives`.
        """

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int]) -> list[bytes]:
        """Waits for all processes at `tag`; returns the payload of each."""


class Guard(Protocol):
    """What a block writes to tensors that are older than it."""

    def waited(self) -> bool:
        """Whether the block has read a value on the host so far; False if unknown."""

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the block made the memory of a tensor."""

    def undo(self, found_inf: torch.Tensor, replaced: Sequence[tuple[torch.Tensor, torch.Tensor, Any]] = ()) -> None:
        """In the block: undoes its writes where `found_inf` (a scalar) is not zero, without reading it.

        Args:
            found_inf: on the device.
            replaced: new tensors, each with another and the storage that this had: they get its old value there.
        """


@runtime_checkable
class Engine(Protocol):
    """An executor of torch operations on an XLA device: the module `xla_amp.lazy` or `xla_amp.engines.torch_xla`.

    The fronts use nothing of an engine but these members.
    """

    DEVICE_TYPE: str
    """torch's name of the device type."""

    @property
    def metrics(self) -> Metrics:
        """Its event counts."""

    @property
    def processes(self) -> Processes:
        """The processes that train together."""

    def device(self) -> torch.device:
        """The device; the first call starts the engine."""

    def is_started(self) -> bool:
        """Whether the device has been started."""

    def platform(self) -> str:
        """XLA's platform underneath: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""

    def step_begins(self) -> None:
        """Called when an autocast region opens: ends the previous step if an optimizer step was recorded in it."""

    def cast_layer(self, operation: str) -> Callable[..., Any] | None:
        """A function of (low dtype, operands) that casts them and computes `operation`; None if the engine has none.

        It returns NotImplemented, and has done nothing, for operands that have to be cast one by one.
        """

    def sync(self, wait: bool = False) -> None:
        """Ends the step; with `wait`, returns when the device has finished."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a CPU tensor to the device.  Records nothing: a loader's thread may call it at any time."""

    def read_later(self, tensor: torch.Tensor) -> Read:
        """Starts to read `tensor`, a whole storage on the device, without waiting for it."""

    def zeros(self, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor] | None:
        """Contiguous zeros of each shape and dtype, made outside the step; None if the step must make them."""

    def guard(self, tensors: Callable[[], Iterable[torch.Tensor]] = tuple) -> contextlib.AbstractContextManager[Guard]:
        """Context manager with a guard of what its block writes to tensors.

        `tensors`: those that it may write to, for an engine that cannot see the writes.
        """

    def spare(self, *tensors: torch.Tensor) -> None:
        """Lets the guards that are open not undo what is written to `tensors`, such as statistics of the step."""

    def manual_seed(self, seed: int) -> None:
        """Seeds the device's random generator."""

    def get_rng_state(self) -> torch.Tensor:
        """The generator's state (uint8, on the CPU)."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores what `get_rng_state` returned."""

    def memory_stats(self) -> dict[str, int]:
        """Bytes of the started device's memory by PJRT's names, such as ``bytes_in_use``; empty if unknown."""


_chosen: dict[object, Engine] = {}
"""Text of ``XLA_AMP_ENGINE`` -> its engine, once it has been asked for."""


def select() -> Engine:
    """The engine that ``XLA_AMP_ENGINE`` names; ``auto`` is torch_xla if it can be imported, otherwise the lazy device.

    Raises:
        EngineError: the engine cannot be used here.
    """
    text = config.engine_text()
    engine = _chosen.get(text)
    if engine is None:
        (engine,) = engines.choose(config.engine())
        _chosen[text] = engine
    return engine


def require_lazy(caller: str, instead: str = "") -> None:
    """Raises an error if the XLA engine in use is not the lazy device; starts nothing.

    Args:
        caller: the public function that was called.
        instead: torch_xla's equivalent, if it has one.

    Raises:
        EngineError: another engine is in use.
    """
    active = select().DEVICE_TYPE
    if active != LAZY:
        other = f"use {instead} there, or " if instead else ""
        raise EngineError(
            f"{caller} works only on the lazy device {LAZY!r}, and this process uses torch_xla's device {active!r}: "
            f"{other}set XLA_AMP_ENGINE=jax before the first use"
        )


def processes() -> Processes:
    """The processes of the engine in use."""
    return select().processes


def in_processes() -> bool:
    """Whether this process is one of several that train together; starts nothing."""
    if config.process() is not None:
        return True
    return select().DEVICE_TYPE == LAZY and processes().world_size() > 1


def zeros_like(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Optimizer state: zeros on `device` with the shapes, dtypes and strides of `tensors`, which may be anywhere.

    If the engine can, it makes them outside the step: the first step is then the same program as the next ones.
    """
    if device.type in DEVICE_TYPES and tensors and all(x.is_contiguous() for x in tensors):
        engine = select()
        made = engine.zeros([(x.shape, x.dtype) for x in tensors]) if device.type == engine.DEVICE_TYPE else None
        if made is not None:
            return made
    return [torch.zeros_like(x, device=device, memory_format=torch.preserve_format) for x in tensors]


def sync(wait: bool = False) -> None:
    """Ends the step: runs the recorded operations as one XLA program; with `wait`, waits for the device."""
    if not isinstance(wait, bool):
        arguments.require(f"sync(wait={wait!r})", wait, bool, "True or False")
    select().sync(wait)


class _ActiveMetrics:
    """The metrics of the engine in use."""

    def __call__(self) -> dict[str, int]:
        """All counters by name, since start or the last `reset`."""
        return select().metrics()

    def reset(self) -> None:
        """Sets every counter to zero."""
        select().metrics.reset()

    def report(self) -> str:
        """The counters as an aligned text table."""
        return select().metrics.report()


metrics: Metrics = _ActiveMetrics()

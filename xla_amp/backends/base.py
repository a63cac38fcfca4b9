"""What the fronts ask of an XLA engine, and the choice of one."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch

from xla_amp import config
from xla_amp.errors import EngineError


class Metrics(Protocol):
    """Exact counts of what an engine did: call it for a dict of integers by name.

    Every engine has executions, compilations, host_syncs, device_to_host, host_to_device, operations and fallbacks; one
    may have more.
    """

    def __call__(self) -> dict[str, int]:
        """All counters by name, since start or the last `reset`."""

    def reset(self) -> None:
        """Sets every counter to zero."""

    def report(self) -> str:
        """The counters as an aligned text table."""


class Processes(Protocol):
    """The processes that train together, one device each, and what they do with one another."""

    def world_size(self) -> int:
        """How many there are."""

    def ordinal(self) -> int:
        """Number of this one among all, from 0."""

    def local_ordinal(self) -> int:
        """Number of this one on its host, from 0."""

    def all_reduce(
        self, reduce_type: str, tensors: Sequence[torch.Tensor], groups: Any, pin_layout: bool
    ) -> Sequence[torch.Tensor]:
        """New tensors, each reduced (``"sum"``, ``"mul"``, ``"and"``, ``"or"``, ``"min"``, ``"max"``) over all."""

    def collective(
        self, name: str, tensors: Sequence[torch.Tensor], groups: Any, **options: Any
    ) -> Sequence[torch.Tensor]:
        """New tensors: a collective of each, by torch_xla's name (see `xla_amp.pytorch.distributed.xla_model`)."""

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int]) -> list[bytes]:
        """Waits for the others at `tag`; everyone's payload."""

    def mesh_reduce(self, tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
        """``reduce_fn`` of the data of all."""


@runtime_checkable
class Engine(Protocol):
    """An executor of torch operations on an XLA device: `xla_amp.lazy` and `xla_amp.backends.torch_xla`.

    An engine is a module; the fronts call nothing else of it (`processes`, `memory_stats`, `zeros` and `uncast` below
    are optional).
    """

    DEVICE_TYPE: str
    """torch's name of the device type."""

    metrics: Metrics

    def device(self) -> torch.device:
        """The device; the first call starts the engine."""

    def is_started(self) -> bool:
        """Whether the engine has been used."""

    def platform(self) -> str:
        """XLA's platform underneath: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""

    def step_begins(self) -> None:
        """An autocast region opens: ends the step before it, if an optimizer step was recorded and nobody ended it."""

    def sync(self, wait: bool = False) -> None:
        """Ends the step; with `wait`, returns when the device has finished."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor's copy on the device.  Records nothing: a loader's thread may call it at any time."""

    def snapshot(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Remembers present values for `restore_where`."""

    def restore_where(self, condition: torch.Tensor, tensors: Sequence[torch.Tensor], before: Any) -> None:
        """Puts tensors back to a snapshot's values where `condition` (a scalar) is not zero, without reading it; those
        that it does not have become zero there."""

    def manual_seed(self, seed: int) -> None:
        """Seeds the device's random generator."""

    def get_rng_state(self) -> torch.Tensor:
        """The generator's state (uint8, on the CPU)."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores what `get_rng_state` returned."""


class _OneProcess:
    """A process that trains alone."""

    def world_size(self) -> int:
        return 1

    def ordinal(self) -> int:
        return 0

    def local_ordinal(self) -> int:
        return 0

    def all_reduce(
        self, reduce_type: str, tensors: Sequence[torch.Tensor], groups: Any, pin_layout: bool
    ) -> Sequence[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]

    def collective(
        self, name: str, tensors: Sequence[torch.Tensor], groups: Any, **options: Any
    ) -> Sequence[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int]) -> list[bytes]:
        return [payload]

    def mesh_reduce(self, tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
        return reduce_fn([data])


_ALONE = _OneProcess()


def select() -> Engine:
    """The engine that ``XLA_AMP_ENGINE`` names; ``auto`` is torch_xla where it can be imported, else JAX.

    Raises:
        EngineError: the engine cannot be used here.
    """
    wanted = config.engine()
    if wanted == "jax":
        return _load("xla_amp.lazy")
    if wanted == "torch_xla":
        if problem := _problem_of_torch_xla():
            raise EngineError(
                f"XLA_AMP_ENGINE=torch_xla: {problem}; install the torch_xla that belongs to torch "
                f"{torch.__version__}, or set XLA_AMP_ENGINE to jax to use the lazy device on JAX"
            )
        return _load("xla_amp.backends.torch_xla")
    return _load(_automatic())


def processes() -> Processes:
    """The processes of the engine in use."""
    return getattr(select(), "processes", _ALONE)


def uncast(device_type: str) -> Any:
    """Which operands an engine casts by itself (`xla_amp.lazy.ops.cast_elision`), or None."""
    return getattr(sys.modules.get(f"xla_amp.backends.{device_type}"), "uncast", None)


def zeros_like(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """State for an optimizer: zeros on `device` of the shapes, dtypes and strides of `tensors`, which may be anywhere.

    Where the engine can, they are no part of the step: the first step is then the same program as the next ones.
    """
    make: Any = getattr(sys.modules.get(f"xla_amp.backends.{device.type}"), "zeros", None)
    if make is not None and tensors and all(x.is_contiguous() for x in tensors):
        made: list[torch.Tensor] | None = make([(x.shape, x.dtype) for x in tensors])
        if made is not None:
            return made
    return [torch.zeros_like(x, device=device, memory_format=torch.preserve_format) for x in tensors]


def fail() -> None:
    """Tells an engine that has started that this process ends with an error, so that it does not wait for others."""
    for name in ("xla_amp.lazy", "xla_amp.backends.torch_xla"):
        leave: Any = getattr(getattr(sys.modules.get(name), "processes", None), "fail", None)
        if leave is not None:
            leave()


def memory_stats() -> Mapping[str, int]:
    """Bytes of the device's memory, as PJRT counts them: ``bytes_in_use``, ``bytes_limit``; empty where it does not."""
    engine = select()
    engine.device()
    find = getattr(engine, "memory_stats", None) or getattr(torch, engine.DEVICE_TYPE).memory_stats
    return MappingProxyType(find())


def sync(wait: bool = False) -> None:
    """Ends the step: what was recorded runs as one XLA program; with `wait`, returns when the device has finished."""
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


@functools.cache
def _load(name: str) -> Any:
    return importlib.import_module(name)


@functools.cache
def _problem_of_torch_xla() -> str:
    """Why torch_xla cannot be used here, or ""."""
    if find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    try:
        importlib.import_module("torch_xla")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch, mostly
        return f"importing torch_xla failed ({type(error).__name__}: {error})"
    return ""


@functools.cache
def _automatic() -> str:
    problem = _problem_of_torch_xla()
    if not problem:
        return "xla_amp.backends.torch_xla"
    if find_spec("torch_xla") is not None:
        warnings.warn(
            f"{problem}, so XLA tensors are on the lazy JAX device; XLA_AMP_ENGINE=jax says that you want that",
            UserWarning,
            stacklevel=4,
        )
    return "xla_amp.lazy"

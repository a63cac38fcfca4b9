"""Test helpers for the lazy device: compare a program with the CPU, count events and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.utils._pytree import tree_leaves

import xla_amp

COMPILED = "/jax/core/compile/backend_compile_duration"
TRACED = "/jax/core/compile/jaxpr_trace_duration"


def on_host(value: Any) -> Any:
    """`value` with tensors of any device as CPU tensors without a graph."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def check(program: Callable[[str], Any], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that ``program("jax")`` returns what ``program("cpu")`` returns, exactly unless told otherwise."""
    expected, actual = (list(map(on_host, tree_leaves(program(where)))) for where in ("cpu", "jax"))
    assert len(actual) == len(expected)
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(
                got, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=index: f"result {i}: {text}"
            )
        else:
            assert got == want, f"result {index}: {got!r}, torch gives {want!r}"


@dataclasses.dataclass
class Counts:
    """Counters of the engine over a block, filled in at its end; reads as attributes (``counts.executions``)."""

    values: dict[str, int] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> int:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts what the engine, the lazy device or torch_xla, does inside the block."""
    before = xla_amp.metrics()
    counts = Counts()
    yield counts
    after = xla_amp.metrics()
    counts.values = {name: after[name] - before[name] for name in after}


@contextlib.contextmanager
def jax_events() -> Iterator[list[str]]:
    """Names of the timed events that JAX reports meanwhile."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def array_behind(tensor: torch.Tensor) -> jax.Array | None:
    """The JAX array of the storage behind a tensor (``None`` while its value is only in the trace)."""
    return tensor.untyped_storage()._xla_amp.array

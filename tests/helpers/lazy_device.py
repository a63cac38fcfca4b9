"""Test helpers for the lazy device: compare a program with the CPU, count events and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.utils._pytree import tree_leaves

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

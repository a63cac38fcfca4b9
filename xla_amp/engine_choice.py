"""The choice of an engine: a file above both, so that no engine is imported by what it imports."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec

import torch

from xla_amp.common import events
from xla_amp.engines.base import Engine
from xla_amp.errors import EngineError


def choose(wanted: str) -> Engine:
    """The engine of a value of ``XLA_AMP_ENGINE``.

    Args:
        wanted: ``jax``, ``torch_xla``, or ``auto``: torch_xla if it can be imported, otherwise the lazy device.

    Raises:
        EngineError: the engine cannot be used here.
    """
    if wanted == "torch_xla" and (problem := _problem_of_torch_xla()):
        raise EngineError(
            f"XLA_AMP_ENGINE=torch_xla: {problem}; install the torch_xla that belongs to torch "
            f"{torch.__version__}, or set XLA_AMP_ENGINE to jax to use the lazy device on JAX"
        )
    if wanted == "torch_xla" or (wanted != "jax" and _finds_torch_xla()):
        import xla_amp.engines.torch_xla

        return xla_amp.engines.torch_xla
    import xla_amp.lazy

    return xla_amp.lazy


@functools.cache
def _problem_of_torch_xla() -> str:
    """Why torch_xla cannot be used here, or an empty string."""
    if find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    try:
        importlib.import_module("torch_xla")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # usually it was built for another torch
        return f"importing torch_xla failed ({type(error).__name__}: {error})"
    return ""


@functools.cache
def _finds_torch_xla() -> bool:
    """Whether torch_xla can be used; warns once if it is installed and cannot."""
    problem = _problem_of_torch_xla()
    if problem and find_spec("torch_xla") is not None:
        events.warn(
            f"{problem}, so XLA tensors are on the lazy JAX device; to silence this warning set XLA_AMP_ENGINE=jax",
        )
    return not problem

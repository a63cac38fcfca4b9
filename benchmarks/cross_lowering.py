"""Record a step of the lazy device for another platform and lower it to StableHLO, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import jax
import numpy as np

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy import private_api
from xla_amp.lazy.runtime import execute, pjrt
from xla_amp.lazy.runtime.compile import Program

Platform = Literal["cpu", "gpu", "tpu"]


@contextmanager
def recorded(platform: Platform) -> Iterator[list[Program]]:
    """Record steps for `platform` inside the block without executing them; yields their programs.

    Results of programs have shapes only, so nothing may be read inside the block, and each block needs a new model.
    """
    programs: list[Program] = []
    originals = pjrt.platform, engine.platform, execute.execute

    def run(program: Program, arrays: list[Any], floats: np.ndarray, ints: np.ndarray) -> list[Any]:
        programs.append(program)
        with private_api.x64():
            return list(jax.eval_shape(program.call, *program.abstract))

    # The engine has its own reference, which selects the default policy.
    pjrt.platform = engine.platform = lambda: platform  # type: ignore[assignment]
    execute.execute = run  # type: ignore[assignment]
    try:
        yield programs
    finally:
        xla_amp.sync()
        pjrt.platform, engine.platform, execute.execute = originals  # type: ignore[assignment]


def module_of(step: Callable[[], Any], platform: Platform) -> str:
    """StableHLO text of one steady step, lowered for `platform` by JAX.

    Args:
        step: a training step on the lazy device whose state was made inside `recorded(platform)`.  It is called twice,
            because optimizers make their state in the first call.

    Raises:
        RuntimeError: the step is not exactly one program.
    """
    with recorded(platform) as programs:
        for _ in range(2):
            programs.clear()
            step()
            xla_amp.sync()
    if len(programs) != 1:
        raise RuntimeError(f"a step for {platform}: expected one program, it recorded {len(programs)}")
    name = {"gpu": "cuda"}.get(platform, platform)
    with private_api.x64():
        return str(programs[0].call.trace(*programs[0].abstract).lower(lowering_platforms=(name,)).as_text())

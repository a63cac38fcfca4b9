"""Programs that run a few times only, as a plan does: XLA's options for them, and the block that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

QUICK_FLOPS: Final = 1e10
"""Work of one run from which optimized code saves more time in the runs of a plan than it takes to compile."""

_QUICK: Final[dict[str, bool | int]] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_EMITTERS: Final = "xla_cpu_use_fusion_emitters"
_ONLY_EMITTERS: Final = (0, 11)
"""The version of jaxlib from which XLA's CPU backend has no other emitters."""


def quick_options(platform: str, flops: float) -> dict[str, bool | int]:
    """Options of XLA with which a program is compiled in a fraction of the time; none where they would not pay.

    On a CPU most of that time is LLVM's.  XLA's own passes, so the dtypes and the fusions of the program, are the same;
    float32 sums may be in another order, so compare only programs with the same options.

    Args:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        flops: of one run.
    """
    if platform != "cpu" or flops >= QUICK_FLOPS:
        return {}
    others = tuple(map(int, version("jaxlib").split(".")[:2])) < _ONLY_EMITTERS
    return {**_QUICK, **({_EMITTERS: False} if others else {})}


_few_runs: set[object] = set()
"""Open blocks of `for_few_runs`, of any thread."""


@contextlib.contextmanager
def for_few_runs() -> Iterator[None]:
    """Inside, a tool runs programs of the lazy device: they compile quickly and are no recompilations of the user's."""
    block = object()
    _few_runs.add(block)
    try:
        yield
    finally:
        _few_runs.discard(block)


def runs_few_times() -> bool:
    """Whether a block of `for_few_runs` is open."""
    return bool(_few_runs)

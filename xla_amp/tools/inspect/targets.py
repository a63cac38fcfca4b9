"""Compile a StableHLO module for absent hardware: optimized HLO and XLA's cost estimates.

    >>> with Compilers() as compilers:                                      # doctest: +SKIP
    ...     compilers.compile(module, "v6e").seconds
    8.9e-06

The compilers run in one worker process per platform (`xla_amp.tools.inspect.target_worker`), so the environment and
devices of this process do not change, and an abort of a compiler becomes an exception.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final

from xla_amp.errors import DeviceError
from xla_amp.hardware import names as names
from xla_amp.hardware import specification as specification
from xla_amp.stablehlo.workers import Worker, WorkerEndedError
from xla_amp.tools.inspect import hlo_text

_NEEDS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
    {
        "cpu": ((), ""),
        "tpu": (("libtpu",), "TPU's compiler, libtpu"),
        "gpu": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "JAX's CUDA plugin"),
    }
)
"""Platform -> modules of which one must be installed, and their description."""

_ENVIRONMENT: Final = MappingProxyType(
    {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may hold libtpu's lock file
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
    }
)

_ADVICE: Final = (
    ("No PTX compilation provider", "no ptxas was found: install xla-amp[targets] or a CUDA toolkit"),
    ("libdevice", "CUDA's libdevice was not found: install xla-amp[targets] or a CUDA toolkit"),
    ("ptxas too old", "the ptxas that was found does not know this GPU: install xla-amp[targets] or another toolkit"),
)
"""Text in a compiler's error -> advice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledModule:
    """The result of compiling a module for one target; sizes in bytes per device."""

    target: str
    hlo: str = dataclasses.field(repr=False)
    """The optimized HLO text."""
    seconds: float | None
    """XLA's estimate of one execution, never a measurement; None if XLA has none. Loop bodies count once."""
    seconds_why: str
    """Source of `seconds`, or why it is None."""
    bytes_accessed: int | None
    """By XLA's cost analysis."""
    flops: int | None
    """By XLA's cost analysis, which does not count library calls."""
    peak_memory: int
    """Peak of live bytes, arguments and results included."""
    argument_memory: int
    temporary_memory: int
    memory_seconds: float | None
    """`bytes_accessed` at the bandwidth of the data sheet: a lower bound, comparable between modules."""

    def contractions(self) -> collections.Counter[tuple[str, str, str]]:
        """Number of matrix products and convolutions in the optimized HLO by (left, right, result) dtype."""
        return hlo_text.contractions(self.hlo)

    def collectives(self) -> dict[hlo_text.CollectiveKind, hlo_text.Traffic]:
        """Collective operations in the optimized HLO by kind, with the bytes that they move for each device."""
        return hlo_text.collectives(self.hlo)


class Compilers:
    """Compiles for any target; keeps the compiler processes running until `close` or the end of the ``with`` block."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def compile(self, module: Any, target: str, options: Mapping[str, str] | None = None) -> CompiledModule:
        """The module as XLA compiles it for `target`.

        Args:
            module: MLIR text, bytecode, a ``jaxlib.mlir.ir.Module``, or the result of ``jax.jit(f).lower(...)``.
            target: a name of `names()`.
            options: XLA's options by name, as ``compiler_options`` of `jax.jit`; XLA's defaults for the rest.

        Raises:
            DeviceError: the target is unknown, its compiler is not installed, or it rejects the module or an option.
        """
        row = specification(target)
        _require(target, row["platform"])
        data = _serialized(module)
        worker = self._workers.get(row["platform"])
        if worker is None or worker.closed:
            worker = self._workers[row["platform"]] = Worker("xla_amp.tools.inspect.target_worker", _ENVIRONMENT)
        try:
            reply = worker.ask({"target": dict(row), "options": dict(options or {})}, data)
        except WorkerEndedError as error:
            del self._workers[row["platform"]]
            raise DeviceError(f"compiling for {target}: the compiler ended without an answer; {error}") from None
        if "error" in reply:
            advice = "".join(f"; {advice}" for words, advice in _ADVICE if words in reply["error"])
            raise DeviceError(f"compiling for {target}: {reply['error']}{advice}")
        moved, bandwidth = reply["bytes_accessed"], row.get("bandwidth")
        memory_seconds = moved / bandwidth if moved is not None and bandwidth else None
        return CompiledModule(target=target, memory_seconds=memory_seconds, **reply)

    def close(self) -> None:
        """Ends the compilers; a later `compile` starts them again."""
        while self._workers:
            self._workers.popitem()[1].close()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def compile_for(module: Any, target: str, options: Mapping[str, str] | None = None) -> CompiledModule:
    """`Compilers.compile`, once; for several modules or targets one `Compilers` is faster."""
    with Compilers() as compilers:
        return compilers.compile(module, target, options)


def lower(function: Callable[..., Any], *args: Any, target: str, **kwargs: Any) -> str:
    """StableHLO text of a JAX function, lowered for `target`; arguments may be ``jax.ShapeDtypeStruct``."""
    import jax

    platform = {"gpu": "cuda"}.get(row := specification(target)["platform"], row)
    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*args, **kwargs)
    return str(traced.lower(lowering_platforms=(platform,)).as_text())


def available(target: str) -> bool:
    """Whether the compiler for `target` is installed.

    Raises:
        DeviceError: unknown target.
    """
    modules, _ = _NEEDS[specification(target)["platform"]]
    return not modules or any(_installed(module) for module in modules)


def _installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(module) is not None


def _require(target: str, platform: str) -> None:
    if not available(target):
        what = _NEEDS[platform][1]
        raise DeviceError(f"compiling for {target}: {what} is not installed: pip install 'xla-amp[targets]'")


def _serialized(module: Any) -> bytes:
    if hasattr(module, "compiler_ir"):
        module = module.compiler_ir("stablehlo")
    if isinstance(module, str):
        return module.encode()
    if isinstance(module, bytes | bytearray | memoryview):
        return bytes(module)
    if hasattr(module, "operation"):
        from xla_amp.stablehlo import execution, ir  # numpy, which the command line loads only to run

        return ir.text(execution.runnable(module), locations=True).encode()
    raise DeviceError(
        f"a module to compile: expected MLIR text or bytecode, an ir.Module or jax.jit(f).lower(...), "
        f"got {type(module).__name__}"
    )

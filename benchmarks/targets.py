"""Compile StableHLO for TPUs and GPUs that are not here, for the benchmarks and for tests of what XLA makes of a step.

    with Compilers() as compilers:
        compilers.compile(module, "v6e").contractions()

The compilers run in a worker process, ``python -m targets``: they read environment variables when they are loaded, take
a lock, print, and can abort.  They are the extra `targets`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import hlo_text
import jax
import numpy as np

from xla_amp.errors import ModuleError

_TPUS: Final[Mapping[str, Mapping[int, str]]] = {
    "v5e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
    "v5p": {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"},
    "v6e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
}
"""Target -> number of devices -> its topology, as libtpu names it."""
_GPUS: Final[Mapping[str, tuple[tuple[int, int], int, int, float, int, int, float, int]]] = {
    "a100": ((8, 0), 108, 64, 1.41, 41_943_040, 167_936, 2039e9, 85_899_345_920),
    "h100": ((9, 0), 132, 128, 1.98, 52_428_800, 233_472, 3350e9, 85_899_345_920),
    "h200": ((9, 0), 132, 128, 1.98, 52_428_800, 233_472, 4800e9, 151_397_597_184),
    "b200": ((10, 0), 148, 128, 1.965, 132_644_864, 233_472, 8000e9, 193_273_528_320),
}
"""Target -> compute capability, multiprocessors, lanes of each, GHz, bytes of L2, of shared memory, a second, all."""
NAMES: Final = (*_TPUS, *_GPUS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A module compiled for one target; sizes in bytes per device."""

    hlo: str = dataclasses.field(repr=False)
    seconds: float | None
    """XLA:TPU's estimate, never a measurement: each operation without an estimate subtracts one second."""
    bytes_accessed: int
    argument_memory: int
    peak_memory: int

    def contractions(self) -> collections.Counter[tuple[str, str, str]]:
        """Number of products and convolutions by (left, right, result) dtype."""
        return hlo_text.contractions(self.hlo)


class Compilers:
    """Keeps the compilers running until the end of the ``with`` block."""

    def compile(self, module: str, target: str, options: Mapping[str, str] | None = None) -> Compiled:
        """MLIR text as XLA compiles it for one of `NAMES`, with XLA's options by name on top of its defaults."""
        self._wire.send((module.encode(), target, dict(options or {})))
        try:
            reply = self._wire.recv()
        except EOFError:
            raise ModuleError(f"compiling for {target} ended the compiler, status {self._process.wait()}") from None
        if isinstance(reply, str):
            raise ModuleError(f"compiling for {target} failed: {reply}")
        return Compiled(**reply)

    def __enter__(self) -> Compilers:
        self._wire, other = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "targets", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._wire.close()  # the end of its questions
        self._process.wait()


_ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # those of this process are not for the compilers
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}


def compile_for(module: str, target: str, options: Mapping[str, str] | None = None) -> Compiled:
    """`Compilers.compile`, once."""
    with Compilers() as compilers:
        return compilers.compile(module, target, options)


def lower(function: Callable[..., Any], *args: Any, target: str) -> str:
    """StableHLO text of a JAX function, lowered for `target`; arguments may be ``jax.ShapeDtypeStruct``."""
    platform = "tpu" if target in _TPUS else "cuda"
    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*args)
    return str(traced.lower(lowering_platforms=(platform,)).as_text())


def platform_of(target: str) -> str:
    """``"gpu"`` or ``"tpu"``."""
    return "tpu" if target in _TPUS else "gpu"


def available(target: str) -> bool:
    """Whether the compiler for `target` is installed."""
    if target in _TPUS:
        return importlib.util.find_spec("libtpu") is not None
    plugins = ("xla_cuda12", "xla_cuda13") if importlib.util.find_spec("jax_plugins") else ()
    return any(importlib.util.find_spec(f"jax_plugins.{name}") for name in plugins)


def _serve(wire: Connection) -> None:
    """The worker: fields of `Compiled`, or what went wrong, for each question until the last."""
    with contextlib.suppress(EOFError):
        while True:
            question = wire.recv()
            try:
                wire.send(_answer(*question))
            except Exception as error:  # jaxlib raises errors of several classes
                wire.send(f"{type(error).__name__}: {error}".splitlines()[0])


def _answer(module: bytes, target: str, given: Mapping[str, str]) -> dict[str, Any]:
    """In the worker; the fields of `Compiled`."""
    from jax.experimental import topologies
    from jax.extend import backend
    from jax.interpreters import mlir
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    if b"mosaic_gpu" in module:
        importlib.import_module("jax.experimental.mosaic.gpu")  # tells XLA where the library of such kernels is
    client = backend.get_backend("cpu")
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        count = parsed.operation.attributes["mhlo.num_partitions"].value if b"mhlo.num_partitions" in module else 1
        options = backend.get_compile_options(1, count, detailed_logging=False)
        options.env_option_overrides = list(given.items())
        if target in _TPUS:
            single = {"chips_per_host_bounds": [1, 1, 1]} if count == 1 else {}
            absent = topologies.get_topology_desc(f"{target}:{_TPUS[target][count]}", "tpu", **single).devices
            numbers = np.array([device.id for device in absent]).reshape(1, count)
            options.device_assignment = xla_client.DeviceAssignment.create(numbers)  # on several hosts it is needed
        else:
            shape = f"{max(1, count // 8)}x1x{min(8, count)}"  # hosts, joined by a slower network, of eight GPUs
            absent = topologies.get_topology_desc("", "cuda", topology=shape, target_config=_described(target)).devices
        compiled = client.compile(parsed, xla_client.get_topology_for_devices(list(absent)), options)
    (hlo,), memory = compiled.hlo_modules(), compiled.get_compiled_memory_stats()
    costs = _jax.hlo_module_cost_analysis(client, hlo) if target in _GPUS else compiled.cost_analysis()
    return {
        "hlo": hlo.to_string(),
        "seconds": costs.get("optimal_seconds") if target in _TPUS else None,
        "bytes_accessed": round(costs["bytes accessed"]),
        "argument_memory": memory.argument_size_in_bytes,
        "peak_memory": memory.peak_memory_in_bytes,
    }


def _described(target: str) -> str:
    """A row of `_GPUS` as a ``GpuTargetConfigProto`` in text."""
    (major, minor), units, lanes, clock, cache, shared, bandwidth, memory = _GPUS[target]
    feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024} threads_per_core_limit: 2048
        core_count: {units} fpus_per_core: {lanes} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
        block_dim_limit_z: 65535 memory_bandwidth: {round(bandwidth)} l2_cache_size: {cache} clock_rate_ghz: {clock}
        device_memory_size: {memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        cuda_compute_capability {{ major: {major} minor: {minor} {feature} }} }} platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}"""


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))

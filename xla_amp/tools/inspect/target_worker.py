"""Worker process that compiles StableHLO for absent hardware: ``python -m xla_amp.tools.inspect.target_worker``.

A separate process, because compilers read environment variables when they are loaded, take a lock, print to the
terminal, and can abort.  `xla_amp.tools.inspect.targets` starts it.  A question is ``{"target": row of targets.toml,
"options": XLA's options by name}`` with a module as its data; a reply has the fields of `targets.CompiledModule`.  The
private APIs of JAX that compiling needs are confined to this file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from xla_amp.stablehlo import workers
from xla_amp.tools.inspect import hlo_text

# PrimitiveType of xla_data.proto: the key of a unit's rate in XLA's description of a GPU.
_PRIMITIVE: Final = {"float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}

_MATRIX_UNITS: Final = 4  # per multiprocessor, on every architecture from Volta to Blackwell

_SQUARE: Final = "shape { element_type: BF16 dimensions: [4096, 4096] layout { minor_to_major: [1, 0] } }"
_LINE: Final = "shape { element_type: F32 dimensions: 1024 layout { minor_to_major: 0 } }"
_ROWS: Final = {
    "xla_gpu_experimental_matmul_perf_table_path": (
        f'instruction {{ name: "c" opcode: "dot" {_SQUARE} id: 3 operand_ids: [1, 2] '
        "dot_dimension_numbers { lhs_contracting_dimensions: 1 rhs_contracting_dimensions: 0 } } "
        f'operands {{ name: "a" opcode: "parameter" {_SQUARE} id: 1 }} '
        f'operands {{ name: "b" opcode: "parameter" {_SQUARE} id: 2 }} clock_cycles: 620000'
    ),
    "xla_gpu_experimental_collective_perf_table_path": (
        f'instruction {{ opcode: "all-reduce" {_LINE} channel_id: 1 use_global_device_ids: true '
        "iota_collective_device_list { num_replica_groups: 1 num_devices_per_group: 8 iota_reshape_dims: 8 "
        "iota_transpose_perm: 0 } } network_throughput_bytes_per_sec: 300000000000"
    ),
}
"""Compile option -> one row of the performance table that it names."""


def handle(question: Mapping[str, Any], module: bytes) -> dict[str, Any]:
    """The reply to one question."""
    return compile_module(module, question["target"], question["options"])


def compile_module(module: bytes, target: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Compiles MLIR text or bytecode for one row of ``hardware.toml``; the reply without its ``error``."""
    from jax.extend import backend
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    if b"mosaic_gpu" in module:
        importlib.import_module("jax.experimental.mosaic.gpu")  # tells XLA where the library of such kernels is

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        replicas, partitions = (_count(parsed, name) for name in ("mhlo.num_replicas", "mhlo.num_partitions"))
        options = backend.get_compile_options(replicas, partitions, detailed_logging=False)
        options.env_option_overrides = list(overrides.items())
        return _PLATFORMS[target["platform"]](backend.get_backend("cpu"), parsed, options, target)


def _count(module: Any, name: str) -> int:
    attributes = module.operation.attributes
    return int(attributes[name].value) if name in attributes else 1


def _cpu(client: Any, module: Any, options: Any, target: Mapping[str, Any]) -> dict[str, Any]:
    from jaxlib import xla_client

    if (devices := options.num_replicas * options.num_partitions) > 1:
        raise ValueError(f"the module is for {devices} devices; the target is one CPU")
    compiled = client.compile_and_load(module, xla_client.DeviceList((client.local_devices()[0],)), options)
    return _read(compiled, compiled.cost_analysis(), None, "XLA:CPU estimates no time")


def _tpu(client: Any, module: Any, options: Any, target: Mapping[str, Any]) -> dict[str, Any]:
    from jax.experimental import topologies
    from jaxlib import xla_client

    devices = options.num_replicas * options.num_partitions
    if str(devices) not in target["topologies"]:
        raise ValueError(f"the module is for {devices} devices; this target has {', '.join(target['topologies'])}")
    name = target["topologies"][str(devices)]
    single = {"chips_per_host_bounds": [1, 1, 1]} if devices == 1 else {}
    absent = list(topologies.get_topology_desc(name, "tpu", **single).devices)
    _assign(options, absent)
    compiled = client.compile(module, xla_client.get_topology_for_devices(absent), options)
    costs = compiled.cost_analysis()
    seconds = costs.get("optimal_seconds")
    if seconds is None or seconds < 0:
        # Each operation without an estimate subtracts one second from the sum, so the sum is meaningless.
        why = "XLA's cost analysis has no estimate for some operations on this target"
        return _read(compiled, costs, None, f"{why} (its sum is {seconds})")
    return _read(compiled, costs, seconds, "XLA's cost analysis")


def _assign(options: Any, devices: Iterable[Any]) -> None:
    """Gives each part of the program one of the devices, in their order.

    On several hosts XLA:TPU refuses a program without it, and crashes for a v5p.
    """
    from jaxlib import xla_client

    numbers = np.array([device.id for device in devices])
    options.device_assignment = xla_client.DeviceAssignment.create(
        numbers.reshape(options.num_replicas, options.num_partitions)
    )


def _gpu(client: Any, module: Any, options: Any, target: Mapping[str, Any]) -> dict[str, Any]:
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client

    devices = options.num_replicas * options.num_partitions
    hosts = max(1, devices // target["gpus_per_host"])
    if hosts > 1 and devices % target["gpus_per_host"]:
        raise ValueError(f"the module is for {devices} devices; this target has {target['gpus_per_host']} on a host")
    # Partitions joined by a fast network, hosts in each, GPUs in each.
    shape = f"{hosts}x1x{devices // hosts}"
    description = device_description(target)
    absent = topologies.get_topology_desc("", "cuda", topology=shape, target_config=description).devices
    with _tables(target, devices) as paths:
        ours = {"xla_gpu_collect_cost_model_stats": "True", **paths}
        options.env_option_overrides = [*ours.items(), *options.env_option_overrides]
        compiled = client.compile(module, xla_client.get_topology_for_devices(list(absent)), options)
    (optimized,) = compiled.hlo_modules()
    costs = _jax.hlo_module_cost_analysis(client, optimized)
    seconds = hlo_text.kernel_seconds(optimized.to_string(), target["bandwidth"], target["matrix"])
    why = "XLA's cost models, kernel by kernel" if seconds is not None else "XLA wrote no estimate into its result"
    return _read(compiled, costs, seconds, why)


@contextlib.contextmanager
def _tables(target: Mapping[str, Any], devices: int) -> Iterator[dict[str, str]]:
    """Performance tables for the speed-of-light model, for architectures that XLA has none for.

    Without tables the model estimates nothing.  Their values are never used: `kernel_seconds` takes matrix products
    from another model, and programs for several devices, which communicate, get no tables.
    """
    key = target.get("table")
    if key is None or devices > 1:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for option, instruction in _ROWS.items():
            path = paths[option] = os.path.join(folder, f"{option}.pbtxt")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f'entries {{ key: "{key}" value {{ entries {{ {instruction} }} }} }}')
        yield paths


_PLATFORMS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {"cpu": _cpu, "tpu": _tpu, "gpu": _gpu}


def _read(compiled: Any, costs: Mapping[str, float], seconds: float | None, why: str) -> dict[str, Any]:
    memory = compiled.get_compiled_memory_stats()
    return {
        "hlo": "\n\n".join(module.to_string() for module in compiled.hlo_modules()),
        "seconds": seconds,
        "seconds_why": why,
        "bytes_accessed": _whole(costs.get("bytes accessed")),
        "flops": _whole(costs.get("flops")),
        "peak_memory": memory.peak_memory_in_bytes,
        "argument_memory": memory.argument_size_in_bytes,
        "temporary_memory": memory.temp_size_in_bytes,
    }


def _whole(number: float | None) -> int | None:
    """XLA counts in floats; a negative count means unknown."""
    return None if number is None or number < 0 else round(number)


def device_description(target: Mapping[str, Any]) -> str:
    """A row of ``hardware.toml`` as the text of XLA's ``GpuTargetConfigProto``."""
    lanes = {key: (target["clock_ghz"], rate, 1) for key, rate in target["scalar"].items()}
    clocks = target["multiprocessors"] * _MATRIX_UNITS * target["clock_ghz"] * 1e9
    # XLA counts a multiply-add as one operation, data sheets as two.
    matrix = {
        key: (target["clock_ghz"], _MATRIX_UNITS, max(1, round(peak / clocks / 2)))
        for key, peak in target["matrix"].items()
    }
    major, minor = target["compute"]
    feature = "feature_extension: ACCELERATED_FEATURES" if target["accelerated"] else ""
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": target["shared_per_multiprocessor"],
        "threads_per_core_limit": 2048,
        "core_count": target["multiprocessors"],
        "fpus_per_core": target["lanes"],
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": round(target["bandwidth"]),
        "l2_cache_size": target["l2"],
        "clock_rate_ghz": target["clock_ghz"],
        "device_memory_size": target["memory"],
        "shared_memory_per_block_optin": target["shared_per_block"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
    }
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"{name}: {value}" for name, value in limits.items()),
            f"cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}",
            _units("scalar_unit_description", lanes),
            _units("matrix_unit_description", matrix),
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 patch: 0 }",
            "runtime_version { major: 12 minor: 8 patch: 0 }",
            f'device_description_str: "{target["title"]}"',
        ]
    )


def _units(field: str, rates: Mapping[str, tuple[float, int, int]]) -> str:
    rows = (
        f"rate_infos {{ key: {_PRIMITIVE[dtype]} value "
        f"{{ clock_rate_ghz: {clock} units_per_core: {units} ops_per_clock: {operations} }} }}"
        for dtype, (clock, units, operations) in rates.items()
    )
    return f"{field} {{ {' '.join(rows)} }}"


if __name__ == "__main__":
    workers.serve(handle)

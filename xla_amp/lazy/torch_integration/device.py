"""Starting the device: registration with torch, kernels for every lowering, the module ``torch.jax``."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from xla_amp.common import config, events
from xla_amp.lazy import processes
from xla_amp.lazy.base import forks, private_api
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.ops import cast_layers, composites, dynamic_shape, memory, missing, operators, rnn, sparse, wrappers
from xla_amp.lazy.ops.codegen.schema import Variant
from xla_amp.lazy.ops.codegen.text import make_kernel
from xla_amp.lazy.programs import execute, mesh, pjrt
from xla_amp.lazy.steps import step_marker
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import accelerator, c10d, device_guard, monkeypatches, nested
from xla_amp.lowering import Lowering, registry, table
from xla_amp.torch_common import dynamo


def _of_device(function: Callable[[Any], Any]) -> Any:
    """A function of ``torch.accelerator``, whose device may be named, as in torch.cuda."""
    return staticmethod(functools.wraps(function)(lambda device=None: function(device)))


class BackendModule:
    """``torch.jax``: the functions that torch calls on a device module."""

    _initialized = True
    """``torch.utils.checkpoint`` saves the device's random state only of an initialized module."""
    Scheduling = PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = nested.NoCodeGenerator

    def is_available(self) -> bool:
        """Whether the device can be used (it is registered only then)."""
        return True

    def is_initialized(self) -> bool:
        """Whether the device has been used and can be used: not in a forked child."""
        return not forks.is_forked()

    def is_built(self) -> bool:
        """Whether this build supports the device."""
        return True

    def current_device(self) -> int:
        """Index of the device that new tensors go to."""
        return 0

    def set_device(self, device: Any) -> None:
        """Selects device 0, the only one of a process; a negative index changes nothing, as in torch.cuda.

        Raises:
            DeviceError: the device does not exist, or is of another type.
        """
        accelerator.select(device)

    def device_count(self) -> int:
        """Lazy devices in this process."""
        return 1

    def device(self, device: Any) -> Any:
        """Context manager that selects a device; raises as `set_device` does."""
        accelerator.select(device)
        return contextlib.nullcontext()

    Stream, Event = accelerator.Stream, accelerator.Event

    current_stream = default_stream = _of_device(torch.accelerator.current_stream)

    def set_stream(self, stream: Any) -> None:
        """Does nothing: the device has one stream."""

    def stream(self, stream: Any) -> Any:
        """Context manager that selects a stream."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError with what there is; for names that are not found only."""
        known = ", ".join(found for found in dir(type(self)) if not found.startswith("_"))
        raise AttributeError(
            f"module 'torch.{DEVICE_TYPE}' has no attribute {name!r}; the lazy device has {known}, and what "
            "torch.accelerator has"
        )

    def _is_in_bad_fork(self) -> bool:
        return forks.is_forked()

    def init(self) -> None:
        """Does nothing: the device has been started."""

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether bfloat16 can be used: always; where no hardware multiplies it, XLA computes it in float32."""
        return including_emulation or pjrt.platform() != "cpu"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Low dtypes that autocast accepts."""
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        """Seeds the device."""
        generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Seeds the device with a random number."""
        generator.manual_seed(secrets.randbits(53))

    seed_all = seed

    def initial_seed(self) -> int:
        """The last seed."""
        return generator.state()[0]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """uint8[16] state of the device's generator."""
        return generator.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Restores a state."""
        generator.set_rng_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of each device's generator, of which a process has one."""
        return [generator.get_rng_state()]

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        """Restores a list of one state."""
        (state,) = new_states
        generator.set_rng_state(state)

    def get_device_name(self, device: Any = None) -> str:
        """PJRT's name of the device."""
        accelerator.select(device)
        return str(pjrt.jax_device().device_kind)

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        """``name``, ``platform`` and, where PJRT counts memory, ``total_memory`` in bytes; nothing else is known."""
        accelerator.select(device)
        found = types.SimpleNamespace(name=self.get_device_name(), platform=pjrt.platform())
        if "bytes_limit" in (stats := accelerator.memory_stats()):
            found.total_memory = stats["bytes_limit"]
        return found

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Bytes of device memory that are free, and in all; raises on a platform that does not count them."""
        accelerator.select(device)
        return accelerator.free_and_total()

    empty_cache = staticmethod(torch.accelerator.empty_cache)
    max_memory_allocated = _of_device(torch.accelerator.max_memory_allocated)
    max_memory_reserved = _of_device(torch.accelerator.max_memory_reserved)
    memory_allocated = _of_device(torch.accelerator.memory_allocated)
    memory_reserved = _of_device(torch.accelerator.memory_reserved)
    memory_stats = _of_device(torch.accelerator.memory_stats)
    reset_accumulated_memory_stats = _of_device(torch.accelerator.reset_accumulated_memory_stats)
    reset_peak_memory_stats = _of_device(torch.accelerator.reset_peak_memory_stats)
    synchronize = _of_device(torch.accelerator.synchronize)


_libraries: dict[tuple[str, str], torch.library.Library] = {}
_installed: set[str] = set()
_starting = threading.Lock()
_started = False


def is_started() -> bool:
    """Whether the device has been used in this process."""
    return _started


def device() -> torch.device:
    """The lazy device, ``torch.device("jax:0")``; registers it with torch on first use.

    Raises:
        DeviceError: another backend has taken torch's slot for out-of-tree devices, or JAX has no such device.
        EngineError: this torch cannot host a Python device.
        PolicyError: a bad value of ``XLA_AMP_DEBUG`` or ``XLA_AMP_PROGRAM_MEMORY``.
    """
    global _started
    for setting in (config.debug, config.program_memory):
        setting()  # a bad value is an error here, not in the middle of a step
    with _starting:
        if not _started:
            private_api.require_python_backend()
            private_api.require_free_slot(DEVICE_TYPE)
            processes.join()
            pjrt.jax_device()
            if processes.world_size() > 1:
                from xla_amp.lazy.processes import new_programs  # a single process never loads it

                new_programs.compare()
                mesh.use_processes()
            private_api.register_device(DEVICE_TYPE, BackendModule(), device_guard.make())
            generator.manual_seed(torch.initial_seed())
            monkeypatches.install()
            step_marker.install()
            trace.most = config.tape_limit()
            forks.watch()
            trace.eager = config.eager()
            _install_kernels()
            trace.clear()  # sets the first limit
            _started = True
            for name in config.legacy_dtype_flags():
                events.warn(
                    f"{name} has no effect on the lazy device, whose tensors keep their dtype: compute in 16 bits "
                    "under xla_amp.autocast(xla_amp.xla_device())"
                )
    return torch.device(DEVICE_TYPE, 0)


def _install_kernels() -> None:
    for name, kernel in (
        memory.KERNELS | dynamic_shape.KERNELS | wrappers.KERNELS | sparse.KERNELS | nested.KERNELS
    ).items():
        _implement("aten", name, kernel)
    for lowering in list(table().values()):
        _install(lowering)
    registry.registered.subscribe(_install)
    for name, kernel in (composites.KERNELS | rnn.KERNELS).items():
        if f"aten::{name}" not in _installed:
            _implement("aten", name, kernel)  # where autograd is off (inference mode)
        _implement("aten", name, kernel, "AutogradPrivateUse1")
    for name, wrap in composites.AUTOGRAD_WRAPPERS.items():
        autograd = torch.library.get_kernel(f"aten::{name}", "AutogradPrivateUse1")  # there since ours is
        _implement("aten", name, wrap(autograd.call_boxed), "AutogradPrivateUse1")
    _implement("torchvision", "nms", dynamic_shape.nms)
    for name, kernel in composites.AUTOCAST_KERNELS.items():
        _implement("torchvision", name, kernel, "AutocastPrivateUse1")
    for name, kernel in c10d.KERNELS.items():
        if hasattr(torch.ops.c10d, name):  # a torch built without distributed has none of them
            _implement("c10d", name, kernel)
    for name, kernel in sparse.SPARSE_KERNELS.items():
        _implement("aten", name, kernel, "SparsePrivateUse1")
    for key, kernel in (
        ("PrivateUse1", missing.run),
        ("SparsePrivateUse1", sparse.missing),
        ("NestedTensorPrivateUse1", nested.refuse),
        *([] if find_spec("torch_xla") else [("XLA", missing.refuse_xla)]),
    ):
        fallback = _libraries["_", key] = torch.library.Library("_", "IMPL", key)
        fallback.fallback(dynamo.skip(kernel))


def _implement(namespace: str, name: str, kernel: Any, dispatch_key: str = "PrivateUse1") -> None:
    library = _libraries.get((namespace, dispatch_key))
    if library is None:
        library = _libraries[namespace, dispatch_key] = torch.library.Library(namespace, "IMPL", dispatch_key)
    key = f"{namespace}::{name}"
    if dispatch_key != "PrivateUse1":
        library.impl(name, dynamo.skip(kernel), with_keyset=name in composites.WITH_KEYSET)
        return
    wrapper = wrappers.WRAPPERS.get(name if namespace == "aten" else key)
    if wrapper is not None:
        kernel = wrapper(kernel)
    if trace.eager:
        kernel = execute.run_at_once(kernel)
    if namespace == "aten":
        cast_layers.installed(name, kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # re-registering a lowering (override=True) replaces our kernel
        library.impl(name, dynamo.skip(kernel), **({"allow_override": True} if key in _installed else {}))
    _installed.add(key)


def _install(lowering: Lowering) -> None:
    """Installs the kernels of one lowering: the operation itself, its in-place and its ``out=`` variant.

    Of an operator of a library that is not imported yet, the kernel is made at its first call.
    """
    namespace, _, name = lowering.name.rpartition("::")
    namespace = namespace or "aten"
    base, _, overload = name.partition(".")
    operator = operators.find(lowering.name)
    if operator is None:
        if namespace != "aten":  # else an operation of another torch version
            _implement(namespace, name, _later(lowering))
        return
    _implement(namespace, name, make_kernel(lowering, operator, "functional"))
    if not lowering.mutates:
        for variant, derived in _derived(namespace, base, overload, operator):
            key = f"{namespace}::{derived}"
            if derived not in table() and derived not in memory.KERNELS and key not in _installed:
                _implement(namespace, derived, make_kernel(lowering, operators.find(key), variant))


def _later(lowering: Lowering) -> Any:
    kernel: Any = None

    def first(*args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            kernel = make_kernel(lowering, operators.find(lowering.name), "functional")
        return kernel(*args, **kwargs)

    return first


def _derived(namespace: str, base: str, overload: str, operator: Any) -> list[tuple[Variant, str]]:
    """(variant, name) of the in-place and ``out=`` overloads that take the same arguments as `operator`."""
    arguments = operators.functional_arguments(operator)
    found: list[tuple[Variant, str]] = []
    inplace = f"{base}_" + (f".{overload}" if overload else "")
    candidate = operators.find(f"{namespace}::{inplace}")
    if candidate is not None and operators.functional_arguments(candidate) == arguments:
        found.append(("inplace", inplace))
    packet = operator.overloadpacket
    for other in packet.overloads():
        candidate = getattr(packet, other)
        if operators.functional_arguments(candidate) == arguments and any(
            a.is_out for a in candidate._schema.arguments
        ):
            # The overload's name does not tell: add.Tensor's variant is add.out, sum.dim_IntList's is sum.IntList_out.
            found.append(("out", f"{base}.{other}"))
    return found

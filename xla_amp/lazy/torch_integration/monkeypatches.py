"""Every attribute of torch and safetensors that starting the lazy device replaces or adds, as a table with reasons.

`install` runs once, when the device starts.  No patch changes anything for tensors of other devices.
tests/lazy/torch_integration/test_monkeypatches.py compares torch before and after the start with `PATCHES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.autograd.graph
import torch.utils.dlpack
from torch.storage import UntypedStorage

from xla_amp.common import interrupts
from xla_amp.engines import torch_registration
from xla_amp.errors import DeviceError
from xla_amp.lazy.base import forks, private_api
from xla_amp.lazy.graph import generator
from xla_amp.lazy.processes import process_groups
from xla_amp.lazy.programs.execute import sync
from xla_amp.lazy.steps import optimizer_step, step_marker
from xla_amp.lazy.tensors import storages, tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE
from xla_amp.lazy.torch_integration import accelerator, autocast_names, device_guard, loading, torch_parallel
from xla_amp.torch_common import dynamo
from xla_amp.training import initial_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchGroup:
    """Attributes of torch that belong together: they are replaced or added for one reason."""

    names: tuple[str, ...]
    reason: str
    replace: Callable[..., Any] | None = None
    """What the attributes do, called with the old one and the arguments."""
    make: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """In its place, for what a step calls often: returns what the attributes do, from the old one."""
    install: Callable[[], None] | None = None
    """Where they are no functions, or differ."""


def install() -> None:
    """Installs every patch of the table, and where checkpoints are loaded to, unless `import torch` has done it."""
    torch_registration.register_location(_started)
    for patch in PATCHES:
        for name in patch.names:
            if patch.replace is not None:
                _replace(name, patch.replace)
            elif patch.make is not None:
                _put(name, patch.make)
        if patch.install is not None:
            patch.install()


def _replace(name: str, replace: Callable[..., Any]) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replace(original, *args, **kwargs)

        return replaced

    _put(name, make)


def _put(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    path, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, attribute)
    setattr(owner, attribute, dynamo.skip(functools.update_wrapper(make(original), original)))


def _started() -> None:
    """The device is starting when its patches are installed."""


def _add_buffer_attribute() -> None:
    UntypedStorage._xla_amp = None  # type: ignore[attr-defined]


def _new_storage(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != DEVICE_TYPE:
        return original(cls, *args, **kwargs)
    tensor_io.require_here(torch.device(device))
    if args and not isinstance(args[0], int):
        return storages.from_host(UntypedStorage(*args))
    return storages.new(args[0] if args else 0)


def _replace_storage_methods() -> None:
    def of_device(ours: Callable[..., Any]) -> Callable[..., Any]:
        def method(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._xla_amp is None:
                return original(self, *args, **kwargs)
            return ours(original, self, *args, **kwargs)

        return method

    for name, ours in storages.METHODS.items():
        _replace(f"torch.UntypedStorage.{name}", of_device(ours))
    _replace("torch.UntypedStorage.copy_", storages.copy_)
    _replace("torch.Tensor.data_ptr", storages.tensor_address)


def _register_reducers() -> None:
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing import reductions

    original: Callable[[torch.Tensor], Any] = reductions.reduce_tensor

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if tensor.device.type == DEVICE_TYPE:
            raise DeviceError(
                f"cannot send a tensor on {tensor.device} to another process (shape {list(tensor.shape)}): "
                "send tensor.cpu() and move it to the device in the receiving process"
            )
        return original(tensor)

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce_tensor)


def _export_to_dlpack(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if tensor_io.is_lazy(tensor):
        raise DeviceError(
            f"cannot export a tensor on {tensor.device} through DLPack (shape {list(tensor.shape)}): tensors "
            f"of the device {DEVICE_TYPE!r} hold no bytes that other libraries could read. Use tensor.cpu()"
        )
    return original(tensor, *args, **kwargs)


def _save_script(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    if any(tensor.device.type == DEVICE_TYPE for tensor in (*module.parameters(), *module.buffers())):
        raise DeviceError(
            f"cannot save a TorchScript module whose tensors are on {DEVICE_TYPE!r}: its file would hold no "
            "weights. Save module.cpu(), or module.state_dict() with torch.save"
        )
    return original(module, *args, **kwargs)


def _replace_safe_open() -> None:
    if find_spec("safetensors") is None:
        return
    import safetensors

    opening = functools.partial(loading.safe_open, safetensors.safe_open)
    for name in ("safetensors", "safetensors.torch"):
        if name in sys.modules:
            sys.modules[name].safe_open = opening  # type: ignore[attr-defined]


def _print(original: Callable[..., str], self: Any, *, tensor_contents: Any = None) -> str:
    plain = type(self) in tensor_io.PLAIN
    if tensor_contents is not None or not plain or self.device.type != DEVICE_TYPE:
        return original(self, tensor_contents=tensor_contents)
    text = original(self.detach().cpu() if self.is_sparse else tensor_io.to_host(self)).removesuffix(")")
    text += f", device='{self.device}'"
    if self.grad_fn is not None:
        text += f", grad_fn=<{type(self.grad_fn).__name__}>"
    elif self.requires_grad:
        text += ", requires_grad=True"
    return f"{text})"


def _pin_memory(original: Callable[..., torch.Tensor], self: torch.Tensor, device: Any = None) -> torch.Tensor:
    return self if device is None or str(device).startswith(DEVICE_TYPE) else original(self, device)


def _replace_data() -> None:
    data: Any = torch.Tensor.data
    compatible = torch._has_compatible_shallow_copy_type

    def crosses(tensor: Any, new: Any) -> bool:
        kinds = {tensor.device.type, new.device.type}
        return len(kinds) == 2 and kinds == {DEVICE_TYPE, "cpu"}

    def set_data(self: torch.Tensor, new: Any) -> None:
        if not isinstance(new, torch.Tensor) or not crosses(self, new):
            data.__set__(self, new)
            return
        with torch.DisableTorchFunctionSubclass():  # an uninitialized parameter refuses the question
            inference = self.is_inference()
        if new.device.type == DEVICE_TYPE and new.is_inference() != inference:
            with torch.inference_mode(inference):  # torch does not compare these keys for its own devices
                new = tensor_io.set_geometry(
                    private_api.create_tensor((0,), new.dtype),
                    *(new.untyped_storage(), new.storage_offset(), new.shape, new.stride()),
                )
        before = self.device
        private_api.change_dispatch_keys(self, new.device)
        try:
            data.__set__(self, new)
        except BaseException:
            private_api.change_dispatch_keys(self, before)
            raise

    def can_set_data(input: torch.Tensor, from_: torch.Tensor) -> bool:  # Dynamo compares the parameters' names
        return compatible(input, from_) or crosses(input, from_)

    torch.Tensor.data = property(data.__get__, set_data, data.__delete__)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = can_set_data


def _replace_generator() -> None:
    original: Any = torch.Generator

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, device: Any = "cpu") -> Any:
            if device is None or torch.device(device).type != DEVICE_TYPE:
                return original(device=device)
            tensor_io.require_here(torch.device(device))
            return generator.Generator()

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, original)

    class Generator(original, metaclass=Kind):  # type: ignore[misc]
        __doc__ = original.__doc__

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator  # type: ignore[misc]


_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "_accelerator_setDeviceIndex": accelerator.select,
    "_accelerator_exchangeDevice": accelerator.select,
    "_accelerator_maybeExchangeDevice": accelerator.select,
    "_accelerator_getStream": lambda index: accelerator.Stream(index),
    "_accelerator_synchronizeDevice": accelerator.synchronize,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": lambda device: accelerator.allocator_stats(),
    "_accelerator_getMemoryInfo": lambda device: accelerator.free_and_total(),
    "_accelerator_resetAccumulatedStats": lambda device: accelerator.refuse_reset(),
    "_accelerator_resetPeakStats": lambda device: accelerator.reset_peak(),
    "_accelerator_emptyCache": sync,  # XLA's allocator returns no memory; running the trace frees its buffers
    "_accelerator_emptyHostCache": lambda: None,
}
"""C function behind ``torch.accelerator`` -> its replacement; the started lazy device is torch's only accelerator."""


def _replace_accelerator() -> None:
    for name, function in _ACCELERATOR.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


def _has_any_global_hook(original: Callable[[], Any]) -> Any:
    modules = (str(getattr(hook, "__module__", None)) for hook in private_api.hooks_of_all_modules())
    return original() and not all(name.startswith("xla_amp.") for name in modules)


def _compile(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return original(*args, **(options | {"backend": "xla_amp"} if options.get("backend") == "openxla" else options))


def _step_of_scaler(
    original: Callable[..., Any], self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    found = list(state["found_inf_per_device"].values())
    if not all(flag.device.type == DEVICE_TYPE for flag in found):
        return original(self, optimizer, state, *args, **kwargs)
    from xla_amp.training import skip_step  # optimizers that are not fused load it

    return skip_step.scaled_step(optimizer, found, args, kwargs)


def _make_state_of_scaler(original: Callable[..., None], self: Any, dev: torch.device) -> None:
    original(self, torch.device("cpu") if dev.type == DEVICE_TYPE else dev)
    if dev.type == DEVICE_TYPE:
        self._scale, self._growth_tracker = self._scale.to(dev), self._growth_tracker.to(dev)


def _with_torchs_step() -> dict[type, str]:
    """torch.optim's classes, and subclasses to which torch gave a step when they made an optimizer -> its function."""
    classes: list[Any] = [torch.optim.Optimizer]
    for kind in classes:
        classes += kind.__subclasses__()
    steps = {kind: inspect.unwrap(kind.step) for kind in classes if "step" in vars(kind)}
    others = {"Optimizer.step", "LBFGS.step"}
    found = ((kind, step) for kind, step in steps.items() if initial_state.is_torchs(step))
    return {kind: step.__qualname__ for kind, step in found if step.__qualname__ not in others}


def _replace_steps() -> None:
    for kind in _with_torchs_step():
        hooked: Any = vars(kind)["step"]
        has_hooks = getattr(hooked, "hooked", False)
        step = hooked.__wrapped__ if has_hooks else hooked
        torchs = next(each for each in kind.__mro__ if initial_state.is_torchs(each))
        ours: Any = functools.wraps(step)(optimizer_step.replaced(step, torchs))
        if has_hooks:  # which see the options as the user has set them
            ours = torch.optim.Optimizer.profile_hook_step(ours)
            ours.hooked = True
        kind.step = ours  # type: ignore[attr-defined]


def _iterate_loader(original: Callable[..., Any], self: Any) -> Any:
    step_marker.loop_begins()
    with forks.expected() if self.num_workers else contextlib.nullcontext():
        return original(self)


PATCHES = (
    PatchGroup(
        names=("torch.UntypedStorage._xla_amp",),
        reason="The value of a lazy tensor is an attribute of its storage, which kernels read several times per "
        "operation. A class default makes that a plain attribute read for every storage.",
        install=_add_buffer_attribute,
    ),
    PatchGroup(
        names=("torch.UntypedStorage.__new__",),
        reason="UntypedStorage(n, device='jax'), as torch.load calls it, would use an allocator that a Python device "
        "does not have (a segmentation fault).",
        replace=_new_storage,
    ),
    PatchGroup(
        names=(
            *(f"torch.UntypedStorage.{name}" for name in (*storages.METHODS, "copy_")),
            "torch.Tensor.data_ptr",
        ),
        reason="C++ sees storages of no bytes at address 0. Libraries that write checkpoints find tied weights by the "
        "address and size of a storage, and copy its bytes.",
        install=_replace_storage_methods,
    ),
    PatchGroup(
        names=("ForkingPickler[torch.Tensor]", "ForkingPickler[torch.nn.Parameter]"),
        reason="multiprocessing sends a storage's bytes; the receiver would get a tensor without its values.",
        install=_register_reducers,
    ),
    PatchGroup(
        names=("torch.Tensor.__dlpack__", "torch.to_dlpack", "torch.utils.dlpack.to_dlpack"),
        reason="A DLPack capsule would point to no memory: torch.from_dlpack makes zeros of it.",
        replace=_export_to_dlpack,
    ),
    PatchGroup(
        names=("torch.distributed.distributed_c10d._get_default_timeout",),
        reason="init_process_group('xla_amp') and new_group would wait 30 minutes for a process that does not start; "
        "a backend cannot register its default. It is XLA_AMP_TIMEOUT here. Installed at `import torch`, unless "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 (`xla_amp.autoload`).",
        install=lambda: torch_registration.register_process_group(_started, process_groups.make),
    ),
    PatchGroup(
        names=("torch.jit.RecursiveScriptModule.save", "torch.jit.RecursiveScriptModule.save_to_buffer"),
        reason="TorchScript's writer reads storages in C++, where they hold no bytes: the file would lose the weights.",
        replace=_save_script,
    ),
    PatchGroup(
        names=("safetensors.safe_open", "safetensors.torch.safe_open"),
        reason="safetensors.torch.load_file(path, device='jax:0') is an error: its list of devices is fixed.",
        install=_replace_safe_open,
    ),
    PatchGroup(
        names=("torch.Tensor.__repr__",),
        reason="torch prints a tensor with about fourteen small reads, each of which would run a program.",
        replace=_print,
    ),
    PatchGroup(
        names=("torch.Tensor.pin_memory",),
        reason="DataLoader(pin_memory=True) uses the accelerator's pinned allocator, which a Python device lacks "
        "(an error).",
        replace=_pin_memory,
    ),
    PatchGroup(
        names=("torch.Tensor.data", "torch._has_compatible_shallow_copy_type"),
        reason="A CPU parameter cannot become a lazy one by `p.data = value`, because torch counts only its own "
        "devices as compatible; Module.to would make new Parameters, so that tied weights separate and an optimizer "
        "keeps the CPU ones. torch's set_swap_module_params_on_conversion cannot replace it: swapped parameters lose "
        "hooks and attributes, those of CPU modules, too, and weak references to them, or views, are an error.",
        install=_replace_data,
    ),
    PatchGroup(
        names=("torch.nn.modules.module._has_any_global_hook",),
        reason="A module that torch.compile made warns of global hooks in each call, also of those of this package.",
        replace=_has_any_global_hook,
    ),
    PatchGroup(
        names=("torch.autocast.__enter__",),
        reason="torch.autocast('xla'), as programs for torch_xla write it, would cast nothing; nor do regions of "
        "'cpu' and 'cuda', which are warned of.",
        make=autocast_names.entering,
        install=autocast_names.set_low_dtype,
    ),
    PatchGroup(names=("torch.autocast.__exit__",), reason="As above.", make=autocast_names.leaving),
    PatchGroup(
        names=("torch.autocast.__new__",),
        reason="torch.autocast('cuda') without a GPU forgets that the script asked for it.",
        replace=autocast_names.remember_asked,
        install=autocast_names.keep_signature,
    ),
    PatchGroup(
        names=("torch.amp.GradScaler._maybe_opt_step",),
        reason="torch's scaler reads whether a gradient overflowed before each step of an optimizer that is not fused: "
        "a wait for the device and a second executable. Selecting old or new values needs neither.",
        replace=_step_of_scaler,
    ),
    PatchGroup(
        names=("torch.amp.GradScaler._lazy_init_scale_growth_tracker",),
        reason="Created inside the step, scale and growth tracker would make the first step a different program.",
        replace=_make_state_of_scaler,
    ),
    PatchGroup(
        names=("torch.optim.Optimizer.load_state_dict",),
        reason="Step counts that torch.load(map_location='jax') has put on the device would stay there, and each later "
        "step would read them, one by one. Only this method knows that state was loaded.",
        replace=loading.load_state_dict,
    ),
    PatchGroup(
        names=tuple(f"torch.optim.{name}" for name in dict.fromkeys(_with_torchs_step().values())),
        reason="They count their steps on the host, compute with a learning rate in Python and make state in the first "
        "step: each step would be another program, or wait. torch has lists of devices for fused and capturable forms, "
        "but no default of a device. Hooks cannot put options back where a step raises. Subclasses that have made an "
        "optimizer before have their own, which is replaced, too.",
        install=_replace_steps,
    ),
    PatchGroup(
        names=("torch.utils.data.DataLoader.__iter__",),
        reason="Masks, averages of weights and sums that a script makes before its loop would be a part of the first "
        "step's program, and the other steps another program, as long to compile. JAX warns of every fork, also of "
        "a worker's.",
        replace=_iterate_loader,
    ),
    PatchGroup(
        names=() if find_spec("torch_xla") else ("torch.compile",),
        reason='Scripts for torch_xla write backend="openxla", which torch registers (an error without torch_xla).',
        replace=_compile,
    ),
    PatchGroup(
        names=("torch.nn.parallel.DistributedDataParallel.__init__",),
        reason="A script for CUDA passes device_ids=[local_rank], and a process of the device has no such index. "
        "Unused parameters are counted in pinned memory: an internal error in the backward pass.",
        replace=torch_parallel.data_parallel,
    ),
    PatchGroup(
        names=("torch.nn.DataParallel.__init__",),
        reason="Scripts for CUDA wrap their model in it, also where there is one device: it would move the model to "
        "the lazy device and split each batch by streams (an error). Without GPUs it runs the module as it is.",
        replace=torch_parallel.replicated,
    ),
    PatchGroup(
        names=("torch.distributed.DeviceMesh.__init__",) if torch.distributed.is_available() else (),
        reason="fully_shard, DTensor and tensor parallelism are built on a mesh. They resize storages and use streams, "
        "and fail in the forward pass; without a mesh they are refused at the call.",
        replace=torch_parallel.device_mesh,
    ),
    PatchGroup(
        names=("torch.Generator",),
        reason="The constructor asks a C++ hook for a device's generator, which a Python device cannot give (an "
        "error). Every generator is an instance of the replacement, as before.",
        install=_replace_generator,
    ),
    PatchGroup(
        names=("torch.autograd._engine_run_backward",),
        reason="The device guard takes the error of a raising hook away from C++ code that would abort the process; "
        "this raises it again (`device_guard`). torch ends a pass on CUDA in an internal assertion; this refuses it.",
        replace=device_guard.run_backward,
    ),
    PatchGroup(
        names=("_signal.signal", "signal.getsignal"),
        reason="A signal's handler that raises inside torch's device guard aborts the process, and inside an operation "
        "leaves half of it behind; `interrupts` runs it after them. Users see the handlers that they set.",
        install=interrupts.take_over,
    ),
    PatchGroup(
        names=tuple(f"torch._C.{name}" for name in _ACCELERATOR),
        reason="torch.accelerator calls a C++ allocator and guard, which a Python device lacks: these functions are "
        "internal errors, and empty_host_cache() a segmentation fault. Its streams would return from synchronize() at "
        "once.",
        install=_replace_accelerator,
    ),
)
"""In the order of their installation."""

REGISTRATIONS = {
    "torch.serialization._package_registry": "where torch.load puts tensors of the device (`torch_registration`)",
    "torch.jax": "the device module (`device.BackendModule`)",
    "torch.Tensor.jax": "torch adds these methods for every out-of-tree device",
    "torch.Tensor.is_jax": "as above",
    "torch.nn.Module.jax": "as above",
    "torch.nn.utils.rnn.PackedSequence.jax": "as above",
    "torch.nn.utils.rnn.PackedSequence.is_jax": "as above",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "the end of a step follows an optimizer step (`step_marker`)",
    "torch.optim.optimizer._global_optimizer_post_hooks": "as above",
}
"""What torch's registration functions add when the device starts (kernels apart) -> reason."""

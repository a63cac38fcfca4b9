"""Accelerate and transformers' Trainer on the XLA device, with ``mixed_precision="bf16"`` or ``"fp16"``.

    import xla_amp.integrations.huggingface

    xla_amp.integrations.huggingface.enable()
    accelerator = Accelerator(mixed_precision="bf16")  # or Trainer(model, TrainingArguments(..., bf16=True))

``XLA_AMP_HUGGINGFACE=1`` does the same for a script that does not name this package, as under ``accelerate launch``.

`enable` replaces the attributes of `PATCHES`, at once or when their module is imported, and starts no device.  A
training step is one XLA executable.  The host waits only where a value is logged or saved.

Sources: https://huggingface.co/docs/accelerate/package_reference/accelerator,
https://huggingface.co/docs/transformers/main_classes/trainer
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from xla_amp import policy as policies
from xla_amp.backends import base, devices
from xla_amp.common import events
from xla_amp.errors import PolicyError
from xla_amp.integrations import huggingface_padding
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.pytorch.distributed import gradients, xla_model
from xla_amp.pytorch.optim.grad_scaler import GradScaler

_LOW: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Mixed precision -> its low dtype."""

_RANDOM_STATE = "rng_state_xla{}.pth"
"""File of a checkpoint: the state of the device's random generator; of several processes with their rank."""

_policy: Policy | None = None
_read_skips = False
_pad_to_buckets = True
_hide_fp16: contextvars.ContextVar[bool] = contextvars.ContextVar("_hide_fp16", default=False)


def _ours(device: torch.device) -> bool:
    return devices.is_xla(device.type)


# ---- device and precision --------------------------------------------------------------------------------------------


def _default_device(original: property) -> property:
    return property(lambda self: xla_model.xla_device(), doc=original.__doc__)


def _join_processes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prepare_backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        if cpu or not base.in_processes():
            return original(self, cpu, *args, **kwargs)
        from accelerate.utils import DistributedType

        # Values on the host go through gloo.  Tensors of the device do not, in any group: they have kernels.
        self.device = xla_model.xla_device()
        return "gloo", DistributedType.MULTI_CPU

    return _prepare_backend


def _meet(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def wait_for_everyone(self: Any) -> None:
        if _ours(self.device):
            xla_model.rendezvous("accelerate")
        else:
            original(self)

    return wait_for_everyone


def _together(self: Any) -> bool:
    """Whether an Accelerator, or a state of it, trains with other processes on the device."""
    return self.num_processes > 1 and _ours(self.device)


def _without_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_model(self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if evaluation_mode or not _together(self):
            return original(self, model, device_placement, evaluation_mode)
        model = original(self, model, device_placement, evaluation_mode=True)
        gradients.broadcast_master_param(model)
        return model

    return prepare_model


def _average(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> None:
        original(self, loss, **kwargs)
        if _together(self) and self.sync_gradients:
            for prepared in self._optimizers:
                gradients.reduce_gradients(prepared.optimizer)

    return backward


def _end_program(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def step(self: Any, closure: Any = None) -> None:
        original(self, closure)
        if _together(self.accelerator_state) and self.gradient_state.sync_gradients:
            from xla_amp.lazy.steps import step_marker

            step_marker.end_step()
        if _read_skips and isinstance(self.scaler, GradScaler) and self.gradient_state.sync_gradients:
            self._is_overflow = bool(self.scaler.step_was_skipped())

    return step


def _trainers_device(original: Any) -> functools.cached_property[torch.device]:
    def _setup_devices(self: Any) -> torch.device:
        chosen: torch.device = original.func(self)
        _apply()
        state = self.distributed_state
        if self.use_cpu or state is None or not _ours(state.device):
            return chosen
        self._n_gpu = 0
        device: torch.device = state.device
        return device

    made = functools.cached_property(_setup_devices)
    made.__set_name__(object, "_setup_devices")
    return made


def _without_fp16(original: property) -> property:
    def mixed_precision(self: Any) -> Any:
        value = original.__get__(self)
        return "no" if value == "fp16" and _hide_fp16.get() and _ours(self.device) else value

    return property(mixed_precision, doc=original.__doc__)


def _construct(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        token = _hide_fp16.set(True)
        try:
            original(self, *args, **kwargs)
        finally:
            _hide_fp16.reset(token)
        if not _ours(self.device):
            return
        if self.mixed_precision not in (*_LOW, "no"):
            raise PolicyError(
                f"mixed_precision={self.mixed_precision!r} on the XLA device: expected 'bf16', 'fp16' or 'no'; for "
                "other rules pass policy= to xla_amp.integrations.huggingface.enable"
            )
        self.native_amp = self.mixed_precision in _LOW
        if self.mixed_precision == "fp16":
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = GradScaler(devices.XLA, **options)
        self.register_save_state_pre_hook(_save_state)
        self.register_load_state_pre_hook(_load_state)

    return __init__


def _region(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_mixed_precision_context_manager(native_amp: bool = False, autocast_kwargs: Any = None) -> Any:
        from accelerate.state import AcceleratorState

        state = AcceleratorState()
        if not (native_amp and _ours(state.device)):
            return original(native_amp, autocast_kwargs)
        options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
        return autocast(devices.XLA, dtype=_LOW[state.mixed_precision], policy=_policy, **options)

    return get_mixed_precision_context_manager


def _true(original: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: True


# ---- training --------------------------------------------------------------------------------------------------------


class _NotNow:
    """Stands for ``logging_nan_inf_filter=True`` where the Trainer reads it for one loss: it says no, once."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def __bool__(self) -> bool:
        self.args.logging_nan_inf_filter = True
        return False


def _filter_on_device(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not (self.args.logging_nan_inf_filter and _ours(self.args.device)):
            return original(self, *args, **kwargs)
        step = self.training_step

        def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = step(*args, **kwargs)
            mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            self.args.logging_nan_inf_filter = _NotNow(self.args)
            return torch.where(torch.isfinite(loss), loss, mean)

        self.training_step = training_step
        try:
            original(self, *args, **kwargs)
        finally:
            del self.training_step
            self.args.logging_nan_inf_filter = True

    return _run_epoch


def _end_step(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        if _ours(self.args.device):
            devices.engine().step_begins()
        original(self, *args, **kwargs)

    return _maybe_log_save_evaluate


def _begin_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prediction_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ours(self.args.device):
            devices.engine().sync(False)
        return original(self, *args, **kwargs)

    return prediction_step


def _log_scale(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and _ours(self.args.device):
            scaler = self.accelerator.scaler
            if isinstance(scaler, GradScaler):
                logs = {**logs, "loss_scale": scaler.get_scale()}
            devices.engine().sync(False)  # zeroes the summed loss now: the next step stays the same
        original(self, logs, *args, **kwargs)

    return log


def _keep_list(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add(self: Any, tensors: Any) -> None:
        waiting = self.__dict__.setdefault("_xla_amp_waiting", [])
        found = tree_leaves(tensors)
        if found and all(isinstance(x, torch.Tensor) and _ours(x.device) for x in found):
            waiting.append(tensors)
        else:
            original(self, tensors)

    return add


def _concatenate_on_host(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def to_cpu_and_numpy(self: Any) -> None:
        for tensors in self.__dict__.pop("_xla_amp_waiting", ()):
            self.add(tree_map(torch.Tensor.cpu, tensors))
        original(self)

    return to_cpu_and_numpy


# ---- generation ------------------------------------------------------------------------------------------------------


def _grow_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _ours(self.device):
            return original(self, *args, **kwargs)
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        asked = (kwargs, vars(given or self.generation_config))
        if all(not options.get(name) for options in asked for name in _CACHE_CHOICES) and all(
            options.get("use_cache") is not False for options in asked
        ):
            kwargs["cache_implementation"] = "static"
        args, kwargs = tree_map(_integers_to_host, (args, kwargs))
        with warnings.catch_warnings(), _inputs_on_device(self):
            warnings.filterwarnings("ignore", ".*on a device type different than your model's device", UserWarning)
            result = original(self, *args, **kwargs)
        return _moved(result, self.device)

    return generate


@contextlib.contextmanager
def _inputs_on_device(model: Any) -> Iterator[None]:
    """Inside, a model's encoder takes inputs on the host, as `prepare_inputs_for_generation` makes the decoder do."""
    if not model.config.is_encoder_decoder:
        yield
        return

    def move(module: Any, args: Any, kwargs: Any) -> Any:
        return _moved((args, kwargs), model.device)

    hook = model.get_encoder().register_forward_pre_hook(move, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, values)


_CACHE_CHOICES = ("cache_implementation", "past_key_values", "assistant_model", "prompt_lookup_num_tokens")
"""Arguments of ``generate`` that choose a cache, or need one that can be cut."""


def _integers_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and _ours(value.device) and not value.is_floating_point():
        return value.cpu()
    return value


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _pads() -> bool:
    """Whether batches go to the XLA device, as far as it is known, and are to have few lengths."""
    device = _accelerates_state().get("device")
    return _pad_to_buckets and (device is None or _ours(device))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _random_state_file(folder: str | os.PathLike[str]) -> Path:
    rank = f"_{xla_model.get_ordinal()}" if base.in_processes() else ""
    return Path(folder) / _RANDOM_STATE.format(rank)


def _save_random_state(folder: str | os.PathLike[str]) -> None:
    torch.save(xla_model.get_rng_state(), _random_state_file(folder))


def _load_random_state(folder: str | os.PathLike[str]) -> None:
    path = _random_state_file(folder)
    if path.is_file():  # not in a checkpoint of another device
        xla_model.set_rng_state(torch.load(path, weights_only=True))


def _save_state(models: Any, weights: Any, folder: str | os.PathLike[str]) -> None:
    _save_random_state(folder)  # a function of the module, because an Accelerator is pickled with its hooks


def _load_state(models: Any, folder: str | os.PathLike[str]) -> None:
    _load_random_state(folder)


def _also_save_random_state(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _save_rng_state(self: Any, output_dir: str) -> None:
        original(self, output_dir)
        if _ours(self.args.device):
            _save_random_state(output_dir)

    return _save_rng_state


def _also_load_random_state(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        original(self, checkpoint)
        if checkpoint is not None and _ours(self.args.device):
            _load_random_state(checkpoint)

    return _load_rng_state


# ---- patches ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of Accelerate or transformers that `enable` replaces."""

    module: str
    owner: str
    """Class in the module; empty for a function of the module."""
    name: str
    reason: str
    replace: Callable[[Any], Any]
    """Makes the new attribute from the old one."""


PATCHES = (
    Patch(
        module="accelerate.state",
        owner="PartialState",
        name="default_device",
        reason="Asks a fixed list of devices. ACCELERATE_TORCH_DEVICE would win over cpu=True.",
        replace=_default_device,
    ),
    Patch(
        module="accelerate.state",
        owner="PartialState",
        name="_prepare_backend",
        reason="Knows processes by a fixed list of devices.",
        replace=_join_processes,
    ),
    Patch(
        module="accelerate.state",
        owner="PartialState",
        name="wait_for_everyone",
        reason="Asks torch.distributed for a barrier on the device whose index is the process's.",
        replace=_meet,
    ),
    Patch(
        module="accelerate.accelerator",
        owner="Accelerator",
        name="prepare_model",
        reason="Wraps models in DistributedDataParallel, which looks for unused parameters in pinned memory.",
        replace=_without_wrapper,
    ),
    Patch(
        module="accelerate.accelerator",
        owner="Accelerator",
        name="backward",
        reason="Gradients are averaged in the step's executable, when they have been accumulated.",
        replace=_average,
    ),
    Patch(
        module="accelerate.optimizer",
        owner="AcceleratedOptimizer",
        name="step",
        reason="What one process reads after a step would make the next a program that the others do not have. Whether "
        "a step was skipped is known on the device only.",
        replace=_end_program,
    ),
    Patch(
        module="accelerate.state",
        owner="AcceleratorState",
        name="mixed_precision",
        reason="Accelerator.__init__ compares the device with a fixed list when it reads 'fp16' here.",
        replace=_without_fp16,
    ),
    Patch(
        module="accelerate.accelerator",
        owner="Accelerator",
        name="__init__",
        reason="Makes torch's GradScaler for CUDA; the device's random state is no part of a checkpoint.",
        replace=_construct,
    ),
    Patch(
        module="accelerate.accelerator",
        owner="",
        name="get_mixed_precision_context_manager",
        reason="Opens torch.autocast, which takes no policy.",
        replace=_region,
    ),
    Patch(
        module="transformers.training_args",
        owner="TrainingArguments",
        name="_setup_devices",
        reason="Asks a fixed list of devices, not Accelerate.",
        replace=_trainers_device,
    ),
    Patch(
        module="transformers.training_args",
        owner="",
        name="is_torch_bf16_gpu_available",
        reason="bf16=True is refused for devices that are not in a fixed list.",
        replace=_true,
    ),
    Patch(
        module="transformers.trainer",
        owner="Trainer",
        name="_run_epoch",
        reason="logging_nan_inf_filter reads each loss on the host; transformers#13896 spares torch_xla alone.",
        replace=_filter_on_device,
    ),
    Patch(
        module="transformers.trainer",
        owner="Trainer",
        name="_maybe_log_save_evaluate",
        reason="What is logged, and the next batch's count of labels, would make the step another program.",
        replace=_end_step,
    ),
    Patch(
        module="transformers.trainer",
        owner="Trainer",
        name="prediction_step",
        reason="Batches of an evaluation would become a program of several, for each sequence of their lengths.",
        replace=_begin_batch,
    ),
    Patch(
        module="transformers.trainer",
        owner="Trainer",
        name="log",
        reason="The loss scale is not logged; callbacks see the values after they were stored.",
        replace=_log_scale,
    ),
    Patch(
        module="transformers.trainer",
        owner="Trainer",
        name="_save_rng_state",
        reason="Saves the random states of a fixed list of devices.",
        replace=_also_save_random_state,
    ),
    Patch(
        module="transformers.trainer",
        owner="Trainer",
        name="_load_rng_state",
        reason="Loads the random states of a fixed list of devices.",
        replace=_also_load_random_state,
    ),
    Patch(
        module="transformers.generation.utils",
        owner="GenerationMixin",
        name="generate",
        reason="Token ids on the device, and the default cache, grow by a token: another shape, another program.",
        replace=_grow_on_host,
    ),
    Patch(
        module="transformers.trainer_pt_utils",
        owner="EvalLoopContainer",
        name="add",
        reason="Concatenates all batches so far in each step of an evaluation: another shape, another program.",
        replace=_keep_list,
    ),
    Patch(
        module="transformers.trainer_pt_utils",
        owner="EvalLoopContainer",
        name="to_cpu_and_numpy",
        reason="Concatenates what `add` kept, on the host.",
        replace=_concatenate_on_host,
    ),
    Patch(
        module="transformers.tokenization_utils_base",
        owner="PreTrainedTokenizerBase",
        name="pad",
        reason="Pads examples to the longest of a batch: each length is another program.",
        replace=functools.partial(huggingface_padding.pad_examples, _pads),
    ),
    Patch(
        module="transformers.tokenization_utils_tokenizers",
        owner="TokenizersBackend",
        name="_encode_plus",
        reason="Pads texts to the longest of a batch: each length is another program.",
        replace=functools.partial(huggingface_padding.encode_texts, _pads),
    ),
    Patch(
        module="transformers.data.data_collator",
        owner="DataCollatorForSeq2Seq",
        name="__call__",
        reason="Pads labels to the longest of a batch: each length is another program.",
        replace=functools.partial(huggingface_padding.pad_labels, _pads),
    ),
)
"""Each does what the framework does unless the device is the XLA device."""

_installed: dict[Patch, Any] = {}
"""Patch -> the attribute that it replaced."""


def _apply() -> None:
    """Installs the patches whose attributes exist by now."""
    for patch in PATCHES:
        owner: Any = sys.modules.get(patch.module)
        if owner is not None and patch.owner:
            owner = owner.__dict__.get(patch.owner)
        if owner is None or patch in _installed or patch.name not in owner.__dict__:
            continue
        _installed[patch] = inspect.getattr_static(owner, patch.name)
        setattr(owner, patch.name, patch.replace(_installed[patch]))


def _require(module: ModuleType) -> None:
    """Raises if a patch of an imported module found no attribute to replace: that version is not known here."""
    for patch in PATCHES:
        if patch.module == module.__name__ and patch not in _installed:
            package = module.__name__.partition(".")[0]
            replaced = ".".join(filter(None, (patch.module, patch.owner, patch.name)))
            raise ImportError(
                f"{package} {importlib.metadata.version(package)} has no {replaced}, which "
                "xla_amp.integrations.huggingface replaces: install a version that docs/frameworks.md names"
            )


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `_apply` around the imports of the two packages.

    Before each, because a module that imported torch, which enabled this, may still have been at its beginning then.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _PACKAGES:
            return None
        _apply()
        if name not in {patch.module for patch in PATCHES}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _apply()
                _require(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_PACKAGES = ("accelerate", "transformers")


def enable(policy: Policy | str | Path | None = None, *, read_skips: bool = False, pad_to_buckets: bool = True) -> None:
    """Makes Accelerate and transformers' Trainer use the XLA device; call it before their first object is made.

    ``Accelerator(cpu=True)`` and ``TrainingArguments(use_cpu=True)`` still use the CPU.  Warns if Accelerate has chosen
    another device already.

    Args:
        policy: the rules for ``"bf16"`` and ``"fp16"``, as for `xla_amp.autocast`; None is the device's default.  A
            second call sets it for regions that are made from then on.
        read_skips: with ``"fp16"``, wait after each step to learn whether it was skipped.  Then
            ``accelerator.optimizer_step_was_skipped`` and ``optimizer.step_was_skipped`` are right, and a prepared
            schedule stays where it is in a skipped step.  Otherwise they are always False.
        pad_to_buckets: pad batches of tokens to 16, 32, 48, 64, 96, ... where transformers would pad them to their
            longest row, so that there are few programs.

    Raises:
        ImportError: Accelerate is not installed.
        PolicyError: `policy` cannot be loaded.
        DeviceError: the engine in use is torch_xla, which Accelerate finds by itself.
    """
    global _policy, _read_skips, _pad_to_buckets
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            "xla_amp.integrations.huggingface needs the package `accelerate`: pip install 'xla-amp[huggingface]'"
        )
    base.require_lazy("xla_amp.integrations.huggingface.enable()", "Accelerate's own support of torch_xla")
    _policy = None if policy is None else policies.load(policy)
    _read_skips = read_skips
    _pad_to_buckets = pad_to_buckets
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _apply()
    _warn_of_chosen_device()


def _accelerates_state() -> dict[str, Any]:
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return {} if state is None else state._shared_state


def _warn_of_chosen_device() -> None:
    chosen = _accelerates_state()
    device = chosen.get("device")
    if device is not None and not chosen["_cpu"] and not _ours(device):
        events.warn(
            f"Accelerate chose the device {str(device)!r} before xla_amp.integrations.huggingface.enable() "
            "was called, and keeps it: call enable() before the first Accelerator, or reset Accelerate's state with "
            "accelerate.state.AcceleratorState._reset_state(True)",
        )

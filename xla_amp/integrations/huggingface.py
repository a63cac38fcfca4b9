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


# ---- device, processes, precision ------------------------------------------------------------------------------------
# Each function below replaces an attribute: `original` is what it replaces, the rest are its arguments.


def _default_device(original: Any, self: Any) -> torch.device:
    return xla_model.xla_device()


def _join_processes(original: Any, self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
    if cpu or not base.in_processes():
        return original(self, cpu, *args, **kwargs)
    from accelerate.utils import DistributedType

    # Values on the host go through gloo.  Tensors of the device do not, in any group: they have kernels.
    self.device = xla_model.xla_device()
    return "gloo", DistributedType.MULTI_CPU


def _meet(original: Any, self: Any) -> None:
    if _ours(self.device):
        xla_model.rendezvous("accelerate")
    else:
        original(self)


def _together(self: Any) -> bool:
    """Whether an Accelerator, or a state of it, trains with other processes on the device."""
    return self.num_processes > 1 and _ours(self.device)


def _without_wrapper(
    original: Any, self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
) -> Any:
    if evaluation_mode or not _together(self):
        return original(self, model, device_placement, evaluation_mode)
    model = original(self, model, device_placement, evaluation_mode=True)
    gradients.broadcast_master_param(model)
    return model


def _average(original: Any, self: Any, loss: Any, **kwargs: Any) -> None:
    original(self, loss, **kwargs)
    if _together(self) and self.sync_gradients:
        for prepared in self._optimizers:
            gradients.reduce_gradients(prepared.optimizer)


def _end_program(original: Any, self: Any, closure: Any = None) -> None:
    original(self, closure)
    if _together(self.accelerator_state) and self.gradient_state.sync_gradients:
        from xla_amp.lazy.steps import step_marker

        step_marker.end_step()
    if _read_skips and isinstance(self.scaler, GradScaler) and self.gradient_state.sync_gradients:
        self._is_overflow = bool(self.scaler.step_was_skipped())


def _trainers_device(original: Any, self: Any) -> torch.device:
    chosen: torch.device = original(self)
    _apply()
    state = self.distributed_state
    if self.use_cpu or state is None or not _ours(state.device):
        return chosen
    self._n_gpu = 0
    device: torch.device = state.device
    return device


def _without_fp16(original: Any, self: Any) -> Any:
    value = original(self)
    return "no" if value == "fp16" and _hide_fp16.get() and _ours(self.device) else value


def _construct(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
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


def _region(original: Any, native_amp: bool = False, autocast_kwargs: Any = None) -> Any:
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    if not (native_amp and _ours(state.device)):
        return original(native_amp, autocast_kwargs)
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return autocast(devices.XLA, dtype=_LOW[state.mixed_precision], policy=_policy, **options)


# ---- training and evaluation -----------------------------------------------------------------------------------------


class _NotNow:
    """Stands for ``logging_nan_inf_filter=True`` where the Trainer reads it for one loss: it says no, once."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def __bool__(self) -> bool:
        self.args.logging_nan_inf_filter = True
        return False


def _filter_on_device(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if not (self.args.logging_nan_inf_filter and _ours(self.args.device)):
        original(self, *args, **kwargs)
        return
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


def _end_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if _ours(self.args.device):
        devices.engine().step_begins()
    original(self, *args, **kwargs)


def _also_ours(original: list[Any]) -> list[Any]:
    from transformers import TrainerCallback

    class DeviceCallback(TrainerCallback):
        """Ends the programs of an evaluation, and logs the loss scale."""

        def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if _ours(args.device):
                devices.engine().sync(False)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            if "loss" not in logs or not _ours(args.device):
                return
            scaler = getattr(given.get("optimizer"), "scaler", None)
            if isinstance(scaler, GradScaler):
                logs["loss_scale"] = state.log_history[-1]["loss_scale"] = scaler.get_scale()
            devices.engine().sync(False)  # zeroes the summed loss now: the next step stays the same

    return [*original, DeviceCallback]


def _keep_list(original: Any, self: Any, tensors: Any) -> None:
    found = tree_leaves(tensors)
    if found and all(isinstance(x, torch.Tensor) and _ours(x.device) for x in found):
        self.__dict__.setdefault("_xla_amp_waiting", []).append(tensors)
    else:
        original(self, tensors)


def _concatenate_on_host(original: Any, self: Any) -> None:
    for tensors in self.__dict__.pop("_xla_amp_waiting", ()):
        self.add(tree_map(torch.Tensor.cpu, tensors))
    original(self)


# ---- generation ------------------------------------------------------------------------------------------------------

_CACHE_CHOICES = ("cache_implementation", "past_key_values", "assistant_model", "prompt_lookup_num_tokens")
"""Arguments of ``generate`` that choose a cache, or need one that can be cut."""


def _grow_on_host(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _ours(self.device):
        return original(self, *args, **kwargs)
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    asked = (kwargs, vars(given or self.generation_config))
    chosen = any(options.get(name) for options in asked for name in _CACHE_CHOICES)
    if not chosen and all(options.get("use_cache") is not False for options in asked):
        kwargs["cache_implementation"] = "static"
    args, kwargs = tree_map(_integers_to_host, (args, kwargs))
    with warnings.catch_warnings(), _inputs_on_device(self):
        warnings.filterwarnings("ignore", ".*on a device type different than your model's device", UserWarning)
        result = original(self, *args, **kwargs)
    return _moved(result, self.device)


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


def _integers_to_host(value: Any) -> Any:
    ours = isinstance(value, torch.Tensor) and _ours(value.device) and not value.is_floating_point()
    return value.cpu() if ours else value


# ---- lengths and checkpoints -----------------------------------------------------------------------------------------


def _pads() -> bool:
    """Whether batches go to the XLA device, as far as it is known, and are to have few lengths."""
    device = _accelerates_state().get("device")
    return _pad_to_buckets and (device is None or _ours(device))


def _random_state_file(folder: str | os.PathLike[str]) -> Path:
    rank = f"_{xla_model.get_ordinal()}" if base.in_processes() else ""
    return Path(folder) / _RANDOM_STATE.format(rank)


def _save_state(models: Any, weights: Any, folder: str | os.PathLike[str]) -> None:
    # Functions of the module, because an Accelerator is pickled with its hooks.
    torch.save(xla_model.get_rng_state(), _random_state_file(folder))


def _load_state(models: Any, folder: str | os.PathLike[str]) -> None:
    path = _random_state_file(folder)
    if path.is_file():  # not in a checkpoint of another device
        xla_model.set_rng_state(torch.load(path, weights_only=True))


def _also_save_random_state(original: Any, self: Any, output_dir: str) -> None:
    original(self, output_dir)
    if _ours(self.args.device):
        _save_state(None, None, output_dir)


def _also_load_random_state(original: Any, self: Any, checkpoint: str | None) -> None:
    original(self, checkpoint)
    if checkpoint is not None and _ours(self.args.device):
        _load_state(None, checkpoint)


# ---- patches ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Patch:
    """One attribute of Accelerate or transformers that `enable` replaces.

    It does what the framework does unless the device is the XLA device.
    """

    module: str
    owner: str
    """Class in the module; empty for an attribute of the module."""
    name: str
    replace: Callable[..., Any]
    """The new attribute, called with the old one and the arguments; of a list, the new list."""
    reason: str
    """What the framework does, and what breaks without the patch."""

    def replacement(self, original: Any) -> Any:
        """The new attribute, of the kind of the old one."""
        if isinstance(original, list):
            return self.replace(original)
        if isinstance(original, property):
            return property(functools.partial(self.replace, original.fget), doc=original.__doc__)
        if isinstance(original, functools.cached_property):
            made = functools.cached_property(functools.partial(self.replace, original.func))
            made.__set_name__(object, self.name)
            return made

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.replace(original, *args, **kwargs)

        return replaced


_TRAINER = ("transformers.trainer", "Trainer")
_LENGTHS = "to the longest of a batch: each length is another program."

PATCHES = (
    Patch("accelerate.state", "PartialState", "default_device", _default_device,
          "Asks a fixed list of devices: training is on the CPU. ACCELERATE_TORCH_DEVICE would win over cpu=True."),
    Patch("accelerate.state", "PartialState", "_prepare_backend", _join_processes,
          "Knows processes by a fixed list of devices: each would train alone."),
    Patch("accelerate.state", "PartialState", "wait_for_everyone", _meet,
          "Asks torch.distributed for a barrier on the device whose index is the process's."),
    Patch("accelerate.state", "AcceleratorState", "mixed_precision", _without_fp16,
          "Accelerator.__init__ compares the device with a fixed list when it reads 'fp16' here, and raises."),
    Patch("accelerate.accelerator", "Accelerator", "__init__", _construct,
          "Makes torch's GradScaler for CUDA; the device's random state is no part of a checkpoint."),
    Patch("accelerate.accelerator", "Accelerator", "prepare_model", _without_wrapper,
          "Wraps models in DistributedDataParallel, which looks for unused parameters in pinned memory."),
    Patch("accelerate.accelerator", "Accelerator", "backward", _average,
          "Gradients are averaged in the step's executable, when they have been accumulated."),
    Patch("accelerate.optimizer", "AcceleratedOptimizer", "step", _end_program,
          "What one process reads after a step would make the next a program that the others do not have. Whether a "
          "step was skipped is known on the device only."),
    Patch("accelerate.accelerator", "", "get_mixed_precision_context_manager", _region,
          "Opens torch.autocast, which takes no policy."),
    Patch("transformers.training_args", "TrainingArguments", "_setup_devices", _trainers_device,
          "Asks a fixed list of devices, not Accelerate: training is on the CPU."),
    Patch("transformers.training_args", "", "is_torch_bf16_gpu_available", lambda original: True,
          "bf16=True is refused for devices that are not in a fixed list."),
    Patch(*_TRAINER, "_run_epoch", _filter_on_device,
          "logging_nan_inf_filter reads each loss: a wait a step; transformers#13896 spares torch_xla alone."),
    Patch(*_TRAINER, "_maybe_log_save_evaluate", _end_step,
          "What is logged, and the next batch's count of labels, would make the step another program."),
    Patch("transformers.trainer", "", "DEFAULT_CALLBACKS", _also_ours,
          "Several batches of an evaluation would become one program, for each sequence of lengths; no loss scale is "
          "logged."),
    Patch(*_TRAINER, "_save_rng_state", _also_save_random_state,
          "Saves the random states of a fixed list of devices: dropout differs after resuming."),
    Patch(*_TRAINER, "_load_rng_state", _also_load_random_state,
          "Loads the random states of a fixed list of devices."),
    Patch("transformers.generation.utils", "GenerationMixin", "generate", _grow_on_host,
          "Token ids on the device, and the default cache, grow by a token: another shape, another program."),
    Patch("transformers.trainer_pt_utils", "EvalLoopContainer", "add", _keep_list,
          "Concatenates all batches so far in each step of an evaluation: another shape, another program."),
    Patch("transformers.trainer_pt_utils", "EvalLoopContainer", "to_cpu_and_numpy", _concatenate_on_host,
          "Concatenates what `add` kept, on the host."),
    Patch("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "pad",
          functools.partial(huggingface_padding.pad_examples, _pads), f"Pads examples {_LENGTHS}"),
    Patch("transformers.tokenization_utils_tokenizers", "TokenizersBackend", "_encode_plus",
          functools.partial(huggingface_padding.encode_texts, _pads), f"Pads texts {_LENGTHS}"),
    Patch("transformers.data.data_collator", "DataCollatorForSeq2Seq", "__call__",
          functools.partial(huggingface_padding.pad_labels, _pads), f"Pads labels {_LENGTHS}"),
)  # fmt: skip

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
        setattr(owner, patch.name, patch.replacement(_installed[patch]))


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

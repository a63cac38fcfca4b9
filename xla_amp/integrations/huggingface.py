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
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from xla_amp import policy as policies
from xla_amp.common import events
from xla_amp.engines import base, devices
from xla_amp.integrations import patches
from xla_amp.integrations.patches import Patch
from xla_amp.policy import Policy
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.pytorch.data import buckets
from xla_amp.pytorch.distributed import gradients, xla_model
from xla_amp.pytorch.optim.grad_scaler import GradScaler
from xla_amp.torch_common.trees import tree_map

_LOW: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Mixed precision -> its low dtype."""

_policy: Policy | None = None
_pad_to_buckets = True
_capture = False
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


def _trainers_device(original: Any, self: Any) -> torch.device:
    chosen: torch.device = original(self)
    state = self.distributed_state
    if state is not None and _ours(state.device):
        self._n_gpu, chosen = 0, state.device
    return chosen


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


def _train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not (_capture and _ours(self.args.device)):
        return original(self, *args, **kwargs)
    from xla_amp.integrations.trainer_capture import CapturedTraining

    with CapturedTraining(self, _finite):
        return original(self, *args, **kwargs)


def _filter_on_device(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    loss = original(self, *args, **kwargs)
    return loss if "training_step" in vars(self) else _finite(self, loss)  # a captured step is filtered after it


def _finite(self: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss that is logged: one that is not finite becomes the mean of those since the last log."""
    if self.args.logging_nan_inf_filter is not None:
        return loss
    mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
    return torch.where(torch.isfinite(loss), loss, mean)


def _also_ours(original: list[Any]) -> list[Any]:
    from transformers import TrainerCallback

    class DeviceCallback(TrainerCallback):
        """Ends the programs of steps and of an evaluation, whose results go to the host, and logs the loss scale.

        During a training ``logging_nan_inf_filter=None`` stands for True: the loop, which would read each loss, does
        not filter, and `_filter_on_device` does.
        """

        def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            # Otherwise all batches so far are concatenated in each step: another shape, another program.
            if _ours(args.device) and args.eval_accumulation_steps is None:
                args.eval_accumulation_steps = 1

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if args.logging_nan_inf_filter and _ours(args.device):
                args.logging_nan_inf_filter = None

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if args.logging_nan_inf_filter is None:
                args.logging_nan_inf_filter = True

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            # What is logged, and the next batch's count of labels, would make the step another program.
            if _ours(args.device):
                devices.engine().step_begins()

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
    return xla_model.send_cpu_data_to_device(result, self.device)


def _inputs_on_device(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, a model's encoder takes inputs on the host, as `prepare_inputs_for_generation` makes the decoder do."""
    if not model.config.is_encoder_decoder:
        return contextlib.nullcontext()

    def move(module: Any, args: Any, kwargs: Any) -> Any:
        return xla_model.send_cpu_data_to_device((args, kwargs), model.device)

    return model.get_encoder().register_forward_pre_hook(move, with_kwargs=True)  # type: ignore[no-any-return]


def _integers_to_host(value: Any) -> Any:
    ours = isinstance(value, torch.Tensor) and _ours(value.device) and not value.is_floating_point()
    return value.cpu() if ours else value


# ---- lengths ---------------------------------------------------------------------------------------------------------
# What pads to the longest row of a batch pads to a bucket instead.  Results stay the same where a mask excludes padding
# from attention; other padding is left alone, and that on the left, which moves a text to other positions.


def _pads() -> bool:
    """Whether batches go to the XLA device, as far as it is known, and are to have few lengths."""
    device = _accelerates_state().get("device")
    return _pad_to_buckets and (device is None or _ours(device))


def bucket(length: int, *limits: int | None) -> int:
    """The length that `length` is padded to: at most the smallest of `limits` that is not less than `length`."""
    room = min((limit for limit in limits if limit is not None and limit >= length), default=None)
    size = next(size for size in buckets.bucket_sizes(2 * max(length, buckets.SHORTEST)) if size >= length)
    return size if room is None else min(size, room)


def _longest(padding: Any) -> bool:
    return padding is True or padding == "longest"


def _may_grow(tokenizer: Any, side: str | None, masked: bool | None) -> bool:
    """Whether more padding leaves the results of the tokenizer's model the same."""
    has_mask = "attention_mask" in tokenizer.model_input_names if masked is None else masked
    return has_mask and (side or tokenizer.padding_side) == "right"


def _lengths(name: str, inputs: Any) -> list[int]:
    """Lengths of the examples of a data set, as a collator passes them; none where padding must stay as it is."""
    if not isinstance(inputs, list | tuple) or not inputs or name not in inputs[0]:
        return []  # rows of texts, perhaps a prompt
    if getattr(inputs[0].get("attention_mask"), "ndim", 1) > 1:
        return []  # a mask of rows and columns is not padded
    return [len(example[name]) for example in inputs]


def _pad_examples(
    original: Any,
    self: Any,
    encoded_inputs: Any,
    padding: Any = True,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    padding_side: str | None = None,
    return_attention_mask: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``PreTrainedTokenizerBase.pad``, which collators call."""
    chosen = pad_to_multiple_of is not None or not _longest(padding)
    if not chosen and _pads() and _may_grow(self, padding_side, return_attention_mask):
        lengths = _lengths(self.model_input_names[0], encoded_inputs)
        if lengths:
            pad_to_multiple_of = bucket(max(lengths), max_length, self.model_max_length)
    options = (padding, max_length, pad_to_multiple_of, padding_side, return_attention_mask)
    return original(self, encoded_inputs, *options, *args, **kwargs)


def _pad_labels(original: Any, self: Any, features: Any, return_tensors: Any = None) -> Any:
    """``DataCollatorForSeq2Seq.__call__``, which pads labels to their own longest row."""
    name = "label" if "label" in features[0] else "labels"
    chosen = self.pad_to_multiple_of is not None or not _longest(self.padding)
    labels = [row.get(name) for row in features]
    if chosen or not _pads() or any(x is None for x in labels) or self.tokenizer.padding_side != "right":
        return original(self, features, return_tensors)
    room = bucket(max(len(x) for x in labels), self.max_length, self.tokenizer.model_max_length)
    padded = [[*map(int, row), *[self.label_pad_token_id] * (room - len(row))] for row in labels]
    return original(self, [{**row, name: x} for row, x in zip(features, padded, strict=True)], return_tensors)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _random_state_file(folder: str | os.PathLike[str]) -> Path:
    """The file of a checkpoint for the state of the device's random generator."""
    rank = f"_{xla_model.get_ordinal()}" if base.in_processes() else ""
    return Path(folder) / f"rng_state_xla{rank}.pth"


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
          "What one process reads after a step would make the next a program that the others do not have."),
    Patch("accelerate.accelerator", "", "get_mixed_precision_context_manager", _region,
          "Opens torch.autocast, which takes no policy."),
    Patch("transformers.training_args", "TrainingArguments", "_setup_devices", _trainers_device,
          "Asks a fixed list of devices, not Accelerate: training is on the CPU."),
    Patch("transformers.training_args", "", "is_torch_bf16_gpu_available", lambda original: True,
          "bf16=True is refused for devices that are not in a fixed list."),
    Patch(*_TRAINER, "train", _train,
          "Calls the parts of a step in turn; with capture=True they are one captured step."),
    Patch(*_TRAINER, "training_step", _filter_on_device,
          "Losses that are not finite would be logged: the loop's own filter, which waits in each step, is off."),
    Patch("transformers.trainer", "", "DEFAULT_CALLBACKS", _also_ours,
          "Several batches of an evaluation would become one program, for each sequence of lengths; no loss scale is "
          "logged; logging_nan_inf_filter waits in each step (transformers#13896 spares torch_xla alone)."),
    Patch(*_TRAINER, "_save_rng_state", _also_save_random_state,
          "Saves the random states of a fixed list of devices: dropout differs after resuming."),
    Patch(*_TRAINER, "_load_rng_state", _also_load_random_state,
          "Loads the random states of a fixed list of devices."),
    Patch("transformers.generation.utils", "GenerationMixin", "generate", _grow_on_host,
          "Token ids on the device, and the default cache, grow by a token: another shape, another program."),
    Patch("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "pad",
          _pad_examples, f"Pads examples {_LENGTHS}"),
    Patch("transformers.data.data_collator", "DataCollatorForSeq2Seq", "__call__",
          _pad_labels, f"Pads labels {_LENGTHS}"),
)  # fmt: skip

_installed: dict[Patch, Any] = {}
"""Patch -> the attribute that it replaced."""


def _apply() -> None:
    """Installs the patches whose attributes exist by now."""
    patches.install(PATCHES, _installed)


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
        if name.partition(".")[0] not in ("accelerate", "transformers"):
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


def enable(
    policy: Policy | str | Path | None = None,
    *,
    pad_to_buckets: bool = True,
    capture: bool = False,
) -> None:
    """Makes Accelerate and transformers' Trainer use the XLA device; call it before their first object is made.

    ``Accelerator(cpu=True)`` and ``TrainingArguments(use_cpu=True)`` still use the CPU.  Warns if Accelerate has chosen
    another device already.

    Args:
        policy: the rules for ``"bf16"`` and ``"fp16"``, as for `xla_amp.autocast`; None is the device's default.  A
            second call sets it for regions that are made from then on.
        pad_to_buckets: pad batches of tokens to 16, 32, 48, 64, 96, ... where transformers would pad them to their
            longest row, so that there are few programs.
        capture: capture the Trainer's step as `xla_amp.compile` does, by its contract.  What prevents it is a warning.

    Raises:
        ImportError: Accelerate is not installed.
        PolicyError: `policy` cannot be loaded.
        DeviceError: the engine in use is torch_xla, which Accelerate finds by itself.
    """
    global _policy, _pad_to_buckets, _capture
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            "xla_amp.integrations.huggingface needs the package `accelerate`: pip install 'xla-amp[huggingface]'"
        )
    base.require_lazy("xla_amp.integrations.huggingface.enable()", "Accelerate's own support of torch_xla")
    _policy = None if policy is None else policies.load(policy)
    _pad_to_buckets = pad_to_buckets
    _capture = capture
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

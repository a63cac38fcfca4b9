"""Accelerate and transformers' Trainer train on the lazy device with their own loops, callbacks and checkpoints."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import pytest
import torch
from small_training import BAD, Classifier, check_monitor, counted, layers, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SequentialSampler

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever fetched
pytest.importorskip("accelerate", reason="the extra `huggingface`")
transformers = pytest.importorskip("transformers", reason="the extra `huggingface`")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import xla_amp  # noqa: E402
from xla_amp.errors import PolicyError  # noqa: E402
from xla_amp.integrations import huggingface as ours  # noqa: E402
from xla_amp.integrations.trainer_monitor import MonitorCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about deprecated names


@pytest.fixture(scope="module", autouse=True)
def _enabled(huggingface_enabled: None) -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _no_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    ours.enable()  # the default policy


# ---- Accelerate ------------------------------------------------------------------------------------------------------


class Training:
    """A loop as Accelerate's examples have it."""

    def __init__(self, dropout: float = 0.0, fused: bool = False, **options: Any) -> None:
        AcceleratorState._reset_state(True)
        self.accelerator = Accelerator(**options)
        torch.manual_seed(0)
        model = layers(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        loader = DataLoader(rows(32), batch_size=4)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.counts: list[tuple[int, int]] = []
        self.call: Any = self.step

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(x), y)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss

    def epochs(self, count: int) -> torch.Tensor:
        found = []
        for _ in range(count):
            counted()
            for x, y in self.loader:
                found.append(self.call(x, y).detach())
            self.counts.append(counted()[:2])
        return torch.stack(found).float().cpu()


@pytest.mark.parametrize(
    ("precision", "accumulated", "tolerance"),
    [
        pytest.param("no", 1, 1e-5, marks=pytest.mark.full),
        ("bf16", 1, 3e-2),
        pytest.param("fp16", 1, 5e-3, marks=pytest.mark.full),
        ("fp16", 2, 5e-3),
    ],
)
def test_a_loop_of_accelerate_trains_as_on_the_cpu(
    precision: Any, accumulated: int, tolerance: float, record: Any
) -> None:
    expected = Training(cpu=True, gradient_accumulation_steps=accumulated).epochs(3)
    run = Training(mixed_precision=precision, gradient_accumulation_steps=accumulated)
    found = run.epochs(3)
    assert run.accelerator.device.type == next(run.model.parameters()).device.type == "jax"
    assert (found - expected).abs().max() < tolerance
    assert run.counts[1:] == [(8 // accumulated, 0)] * 2
    if precision != "no":
        assert (found - expected).abs().max() > 0
    assert isinstance(run.accelerator.scaler, xla_amp.GradScaler) == (precision == "fp16")
    record("Accelerate", precision, run.counts[-1], 8 // accumulated)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_documented_loop_is_captured(precision: Any) -> None:
    """Three parts a step, two at the end of an epoch; the schedule is stepped where the optimizer is."""

    def run(captured: bool) -> tuple[list[Any], Any]:
        run = Training(dropout=0.5, fused=True, mixed_precision=precision, gradient_accumulation_steps=3)
        run.call = xla_amp.compile(run.step, strict=True) if captured else run.step
        found: list[Any] = []
        for _ in range(4):
            found += [run.epochs(1).tolist(), run.schedule.get_last_lr(), run.accelerator.step]
        return [*found, run.schedule.state_dict(), [each.tolist() for each in run.model.parameters()]], run.call

    found, step = run(captured=True)
    assert found == run(captured=False)[0]
    assert step.replays >= 16


def test_options_of_the_scaler_and_of_autocast_act() -> None:
    from accelerate.utils import AutocastKwargs, GradScalerKwargs

    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert accelerator.scaler.get_scale() == 8
    x = torch.ones(2, 2, device=accelerator.device)
    with accelerator.autocast():
        assert (x @ x).dtype is torch.float16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype is torch.float32


def test_saved_state_resumes_bitwise(tmp_path: Path, record: Any) -> None:
    whole = Training(dropout=0.5, mixed_precision="fp16")
    whole.epochs(1)
    whole.accelerator.scaler.update(128.0)
    whole.accelerator.save_state(tmp_path)
    expected = whole.epochs(1)
    resumed = Training(dropout=0.5, mixed_precision="fp16")
    torch.manual_seed(5)
    resumed.accelerator.load_state(tmp_path)
    assert resumed.accelerator.scaler.get_scale() == 128
    assert torch.equal(resumed.epochs(1), expected)
    record("Accelerate", "fp16")


def test_an_accelerator_is_pickled_and_copied(tmp_path: Path) -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.prepare(nn.Linear(2, 2))
    for made in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
        assert made.device == accelerator.device
        assert made.scaler.get_scale() == accelerator.scaler.get_scale()
        made.save_state(str(tmp_path))
        assert (tmp_path / "rng_state_xla.pth").unlink() is None


def test_the_policy_decides(tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text('extends = "tpu"\n[[rule]]\noperations = ["mm"]\ncast = "fp32"\nwhy = "a test"\n')
    accelerator = Accelerator(mixed_precision="bf16")
    x = torch.ones(2, 2, device=accelerator.device)
    dtypes = []
    for policy in (None, rules):
        ours.enable(policy=policy)
        with accelerator.autocast():
            dtypes.append(torch.mm(x, x).dtype)
    assert dtypes == [torch.bfloat16, torch.float32]
    with pytest.raises(PolicyError, match="unheard"):
        ours.enable(policy="unheard")


# ---- Trainer ---------------------------------------------------------------------------------------------------------


class Counts(TrainerCallback):
    """Executions, host syncs and compilations of each epoch's steps."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int]] = []

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        counted()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(counted())


ROWS = [{"x": x, "labels": y} for x, y in rows(32)]


def trainer(model: Any, folder: Path, rows: Any = ROWS, kind: Any = Trainer, **options: Any) -> Any:
    callbacks = options.pop("callbacks", [])
    metrics = options.pop("compute_metrics", None)
    arguments = options.pop("arguments", TrainingArguments)(
        folder,
        **{
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "num_train_epochs": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **options,
        },
    )
    rest = {"train_dataset": rows, "eval_dataset": rows[:22], "callbacks": callbacks, "compute_metrics": metrics}
    return kind(model, arguments, **rest)


def net(dropout: float = 0.0) -> Classifier:
    torch.manual_seed(0)
    return Classifier(dropout)


def logged(made: Any, name: str = "loss") -> list[float]:
    return [row[name] for row in made.state.log_history if name in row]


def difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The Trainer's run on the CPU in float32."""
    made = trainer(net(), tmp_path_factory.mktemp("cpu"), use_cpu=True)
    made.train()
    return made


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [pytest.param({}, 1e-5, marks=pytest.mark.full), ({"bf16": True}, 3e-2), ({"fp16": True}, 5e-3)],
    ids=["fp32", "bf16", "fp16"],
)
def test_the_trainer_trains_as_on_the_cpu(
    options: dict[str, Any], tolerance: float, on_cpu: Any, tmp_path: Path
) -> None:
    made = trainer(net(), tmp_path, **options)
    made.train()
    assert on_cpu.args.device.type == "cpu"
    assert next(made.model.parameters()).device.type == "jax"
    assert difference(logged(made), logged(on_cpu)) < tolerance
    assert difference(logged(made, "grad_norm"), logged(on_cpu, "grad_norm")) < 10 * tolerance
    if options:
        assert difference(logged(made), logged(on_cpu)) > 0
    assert len(logged(made, "loss_scale")) == (24 if "fp16" in options else 0)


@pytest.mark.parametrize(
    ("options", "executions"),
    [({"bf16": True}, 8), ({"fp16": True, "gradient_accumulation_steps": 2}, 4)],
    ids=["bf16", "fp16-accumulated"],
)
def test_a_step_of_the_trainer_is_one_executable_without_syncs(
    options: dict[str, Any], executions: int, tmp_path: Path, record: Any
) -> None:
    counts = Counts()
    made = trainer(net(0.1), tmp_path, logging_steps=100, callbacks=[counts], **options)
    assert made.args.logging_nan_inf_filter
    made.train()
    assert [found[:2] for found in counts.found] == [(executions, 0)] * 3
    assert counts.found[0][2] <= 1
    assert [found[2] for found in counts.found[1:]] == [0, 0]
    steps = 8 // options.get("gradient_accumulation_steps", 1)
    record("Trainer", "bf16" if "bf16" in options else "fp16", counts.found[-1], steps)


class Overflows(Trainer):
    """The loss of the third step is infinite."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 2 else loss


class Weights(TrainerCallback):
    def __init__(self) -> None:
        self.after: list[torch.Tensor] = []

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append(model.body[0].weight.detach().clone())


def test_an_overflow_is_skipped_and_the_scale_is_in_the_logs(tmp_path: Path) -> None:
    weights = Weights()
    made = trainer(net(), tmp_path, kind=Overflows, fp16=True, max_steps=5, callbacks=[weights])
    made.train()
    assert logged(made, "loss_scale") == [65536, 65536, 32768, 32768, 32768]
    assert torch.equal(weights.after[1].cpu(), weights.after[2].cpu())
    assert not torch.equal(weights.after[2].cpu(), weights.after[3].cpu())
    assert logged(made)[2] == 0  # the filter takes the mean of the losses since the last log
    assert made.args.logging_nan_inf_filter is True


class Outputs(Classifier):
    """Returns what models of transformers return."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return transformers.modeling_outputs.SequenceClassifierOutput(**super().forward(x, labels))


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(ROWS)


def test_the_monitor_has_each_optimizer_step_of_each_training(tmp_path: Path) -> None:
    given = [{"x": x, "labels": y} for x, y in rows(32, BAD)]
    options = {"use_cpu": True, "gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_grad_norm": 0.0}

    def train(recorder: Any) -> nn.Module:
        made = trainer(Outputs(), tmp_path, given, InOrder, callbacks=[recorder], **options)
        made.train()
        return made.model

    check_monitor(MonitorCallback(), train)


class Counted(Trainer):
    """Counts the calls of Python, in an object that no capture compares."""

    calls: Mock

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls()
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    "options", [{"bf16": True, "gradient_accumulation_steps": 2, "optim": "adamw_torch"}, {"fp16": True}]
)
def test_captured_steps_are_the_recorded_ones(options: dict[str, Any], tmp_path: Path) -> None:
    """With dropout and a schedule; in float16 a batch of each epoch overflows."""
    rows = [{**row, "x": row["x"] * (1e6 if at == 9 else 1)} for at, row in enumerate(ROWS)]
    runs = []
    for capture in (False, True):
        ours.enable(capture=capture)
        made = trainer(net(0.1), tmp_path, rows, Counted, **options)
        made.calls = Mock()
        made.train()
        runs.append(made)
    recorded, captured = runs
    assert recorded.calls.call_count == 24
    assert captured.calls.call_count < 9  # twice each, and one is compared after eight
    for name in ("loss", "grad_norm", "learning_rate", "loss_scale"):
        assert repr(logged(captured, name)) == repr(logged(recorded, name))
    assert len(set(logged(captured, "loss_scale"))) == (4 if "fp16" in options else 0)
    for one, other in zip(captured.model.parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    assert "training_step" not in vars(captured)
    assert not {"_clip_grad_norm", "_get_grad_norm"}.intersection(vars(captured))


def test_a_captured_text_model_does_not_read_its_mask(tmp_path: Path) -> None:
    ids = torch.randint(16, (32, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < 6).long()
    rows = [{"input_ids": row, "labels": row, "attention_mask": mask} for row in ids]
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    kept = []
    for capture in (False, True):
        ours.enable(capture=capture)
        torch.manual_seed(0)
        made = trainer(transformers.GPT2LMHeadModel(config), tmp_path, rows, Counted, num_train_epochs=1)
        made.calls = Mock()
        made.train()
        kept.append(made)
    recorded, captured = kept
    assert captured.calls.call_count < 5 < recorded.calls.call_count
    assert difference(logged(captured), logged(recorded)) < 1e-5
    assert transformers.masking_utils.is_tracing.__module__.startswith("transformers")
    assert not hasattr(transformers.masking_utils.is_tracing, "__wrapped__")


class Weighted(Counted):
    """A loss with a weight that changes while it trains."""

    def weight(self) -> float:
        raise NotImplementedError

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.weight()


class Anneals(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        args.delta = model.config.beta = self.trainer.beta = 10.0 if state.global_step >= 15 else 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("weight", "calls", "name"),
    [
        (lambda self: 10.0 if self.state.global_step >= 15 else 1.0, 24, "self.state.global_step changed"),
        pytest.param(
            lambda self: 10.0 if self.state.epoch >= 1.5 else 1.0,
            24,
            "self.state.epoch changed",
            marks=pytest.mark.full,
        ),
        (lambda self: self.beta, 6, None),
        pytest.param(lambda self: self.args.delta, 6, None, marks=pytest.mark.full),
        (lambda self: self.model.config.beta, 6, None),
    ],
    ids=["global_step", "epoch", "set by a callback", "of args", "of the configuration"],
)
def test_what_a_captured_loss_names_of_its_trainer_is_compared(
    weight: Any, calls: int, name: Any, tmp_path: Path
) -> None:
    kind, kept = type("Kind", (Weighted,), {"weight": weight}), []
    for capture in (False, True):
        ours.enable(capture=capture)
        model, anneals = net(), Anneals()
        model.config = types.SimpleNamespace()
        made = trainer(model, tmp_path, kind=kind, bf16=True, callbacks=[anneals])
        made.calls, anneals.trainer = Mock(), made  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made.train()
        kept.append((logged(made), logged(made, "grad_norm")))
    assert kept[0] == kept[1]
    assert max(kept[1][0][15:]) > 5 * max(kept[1][0][:12])
    assert made.calls.call_count <= calls + 1  # one is compared
    reasons = [str(each.message) for each in said if "cannot be replayed" in str(each.message)]
    assert [name in each for each in reasons] == [True] * (calls == 24)


class Looks(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


def test_what_prevents_a_capture_is_named(tmp_path: Path) -> None:
    ours.enable(capture=True)
    with pytest.warns(xla_amp.errors.XlaAmpWarning, match="Looks.on_pre_optimizer_step runs inside of the step"):
        trainer(net(), tmp_path, bf16=True, callbacks=[Looks()]).train()


def test_a_step_of_accelerate_is_captured() -> None:
    expected = Training(dropout=0.1, mixed_precision="fp16", fused=True).epochs(2)
    run = Training(dropout=0.1, mixed_precision="fp16", fused=True)
    model, optimizer, accelerator = run.model, run.optimizer, run.accelerator

    @xla_amp.compile(strict=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = []
    for x, y in [*run.loader, *run.loader]:
        found.append(step(x, y).detach())
        run.schedule.step()
    assert step.replays > 9
    assert torch.equal(torch.stack(found).float().cpu(), expected)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(precision: str, tmp_path: Path, record: Any) -> None:
    options = {precision: True, "save_strategy": "steps", "save_steps": 11}
    whole = trainer(net(0.5), tmp_path, **options)
    whole.train()
    torch.manual_seed(5)
    resumed = trainer(Classifier(0.5), tmp_path, **options)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-11")
    assert logged(resumed) == logged(whole)
    assert all(map(torch.equal, *([p.cpu() for p in made.model.parameters()] for made in (whole, resumed))))
    state = torch.load(tmp_path / "checkpoint-11" / "optimizer.pt", map_location="cpu", weights_only=True)
    assert state["state"][0]["exp_avg"].device.type == "cpu"
    record("Trainer", precision)


def test_an_evaluation_gives_the_metrics_of_the_cpu_and_compiles_once(on_cpu: Any, tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"accuracy": float(right.mean()), "rows": len(right)}

    on_cpu.compute_metrics = accuracy
    made = trainer(net(), tmp_path, compute_metrics=accuracy)
    made.model.load_state_dict(on_cpu.model.state_dict())
    xla_amp.metrics.reset()
    expected, found = on_cpu.evaluate(), made.evaluate()
    assert found["eval_rows"] == 22
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
    made.evaluate(ROWS)
    assert xla_amp.metrics()["compilations"] <= 2  # batches of four rows, and one of two


# ---- models of transformers ------------------------------------------------------------------------------------------


def llama() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A decoder, tokens that are padded at their beginning, and their mask."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_hidden_layers=1))
    return model, torch.tensor([[5, 6, 7, 8], [1, 1, 9, 3]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def bart() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """An encoder with a decoder."""
    size = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 20, "max_position_embeddings": 32}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(**size, **layers, forced_eos_token_id=None, init_std=1.0)
    model = transformers.BartForConditionalGeneration(config)
    return model, torch.tensor([[5, 6, 7, 8], [9, 3, 1, 1]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("make", "options", "programs", "again"),
    [
        (llama, {"num_beams": 3}, 4, 1),  # beams reorder the cache
        pytest.param(llama, {}, 2, 0, marks=pytest.mark.full),
        (llama, {"return_dict_in_generate": True}, 2, 0),
        (bart, {"num_beams": 3}, 8, 8),
        pytest.param(bart, {}, 3, 3, marks=pytest.mark.full),
    ],
)
def test_generated_text_of_any_length_has_few_programs(make: Any, options: Any, programs: int, again: int) -> None:
    torch.manual_seed(0)
    model, ids, mask = make()
    model.eval()
    options = {**options, "max_new_tokens": 14, "do_sample": False}
    if make is llama:
        options |= {"pad_token_id": 0, "eos_token_id": None}

    def tokens(device: Any) -> torch.Tensor:
        found = model.generate(ids.to(device), attention_mask=mask.to(device), **options)
        return found if isinstance(found, torch.Tensor) else found.sequences

    expected = tokens("cpu")
    assert expected.shape[1] > 8
    device = xla_amp.xla_device()
    model.to(device)
    xla_amp.sync()
    for most in (programs, again):
        xla_amp.metrics.reset()
        found = tokens(device)
        assert xla_amp.metrics()["compilations"] <= most
        assert found.device.type == "jax"
        assert found.tolist() == expected.tolist()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_cache_that_the_user_chose_stays() -> None:
    seen = []

    class Model:
        device = xla_amp.xla_device()
        config = generation_config = transformers.GenerationConfig()

    Model.config.is_encoder_decoder = False

    def generate(*args: Any, **kwargs: Any) -> None:
        ours._grow_on_host(lambda self, *_, **given: seen.append(given.get("cache_implementation")), *args, **kwargs)

    generate(Model())
    generate(Model(), cache_implementation="offloaded")
    generate(Model(), None, transformers.GenerationConfig(cache_implementation="dynamic"))
    generate(Model(), past_key_values=object())
    generate(Model(), use_cache=False)
    assert seen == ["static", "offloaded", None, None, None]


# ---- enabling --------------------------------------------------------------------------------------------------------


NOT_ENABLED = """
import warnings
import accelerate, transformers
from xla_amp.integrations import huggingface

print(accelerate.Accelerator().device.type, transformers.TrainingArguments("folder", report_to=[]).device.type)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    huggingface.enable()
print(*(each.message for each in caught))
"""


@pytest.mark.full
def test_without_enable_nothing_is_different_and_a_device_that_was_chosen_before_is_told() -> None:
    devices, said = forked.run(program=NOT_ENABLED).stdout.splitlines()
    assert devices == "cpu cpu"
    assert "before the first Accelerator" in said


@pytest.mark.full
def test_a_variable_enables_a_script_that_does_not_name_the_package(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "print(accelerator.device.type, accelerator.mixed_precision, type(accelerator.scaler).__module__)\n"
        "from transformers import TrainingArguments\n"
        "print(TrainingArguments('folder', bf16=True, report_to=[]).device.type)\n"
        "from transformers import Trainer\n"
        "print(Trainer._save_rng_state.__code__.co_filename)\n"
    )
    # Accelerate's launcher starts the script with its choices in such variables.
    environment = {**os.environ, "XLA_AMP_HUGGINGFACE": "1", "ACCELERATE_MIXED_PRECISION": "fp16"}
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "jax fp16 xla_amp.pytorch.optim.grad_scaler"
    assert second == "jax"
    assert Path(third).parent == Path(ours.__file__).parent


def test_every_patch_names_its_reason() -> None:
    assert len(ours.PATCHES) == 19
    assert all(patch.reason for patch in ours.PATCHES)


def test_a_version_without_a_replaced_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = ours.Patch("accelerate.state", "PartialState", "gone", lambda x: x, ".")
    monkeypatch.setattr(ours, "PATCHES", (*ours.PATCHES, unknown))
    ours._apply()
    with pytest.raises(ImportError, match=r"accelerate [\d.]+ has no accelerate\.state\.PartialState\.gone"):
        ours._require(sys.modules["accelerate.state"])
    ours._require(sys.modules["accelerate.accelerator"])

"""Lightning and Fabric train on the lazy device with their own loops, callbacks and checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_training import BAD, check_monitor, layers, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason="the extra `lightning`")

from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar  # noqa: E402
from lightning_program import Counts  # noqa: E402

import xla_amp  # noqa: E402
from xla_amp.errors import DeviceError  # noqa: E402
from xla_amp.integrations import lightning as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers, summaries and intervals


class Net(lightning.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = layers(dropout)
        self.losses: list[torch.Tensor] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        logits = self.body(batch[0])
        self.dtypes.add(logits.dtype)
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", F.cross_entropy(self.body(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(batches: int = 8) -> DataLoader[Any]:
    return DataLoader(rows(4 * batches), batch_size=4)


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def trainer(**options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 0}
    saving = {"enable_checkpointing": False} if not options.get("callbacks") else {}
    return lightning.Trainer(**{"max_epochs": 2, "accelerator": "xla_amp", **quiet, **saving, **options})


def losses(model: Net) -> torch.Tensor:
    return torch.stack([loss.cpu() for loss in model.losses])


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        pytest.param("32-true", torch.float32, 1e-5, marks=pytest.mark.full),
        ("bf16-mixed", torch.bfloat16, 3e-2),
        ("16-mixed", torch.float16, 5e-3),
    ],
)
def test_losses_are_those_of_lightning_on_the_cpu(precision: str, dtype: torch.dtype, tolerance: float) -> None:
    expected, model = net(), net()
    trainer(accelerator="cpu").fit(expected, loader(), loader(3))
    fit = trainer(precision=precision)
    fit.fit(model, loader(), loader(3))
    assert model.losses[0].device.type == "jax"
    assert model.dtypes == {dtype}
    assert (losses(model) - losses(expected)).abs().max() < tolerance
    assert fit.callback_metrics["val"] > 0
    if precision != "32-true":
        assert (losses(model) - losses(expected)).abs().max() > 0


@pytest.mark.parametrize(
    ("options", "executions"),
    [
        ({"precision": "bf16-mixed"}, 8),
        pytest.param({"precision": "16-mixed", "gradient_clip_val": 1.0}, 8, marks=pytest.mark.full),
        pytest.param({"precision": "32-true"}, 8, marks=pytest.mark.full),
        ({"precision": "16-mixed", "accumulate_grad_batches": 4, "gradient_clip_val": 1.0}, 2),
    ],
    ids=["bf16", "fp16-clip", "fp32", "fp16-accumulate"],
)
def test_a_step_is_one_executable_without_syncs(options: dict[str, Any], executions: int, record: Any) -> None:
    counts = Counts()
    trainer(max_epochs=4, callbacks=[counts], enable_checkpointing=False, **options).fit(net(0.1), loader(), loader(3))
    assert [found[:2] for found in counts.found[2:]] == [(executions, 0)] * 2
    assert counts.found[-1][2] == 0
    steps = 8 // options.get("accumulate_grad_batches", 1)
    record("Lightning", options["precision"], counts.found[-1], steps)


class Logs(Net):
    """Logs its loss; of a width of no other test, whose programs exist."""

    def __init__(self, width: int, on_epoch: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
        self.on_epoch = on_epoch

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=self.on_epoch)
        return loss


@pytest.mark.parametrize("on_epoch", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("precision", ["16-mixed", pytest.param("bf16-mixed", marks=pytest.mark.full)])
def test_a_training_has_two_programs(
    precision: str, on_epoch: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of the second epoch, in which Lightning resets logged values, is the other one."""
    monkeypatch.setenv("XLA_AMP_DEBUG", "recompile")
    trainer(precision=precision, max_epochs=3).fit(Logs(5 + 2 * on_epoch, on_epoch), loader())
    again = [line for line in caplog.messages if "compiled program" in line and "core/optimizer.py" in line]
    assert len(again) == 1


def test_a_progress_bar_reads_only_when_it_is_drawn() -> None:
    counts = Counts()
    callbacks = [counts, TQDMProgressBar(refresh_rate=4)]
    options = {"callbacks": callbacks, "enable_progress_bar": True, "enable_checkpointing": False, "max_epochs": 4}
    trainer(precision="bf16-mixed", **options).fit(net(), loader(), loader(3))
    assert [syncs for _, syncs, _ in counts.found[2:]] == [3, 3]  # the loss, twice, and that of the last epoch


def test_the_monitor_has_each_optimizer_step_of_each_training() -> None:
    options = {"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": 2, "enable_checkpointing": False}

    def train(recorder: Any) -> nn.Module:
        model = net()
        trainer(callbacks=[recorder], **options).fit(model, DataLoader(rows(32, BAD), batch_size=4))
        return model

    check_monitor(ours.MonitorCallback(), train)


@pytest.mark.parametrize(
    "precision",
    ["16-mixed", pytest.param("bf16-mixed", marks=pytest.mark.full), pytest.param("32-true", marks=pytest.mark.full)],
)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(precision: str, tmp_path: Path, record: Any) -> None:
    whole = net()
    trainer(precision=precision, max_epochs=4).fit(whole, loader())
    first = net()
    saving = ModelCheckpoint(tmp_path, save_last=True)
    trainer(precision=precision, callbacks=[saving]).fit(first, loader())
    torch.manual_seed(5)
    second = Net()
    trainer(precision=precision, max_epochs=4).fit(second, loader(), ckpt_path=tmp_path / "last.ckpt")
    written = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert {value.device.type for value in written["state_dict"].values()} == {"cpu"}
    assert torch.equal(torch.cat([losses(first), losses(second)]), losses(whole))
    for name, value in whole.state_dict().items():
        assert torch.equal(value.cpu(), second.state_dict()[name].cpu()), name
    record("Lightning", precision)


def test_the_policy_and_overrides_decide(tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text('extends = "tpu"\n[[rule]]\noperations = ["linear"]\ncast = "fp32"\nwhy = "a test"\n')
    by_file, by_override = net(), net()
    trainer(plugins=ours.XLAMixedPrecision("bf16-mixed", policy=rules), max_steps=1).fit(by_file, loader())
    with xla_amp.policy.override({"linear": "fp32"}):
        trainer(precision="bf16-mixed", max_steps=1).fit(by_override, loader())
    assert by_file.dtypes == by_override.dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "bf16-true"}, ValueError, "must be '16-mixed' or 'bf16-mixed'"),
        ({"devices": 2}, ValueError, "one device per process"),
        ({"strategy": "ddp"}, DeviceError, "leave strategy out"),
    ],
    ids=["precision", "devices", "strategy"],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer(**options)
    with pytest.raises(error, match=message):
        lightning.Fabric(accelerator="xla_amp", **options)


CALLS = Mock()
"""Counts the calls of Python, in an object that no capture compares."""


class Captured(Net):
    """Counts its steps; its optimizer has torch's defaults."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        CALLS()
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Seen(lightning.Callback):
    """What is known after each batch."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        scaler = trainer.precision_plugin.scaler
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.found.append((outputs["loss"].item(), trainer.global_step, scaler and scaler.get_scale(), logged))


@pytest.mark.parametrize(
    "options", [{"precision": "16-mixed"}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}]
)
def test_captured_steps_are_the_recorded_ones(options: dict[str, Any]) -> None:
    """With dropout, clipping and a schedule; in float16 a batch overflows."""
    data, kept = loader(), []
    data.dataset.tensors[0][9] *= 1e6  # type: ignore[attr-defined]
    for capture in (False, True):
        torch.manual_seed(0)
        model, seen = Captured(0.1), Seen()
        CALLS.reset_mock()
        strategy = ours.XLAStrategy(capture=capture)
        quiet = {"callbacks": [seen], "enable_checkpointing": False, "gradient_clip_val": 1.0, "max_epochs": 3}
        fit = trainer(strategy=strategy, **quiet, **options)
        fit.fit(model, data, loader(3))
        weights = [each.detach().cpu() for each in model.parameters()]
        kept.append((repr(seen.found), fit.fit_loop.state_dict(), weights, CALLS.call_count))
    recorded, captured = kept
    assert recorded[:2] == captured[:2]
    assert seen.found[-1][2] == (8192.0 if options["precision"] == "16-mixed" else None)  # one is skipped in each epoch
    assert all(torch.equal(one, other) for one, other in zip(recorded[2], captured[2], strict=True))
    assert recorded[3] == 24
    assert captured[3] < 9  # twice each, and one is compared after eight


def begins_late(step: int) -> float:
    return 2.0 if step >= 15 else 1.0


class Weighted(Captured):
    """A loss with weights that change while it trains."""

    beta = 1.0

    @property
    def annealed(self) -> float:
        return min(1.0, 0.2 * (1 + self.current_epoch))

    def kl(self) -> float:
        return 0.5 if self.trainer.current_epoch < 3 else 1.5

    def weight(self) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.weight()


def scales(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    def closure() -> Any:
        loss = optimizer_closure()
        for parameter in self.parameters():
            parameter.grad.mul_(5.0 if epoch >= 4 else 1.0)
        return loss

    optimizer.step(closure=closure)


class Anneals(lightning.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.beta = trainer.gamma = 2.0 if trainer.current_epoch >= 4 else 1.0


@pytest.mark.parametrize(
    ("weight", "calls"),
    [
        (lambda self: 0.1 * (1 + self.current_epoch), 21),  # the first, and two in each epoch
        pytest.param(lambda self: self.annealed, 12, marks=pytest.mark.full),  # one is compared
        pytest.param(lambda self: self.kl(), 21, marks=pytest.mark.full),
        pytest.param(lambda self: self.beta, 7, marks=pytest.mark.full),
        (lambda self: self.trainer.gamma, 7),
        (scales, 21),
        (lambda self: begins_late(self.global_step), 80),
        pytest.param(lambda self: 2.0 if self.trainer.global_step >= 15 else 1.0, 80, marks=pytest.mark.full),
    ],
    ids=[
        "current_epoch",
        "a property",
        "a method",
        "set by a callback",
        "set on the trainer",
        "an argument of a hook",
        "a function",
        "global_step",
    ],
)
def test_what_a_captured_training_step_names_of_its_module_is_compared(weight: Any, calls: int) -> None:
    kind, kept = type("Kind", (Weighted,), {"optimizer_step" if weight is scales else "weight": weight}), []
    for capture in (False, True):
        torch.manual_seed(0)
        CALLS.reset_mock()
        seen = Seen()
        quiet = {"callbacks": [seen, Anneals()], "enable_checkpointing": False, "max_epochs": 10}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer(strategy=ours.XLAStrategy(capture=capture), precision="bf16-mixed", **quiet).fit(kind(), loader())
        kept.append(seen.found)
    assert kept[0] == kept[1]
    assert CALLS.call_count <= calls
    reasons = [str(each.message) for each in said if "cannot be replayed" in str(each.message)]
    assert ["global_step changed" in each for each in reasons] == [True] * (calls == 80)


class Reads(Captured):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 if batch_idx % 2 else 2)


class ReadsInHook(Captured):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        loss = optimizer_closure()
        if batch_idx % 2:
            optimizer.step(closure=lambda: loss)


class LogsNumbers(Captured):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("rate", 0.5)
        return super().training_step(batch, batch_idx)


class Looks(lightning.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "callbacks", "reason"),
    [
        (Reads, [], "its code reads batch_idx"),
        (ReadsInHook, [], "its code reads batch_idx"),
        (LogsNumbers, [], "'rate' is logged as a float"),
        (Captured, [Looks()], "Looks.on_after_backward runs inside of the step"),
    ],
)
def test_what_prevents_a_capture_is_named(kind: Any, callbacks: list[Any], reason: str) -> None:
    torch.manual_seed(0)
    quiet = {"callbacks": callbacks, "enable_checkpointing": False, "precision": "bf16-mixed"}
    CALLS.reset_mock()
    with pytest.warns(xla_amp.errors.XlaAmpWarning, match=reason):
        trainer(strategy=ours.XLAStrategy(capture=True), **quiet).fit(kind(), loader())
    assert CALLS.call_count == 16


def test_auto_selects_the_device_that_is_in_use() -> None:
    xla_amp.xla_device()
    assert isinstance(trainer(accelerator="auto").strategy, ours.XLAStrategy)
    assert lightning.Fabric().device.type == "jax"


def test_other_accelerators_keep_lightnings_own_classes() -> None:
    cpu = trainer(accelerator="cpu", precision="bf16-mixed")
    assert type(cpu.strategy).__module__.startswith("lightning.")
    assert type(cpu.precision_plugin).__module__.startswith("lightning.")


def fabric_losses(steps: int = 8, **options: Any) -> tuple[torch.Tensor, Any, Any, Any]:
    fabric = lightning.Fabric(**options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    batches = fabric.setup_dataloaders(loader(steps))
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        found.append(loss.detach())
    return torch.stack([loss.float().cpu() for loss in found]), fabric, model, optimizer


@pytest.mark.parametrize(
    ("precision", "tolerance"), [pytest.param("32-true", 1e-5, marks=pytest.mark.full), ("16-mixed", 5e-3)]
)
def test_fabric_trains_as_on_the_cpu(precision: Any, tolerance: float) -> None:
    expected = fabric_losses(accelerator="cpu")[0]
    found, fabric, _, _ = fabric_losses(accelerator="xla_amp", precision=precision)
    assert fabric.device.type == "jax"
    assert (found - expected).abs().max() < tolerance


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    _, fabric, model, optimizer = fabric_losses(accelerator="xla_amp", precision="16-mixed")
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer, "step": 8})
    _, other, empty, fresh = fabric_losses(2, accelerator="xla_amp", precision="16-mixed")
    rest = {"model": empty, "optimizer": fresh, "step": 0}
    other.load(tmp_path / "state.ckpt", rest)
    assert rest["step"] == 8
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), empty.parameters(), strict=True))
    for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(old[name].cpu(), new[name].cpu()) for name in ("exp_avg", "exp_avg_sq"))


def test_every_patch_names_its_reason() -> None:
    assert len(ours.PATCHES) == 4
    assert all(patch.reason for patch in ours.PATCHES)

"""The monitor in Lightning's and transformers' trainers: each optimizer step of each training, with its loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own

BAD = 5  # a batch; two make a step


def data(count: int = 8):
    torch.manual_seed(0)
    x = torch.randn(2 * count, 4)
    x[2 * BAD] = math.inf
    return x, torch.randint(0, 3, (2 * count,))


def check(history):
    assert history.of("step") == [0, 1, 2, 3]
    assert [math.isfinite(loss) for loss in history.of("loss")[:3]] == [True, True, False]
    assert history.of("bad")[:3] == [False, False, True]
    assert set(history.steps[2].nonfinite) == {"body.weight", "body.bias"}
    assert "body" in history.steps[0].largest


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", reason="the extra `lightning`")
    from xla_amp.integrations.lightning import MonitorCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3)

        def training_step(self, batch, index):
            return F.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    recorder = MonitorCallback()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=2)
    for _ in range(2):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, callbacks=[recorder], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Net(), loader)
        check(recorder.monitor.history)


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra `huggingface`")
    from transformers.modeling_outputs import SequenceClassifierOutput

    from xla_amp.integrations.trainer_monitor import MonitorCallback

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3)

        def forward(self, x, labels):
            logits = self.body(x)
            return SequenceClassifierOutput(loss=F.cross_entropy(logits, labels), logits=logits)

    recorder = MonitorCallback()
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1, use_cpu=True,
        report_to=[], save_strategy="no", max_grad_norm=0.0, logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    x, y = data()
    rows = [{"x": each, "labels": label} for each, label in zip(x, y, strict=True)]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(rows)

    for _ in range(2):
        InOrder(Net(), arguments, train_dataset=rows, callbacks=[recorder]).train()
        check(recorder.monitor.history)

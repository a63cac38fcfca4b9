"""torchmetrics: an update on the device waits for nothing, and metrics are those of the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch

import xla_amp

torchmetrics = pytest.importorskip("torchmetrics")
CLASSES = 5


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    from torchmetrics.utilities import data

    monkeypatch.setattr(data, "_XLA_AVAILABLE", data._XLA_AVAILABLE)  # restored afterwards
    importlib.reload(importlib.import_module("xla_amp.integrations.torchmetrics"))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        scores = torch.randn(16, CLASSES, generator=generator).softmax(-1)
        yield scores, torch.randint(CLASSES, (16,), generator=generator)


def multiclass():
    kinds = torchmetrics.classification
    return torchmetrics.MetricCollection([kinds.MulticlassAccuracy(CLASSES), kinds.MulticlassF1Score(CLASSES)])


METRICS = {
    "multiclass": (multiclass, lambda scores, labels: (scores, labels)),
    "curve": (lambda: torchmetrics.classification.BinaryAUROC(thresholds=5), lambda s, y: (s[:, 0], (y > 2).long())),
    "mean": (lambda: torchmetrics.MeanMetric(nan_strategy="disable"), lambda s, y: (s[:, 0],)),
    "error": (torchmetrics.MeanSquaredError, lambda s, y: (s[:, 0], s[:, 1])),
}


@pytest.mark.parametrize("name", METRICS)
def test_an_update_waits_for_nothing(name):
    make, arguments = METRICS[name]
    device = xla_amp.xla_device()
    here, there = make().to(device), make()
    for index, batch in enumerate(batches()):
        if index == 1:  # a collection compares the states of its members at the first update
            before = xla_amp.metrics()["host_syncs"]
        there.update(*arguments(*batch))
        # Scores are computed on the device, so the host has no copy of them. Labels are uploaded.
        given = (x.to(device) for x in arguments(*batch))
        here.update(*(x.sigmoid().logit() if x.is_floating_point() else x for x in given))
    assert xla_amp.metrics()["host_syncs"] == before
    results, expected = here.compute(), there.compute()
    if not isinstance(expected, dict):
        results, expected = {"": results}, {"": expected}
    for key, value in expected.items():
        torch.testing.assert_close(results[key].cpu(), value, rtol=1e-4, atol=1e-5)

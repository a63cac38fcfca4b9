"""Every optimizer of torch.optim without a closure, with every set of options of optim_db, trains as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optimizer_runs import Training
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from xla_amp import lazy as engine
from xla_amp.lazy.steps import step_marker
from xla_amp.testing import counts as counted

STEPS = 4
OPTIMIZERS = {info.optim_cls.__name__: info for info in optim_db}
SPARSE = [name for name, info in OPTIMIZERS.items() if info.only_supports_sparse_grads]
CLOSURE = [name for name, info in OPTIMIZERS.items() if info.step_requires_closure]
PLAIN = [name for name in OPTIMIZERS if name not in SPARSE + CLOSURE]
WAITS = {
    "ASGD": "keeps its rates in tensors on the device and reads them back with .item()",
    "Adafactor": "reads norms of parameters and updates with .item() for its step size",
}
"""Optimizers of torch whose step waits for the device, and for what."""
ON_THE_DEVICE = ("capturable",)
"""Options that the CPU refuses; they change where the step count lives and no number."""


def options(info: OptimizerInfo, every: int) -> Iterator[dict[str, Any]]:
    """torch's sets of options, those for accelerators too; the last one also in a loop over parameters and fused.

    With `every` 2, every second of torch's.
    """
    sets = [dict(given.kwargs) for given in info.optim_inputs_func(device="cuda")]
    for kwargs in sets:
        kwargs.pop("foreach", None), kwargs.pop("fused", None)
    yield from sets[::-every]
    last = [kwargs for kwargs in sets if "capturable" not in kwargs][-1]
    if "foreach" in info.supported_impls:
        yield {**last, "foreach": False}
    if "fused" in info.supported_impls:
        yield {**last, "fused": True}


def training(info: OptimizerInfo, kwargs: dict[str, Any], where: str) -> Training:
    return Training(info, {n: x for n, x in kwargs.items() if where != "cpu" or n not in ON_THE_DEVICE}, where)


def same(ours: Training, theirs: Training, what: Any) -> None:
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's SparseAdam, once a process
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PLAIN + SPARSE)
def test_trains_as_on_the_cpu(device: torch.device, name: str, every: int) -> None:
    """Sets of options side by side, so that a step of all is one executable; by default every second of torch's."""
    info = OPTIMIZERS[name]
    rows = list(options(info, every))
    ours = [training(info, kwargs, "jax") for kwargs in rows]
    theirs = [training(info, kwargs, "cpu") for kwargs in rows]
    for step in range(STEPS):
        with step_marker.paused(), counted() as counts:
            for each in (*ours, *theirs):
                each.step()
            engine.sync()
        assert (counts.executions == 1 and counts.host_syncs == 0) or name in WAITS, step
    assert counts.compilations == 0 or name in WAITS
    for kwargs, mine, other in zip(rows, ours, theirs, strict=True):
        same(mine, other, kwargs)

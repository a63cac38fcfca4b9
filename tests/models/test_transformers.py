"""Models of transformers, each trained on the lazy device against torch on the CPU: same losses, one program a step."""

from __future__ import annotations

import pytest
import zoo
from contractions import contractions_of
from zoo_training import STEPS, Run, difference, train

import xla_amp
from xla_amp.lazy.programs import execute

TOLERANCE = {False: 1e-5, True: 2e-2}
"""Relative difference of a loss: float32, bfloat16 autocast (torch.autocast's own CPU rules differ in a few places)."""


FIRST = ("ResNet", "GPT-2")
"""Of the default run: convolutions and attention."""


@pytest.mark.parametrize(
    "low", [pytest.param(False, id="float32"), pytest.param(True, id="bfloat16", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[] if row.name in FIRST else pytest.mark.full) for row in zoo.ROWS]
)
def test_trains_as_on_the_cpu(row: zoo.Row, low: bool) -> None:
    wanted = train(row, "cpu", low)
    got = train(row, xla_amp.xla_device(), low)
    assert difference(got, wanted) <= TOLERANCE[low], (got.losses, wanted.losses)
    assert (got.executables, got.host_syncs, got.fallbacks) == (1, 0, 0)
    assert len(got.losses) == STEPS
    assert got.losses[-1] < 0.99 * got.losses[0]


def test_every_product_of_a_bfloat16_step_has_bfloat16_operands() -> None:
    """Those of gradients, too."""
    (row,) = [row for row in zoo.ROWS if row.name == "GPT-2"]
    execute.clear_programs()
    train(row, xla_amp.xla_device(), True)
    products = [contractions_of(program.lower()) for program in execute.programs()]
    assert set().union(*products) == {("bf16", "bf16")}
    assert max(found.total() for found in products) > 20


def test_the_tolerances_can_fail() -> None:
    """float32 rows would see bfloat16 arithmetic, bfloat16 rows an optimizer step that did nothing."""
    (row,) = [row for row in zoo.ROWS if row.name == "ResNet"]
    exact, low = train(row, "cpu", False), train(row, "cpu", True)
    assert difference(low, exact) > TOLERANCE[False]
    late = Run(losses=[low.losses[0], *low.losses[:-1]])
    assert difference(late, low) > TOLERANCE[True]

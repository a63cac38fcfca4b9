"""What `explain` reports for PyTorch's own autocast kernels, against what these do to their operands."""

from __future__ import annotations

import pytest
import samples
import torch

import xla_amp
from xla_amp import policy
from xla_amp.policy import load
from xla_amp.tools.explain.on_pytorch import ExplainReport

LOW, FULL = torch.bfloat16, torch.float32
REGISTERED = sorted(filter(samples.here, load("cpu").operations()))

NEWER = {"linalg_matrix_sqrth"}
"""Registered by torch 2.15; the tables are torch 2.13's."""


def done_and_told(report: ExplainReport, operation: str, dtypes: list[torch.dtype]) -> tuple[list[str], list[str]]:
    """Conversions that the dispatcher made before the operation, and those that the report lists for it."""
    given = samples.arguments(operation, samples.Maker("cpu", dtypes))
    report.records.clear()
    with torch.autocast("cpu", cache_enabled=False), samples.Watch() as watch:
        samples.call(operation, given)
    done = [f"{a}->{b}".replace("torch.", "") for a, b in watch.found]
    (told,) = [row for row in report.rows() if row["operation"] == operation]
    return done, told["casts"].split(", ") if told["casts"] else []


def given_to(operation: str) -> list[list[torch.dtype]]:
    """dtypes of operands with which the operation can run on the CPU after its cast."""
    cast = policy.resolve("cpu").decide(operation).cast
    return {"fp32": [[LOW], [FULL], [LOW, FULL]], "low": [[FULL], [LOW], [FULL, LOW]]}.get(cast, [[FULL], [LOW, FULL]])


@pytest.mark.filterwarnings("ignore")  # deprecated operations are registered too
def test_reports_equal_what_the_dispatcher_does_for_every_registered_operation():
    by_torch = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    unnamed = {name.removeprefix("aten::") for name in by_torch if "dimname" not in name.lower()}
    assert unnamed - NEWER == set(REGISTERED)
    wrong = {}
    with xla_amp.explain() as report:
        for operation in REGISTERED:
            for dtypes in given_to(operation):
                done, told = done_and_told(report, operation, dtypes)
                if done != told:
                    wrong[operation, str(dtypes)] = done, told
    assert wrong == {}

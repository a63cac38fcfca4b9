"""Every entry of torch's operator database agrees with the CPU, or is a row of the limitations table.

``XLA_AMP_TEST_ALL=1`` runs all samples of each entry; otherwise those three run that have most forms of arguments.  The
default run has two, and one where the second would add fewer than four forms.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import NAMED
from limitations import limitations
from op_entries import ENTRIES, Close, Outcome, anything, evaluate, near, outcomes, same_moments, samples
from source_tree import ROOT
from torch.testing._internal.opinfo.core import SampleInput

from xla_amp.lazy.graph.tape import nodes
from xla_amp.lazy.graph.trace import trace
from xla_amp.lowering import table

LOWERING = Path(__file__).parents[2] / "lowering"
ALL = bool(os.environ.get("XLA_AMP_TEST_ALL"))
SAMPLES = None if ALL else 3
TOGETHER = 1 if ALL else 16
"""Entries to one program."""
NAMES = sorted(ENTRIES)
COMPARISON = {"random": lambda row: same_moments, "unset": lambda row: anything}


STATISTICS = "where all is bfloat16 the CPU keeps the statistics of the batch in it, a device in float32"
BRANCH = "the imaginary part is defined up to a multiple of 2 pi"
FLOATS_ONLY = "the device has this for floating-point dtypes only"
TIES = "the order of equal elements, which a dtype with few numbers has, is not defined"
COORDINATES = "the CPU computes coordinates in bfloat16"
DIFFERENCES: dict[tuple[str, torch.dtype], str] = {
    ("_batch_norm_with_update", torch.bfloat16): STATISTICS,
    ("_native_batch_norm_legit", torch.bfloat16): STATISTICS,
    ("argsort", torch.bfloat16): TIES,
    ("grid_sampler_2d", torch.bfloat16): COORDINATES,
    ("grid_sampler_3d", torch.bfloat16): COORDINATES,
    ("histc", torch.bfloat16): "the CPU finds the bins in bfloat16",
    ("kthvalue", torch.int64): TIES,
    ("logaddexp", torch.complex64): BRANCH,
    ("logcumsumexp", torch.complex64): BRANCH,
    ("matrix_exp", torch.bfloat16): "the CPU gives NaN",
    ("mode", torch.bfloat16): TIES,
    ("mode", torch.int64): TIES,
    ("msort", torch.bfloat16): TIES,
    ("native_batch_norm", torch.bfloat16): STATISTICS,
    ("native_layer_norm", torch.bfloat16): STATISTICS,
    ("nn.functional.batch_norm.without_cudnn", torch.complex64): FLOATS_ONLY,
    ("nn.functional.batch_norm.without_cudnn", torch.int64): FLOATS_ONLY,
    **{(f"nn.functional.conv_transpose{rank}d", torch.int64): FLOATS_ONLY for rank in (1, 2, 3)},
    ("nn.functional.grid_sample", torch.bfloat16): COORDINATES,
    ("normal.in_place", torch.complex64): "the CPU adds the mean to the imaginary part, too",
    ("pca_lowrank", torch.complex64): "its gradient divides by differences of singular values",
    ("sort", torch.bfloat16): TIES,
    ("special.zeta", torch.int64): "of two zeros the CPU gives NaN, the device infinity",
    ("topk", torch.bfloat16): TIES,
    ("topk", torch.int64): TIES,
    ("uniform", torch.complex64): FLOATS_ONLY,
}
"""(entry, dtype) -> why it differs from the CPU in this dtype."""


def closeness(name: str, sample: SampleInput) -> Close:
    """By the row, or as of all entries where there is none or it is not for this sample."""
    row = limitations().get(name)
    if row is None or (row.where and not sample.kwargs.get(row.where)):
        return near(1)
    return COMPARISON.get(row.kind, lambda row: near(row.tolerance))(row)


def problem(name: str, outcome: Outcome, dtype: torch.dtype, few: bool) -> str:
    """What is wrong with an outcome, or the empty string; of few samples, perhaps none is the one that raises."""
    row = limitations().get(name)
    if row is None or row.kind != "raises" or not outcome.ran:
        return "".join(map(str, outcome.failed)) if outcome.ran or dtype is not torch.float32 else "no sample ran"
    if not any(failure.stage == "raises" for failure in outcome.failed):
        return "" if few else "it works now: delete its row"
    others = [failure for failure in outcome.failed if failure.stage != "raises" or row.error not in failure.message]
    return "".join(map(str, others))


@pytest.mark.parametrize(
    "names",
    [NAMES[i : i + TOGETHER] for i in range(0, len(NAMES), TOGETHER)],
    ids=lambda names: f"{names[0]}-{names[-1]}",
)
@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.float32, 2),
        pytest.param(torch.float32, SAMPLES, marks=pytest.mark.full),
        *((dtype, SAMPLES) for dtype in (torch.bfloat16, torch.int64, torch.complex64, torch.float64)),
    ],
    ids=str,
)
def test_entries(names, dtype, count, device):
    entries = {name: ENTRIES[name] for name in names if (name, dtype) not in DIFFERENCES}
    few = count == 2
    found = outcomes(entries, device, count, closeness, dtype, least=4 if few else 0)
    problems = {name: said for name, outcome in found.items() if (said := problem(name, outcome, dtype, few))}
    assert not problems, "\n".join(f"{name}: {said}" for name, said in problems.items())


ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        (
            "_thnn_fused_gru_cell",
            "_thnn_fused_gru_cell_backward",
            "_thnn_fused_lstm_cell",
            "_thnn_fused_lstm_cell_backward_impl",
        ),
        "tests/lazy/torch_integration/test_device_generic.py",
    ),
    **dict.fromkeys(
        ("_sample_dirichlet", "binomial", "poisson", "randperm", "randperm.generator"),
        "tests/lazy/torch_integration/test_generator.py",
    ),
    "_amp_update_scale_": "tests/test_loss_scaling.py",
    **dict.fromkeys(("linalg_eig", "_linalg_eigvals"), "entries whose samples are read while they are recorded"),
    **dict.fromkeys(("convolution_overrideable", "convolution_backward_overrideable"), "autograd's names"),
}
"""Operation -> what tests it, of those that have neither an entry nor a row."""


def rows_of_lowerings() -> set[str]:
    """Operations that a table or a line of tests/lowering names."""
    for path in LOWERING.rglob("test_*.py"):
        spec = importlib.util.spec_from_file_location(f"rows_of_{path.stem}", path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))  # fills harness.NAMED
    text = "".join(path.read_text("utf-8") for path in LOWERING.rglob("test_*.py"))
    return {name for name in table() if name in NAMED or name.startswith("_foreach_") or f'"{name}' in text}


@pytest.mark.full
def test_every_operation_has_a_row(device):
    """In the trace of an entry's samples, in a table of tests/lowering, or elsewhere."""
    recorded: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in ENTRIES.values():
            for _, sample in samples(entry, SAMPLES):
                with contextlib.suppress(Exception):  # entries that raise
                    evaluate(entry, sample, device)
                recorded |= {node.instruction.name for node in nodes(trace.code)}
                trace.clear()
    ours = {name for name in table() if "::" not in name}
    assert len(recorded & ours) > 350
    assert ours - recorded - rows_of_lowerings() == set(ELSEWHERE)


def test_every_row_names_an_entry():
    assert not set(limitations()) - set(ENTRIES)


def test_95_percent_of_the_entries_that_the_cpu_runs_have_no_row_that_raises():
    elsewhere = ("CPU has none either", "CPU raises too")
    raising = [row for row in limitations().values() if row.kind == "raises"]
    missing = [row for row in raising if not row.reason.endswith(elsewhere)]
    assert len(missing) <= 0.05 * (len(ENTRIES) - (len(raising) - len(missing)))


class Twin:
    """An entry whose function is wrong on the lazy device only."""

    def __init__(self, wrong):
        self.entry, self.wrong = ENTRIES["sin"], wrong

    def __getattr__(self, name):
        return getattr(self.entry, name)

    def __call__(self, x):
        return self.entry(x) if x.device.type == "cpu" else self.wrong(x)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x.sin() + 1e-4, r"outputs\[0\].*not close"),
        (lambda x: x.sin().to(torch.bfloat16), "bfloat16.*expected torch.float32"),
        (lambda x: x.bfloat16().sin().float(), "not close"),
        (lambda x: x.detach().sin() + (x - x.detach()) * x.detach().cos() * 1.001, r"gradients\[0\].*not close"),
        (lambda x: x.sin()[None], "expected torch.float32"),
    ],
    ids=["value", "dtype", "precision", "gradient", "shape"],
)
def test_what_is_wrong_is_found(wrong, said, device):
    failed = outcomes({"sin": Twin(wrong)}, device, 1, closeness)["sin"].failed
    assert [failure.stage for failure in failed] == ["differs"]
    assert re.search(said, failed[0].message)


# ---- the limitations table: its rows, and the page that is written from it -------------------------------------------


def test_every_row_is_whole_and_in_order():
    rows = list(limitations().values())
    table = (ROOT / "tests" / "helpers" / "limitations.toml").read_text("utf-8")
    assert 0 < len(rows) == table.count("[[limitation]]")  # no operation has two
    assert rows == sorted(rows, key=lambda row: row.operation)
    for row in rows:
        assert row.kind in ("raises", "random", "tolerance", "ties", "unchecked", "unset"), row
        assert len(row.reason) > 10, row
        assert bool(row.error) == (row.kind == "raises"), row
        assert (row.tolerance != 1) == (row.kind == "tolerance"), row
        assert not row.where or row.kind == "random", row


def test_the_support_page_is_up_to_date():
    done = subprocess.run([sys.executable, "scripts/result_tables.py", "operations", "--check"], cwd=ROOT)
    assert done.returncode == 0
    page = (ROOT / "docs" / "lists" / "operations.md").read_text("utf-8")
    assert all(f"| `{row.operation}` |" in page for row in limitations().values())


def stable(x):
    return np.argsort(x.numpy(), axis=1, kind="stable")


def stable_descending(x):
    return np.argsort(-x.numpy(), axis=1, kind="stable")


def last_of_the_most_frequent(x):
    counts = [np.bincount(row.astype(int)) for row in x.numpy()]
    return [[np.flatnonzero(row == count.argmax())[-1]] for row, count in zip(x.numpy(), counts, strict=True)]


POSITIONS = {
    "argsort": [(lambda x: x.argsort(1), stable)],
    "kthvalue": [(lambda x: x.kthvalue(9, 1, True)[1], lambda x: stable(x)[:, 8:9])],
    "mode": [(lambda x: x.mode(1, True)[1], last_of_the_most_frequent)],
    "sort": [
        (lambda x: x.sort(1)[1], stable),
        (lambda x: x.sort(1, descending=True)[1], stable_descending),
    ],
    "topk": [
        (lambda x: x.topk(5)[1], lambda x: stable_descending(x)[:, :5]),
        (lambda x: x.topk(5, largest=False)[1], lambda x: stable(x)[:, :5]),
    ],
}
"""Operation -> its positions, and those that its row promises."""


def test_rows_of_ties():
    assert {name for name, row in limitations().items() if row.kind == "ties"} == set(POSITIONS)


@pytest.mark.parametrize("name", POSITIONS)
def test_of_equal_elements_the_row_says_which(name, device):
    x = torch.randint(5, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    for call, promised in POSITIONS[name]:
        assert call(x.to(device)).tolist() == np.asarray(promised(x)).tolist()
        assert torch.equal(x.gather(1, call(x.to(device)).cpu()), x.gather(1, call(x)))  # the CPU's values

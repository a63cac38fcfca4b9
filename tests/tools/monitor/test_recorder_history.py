"""Records of steps: shares from sums, the file, advice, the folder of a bad step."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from xla_amp.errors import FileError
from xla_amp.tools.monitor import bad_step, history
from xla_amp.tools.monitor.advice import THRESHOLDS, advice, is_probe
from xla_amp.tools.monitor.history import History, Statistics, StepRecord, Sums, ValueKey

HIDDEN = ValueKey("h.7.attn", "activation")
ROW = Statistics(amax=2.0, rms=1.0, underflow=0.25, inf=0.0, nan=0.0, headroom=15.0)


def test_shares_of_sums():
    row = Statistics.of(Sums(4.0, 90.0, 3.0, 6.0, 1.0, 1.0, 12.0), "float16", scale=2.0)
    assert (row.amax, row.rms, row.underflow, row.inf, row.nan) == (4.0, 3.0, 0.5, 1 / 12, 1 / 12)
    assert row.headroom == pytest.approx(math.log2(65504 / 8))
    assert not row.finite
    weights = Sums(1.0, 40.0, 0.0, 10.0, 0.0, 0.0, 10.0)
    assert Statistics.of(Sums(1.0, 0.4, 0, 10, 0, 0, 10), "bfloat16", weights=weights).update_ratio == pytest.approx(
        0.1
    )


def test_a_tensor_of_zeros_or_of_nans():
    zeros = Statistics.of(Sums(0, 0, 0, 0, 0, 0, 8), "float16")
    assert (zeros.rms, zeros.underflow, zeros.headroom) == (0, 0, math.inf)
    assert Statistics.of(Sums(0, 0, 0, 8, 0, 8, 8), "float16").nan == 1


def test_a_file_gives_back_what_was_written(tmp_path):
    bad = dataclasses.replace(ROW, headroom=math.inf, update_ratio=0.5)
    steps = [
        StepRecord(
            step=0, loss=math.inf, loss_scale=65536.0, skipped=True, gradient_norm=1 / 3, statistics={HIDDEN: bad}
        ),
        StepRecord(step=1),
    ]
    path = tmp_path / "history.jsonl"
    history.write(path, History(low="float16", steps=steps))
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN or Infinity, which JSON lacks
    with open(path, "a") as file:
        file.write('{"step": 2')  # a program that was killed
    found = history.read(path)
    assert found == History(low="float16", steps=steps)
    assert found.layers() == [HIDDEN]
    assert found.of(HIDDEN) == [(0, bad)]


@pytest.mark.parametrize("text", ["", "[]\n", "nonsense\n", '{"format": "other"}\n'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    with pytest.raises(FileError, match=r"history\.jsonl"):
        history.read(path)


def test_a_line_that_is_no_step_is_named(tmp_path):
    path = tmp_path / "history.jsonl"
    history.write(path, History(low="float16", steps=[]))
    with open(path, "a") as file:
        file.write('{"step": 1, "statistics": [["a", "weight", 1.0]]}\n')
    with pytest.raises(FileError, match=r"history\.jsonl:2: no record of a step"):
        history.read(path)


def test_each_kind_of_advice():
    low = dataclasses.replace(ROW, headroom=0.4, underflow=0.0)
    update = dataclasses.replace(ROW, update_ratio=0.3)
    steps = [
        StepRecord(
            step=31000 + index,
            loss=1.0 if index < 6 else math.nan,
            loss_scale=2.0 ** (4 - index),
            skipped=index > 0,
            statistics={
                HIDDEN: low if index else ROW,
                ValueKey("wte", "gradient"): dataclasses.replace(ROW, underflow=0.37),
                ValueKey("wte", "update"): update,
                ValueKey("lm_head", "weight"): dataclasses.replace(ROW, nan=0.5 if index == 2 else 0.0),
                ValueKey("ln", "update"): dataclasses.replace(ROW, update_ratio=1e-9),
            },
        )
        for index in range(7)
    ]
    found = advice(History(low="float16", steps=steps))
    assert [each.text for each in found] == [
        "the loss is not finite since step 31,006",
        "the weights of lm_head are not finite in step 31,002 (50.00% of the values)",
        "the loss scale is 0.25 in step 31,006: the loss overflows float16 by itself",
        "the loss scale has halved 6 times in 7 steps",
        "layer h.7.attn has 0.4 exponents of headroom in float16 since step 31,001",
        "37% of the gradients of wte underflow in float16 since step 31,000",
        "updates of wte are 30% of its weights since step 31,000",
        "updates of ln are rounded away by its weights since step 31,000",
    ]
    assert {each.rule for each in found} | {"window"} == {*THRESHOLDS, "loss", "nonfinite"}
    assert all(row.why for row in THRESHOLDS.values())


def test_a_good_run_gets_no_advice():
    good = dataclasses.replace(ROW, underflow=0.0)
    probe = [StepRecord(step=step, loss=1.0, loss_scale=2.0 ** (20 - step), skipped=True) for step in range(8)]
    assert advice(History(low="float16", steps=[*probe, StepRecord(step=8, loss=1.0, statistics={HIDDEN: good})])) == []


def test_a_skip_after_growth_is_a_probe():
    good, grown = StepRecord(step=1, loss_scale=2.0), StepRecord(step=2, loss_scale=4.0, skipped=True)
    assert is_probe(good, grown)
    assert is_probe(None, grown)  # the run looks for its first scale
    assert not is_probe(good, dataclasses.replace(grown, loss_scale=2.0))
    assert not is_probe(good, dataclasses.replace(grown, skipped=False))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"loss": None}, ""),
        ({"loss": math.nan}, "loss"),
        ({"loss": math.inf, "loss_scale": 4.0, "skipped": True}, "loss"),  # a larger scale does not change the loss
        ({"skipped": True}, "skip"),
        ({"loss_scale": 4.0, "skipped": True}, ""),
        ({"gradient_norm": math.inf}, ""),  # the scaler decides
        ({"gradient_norm": math.inf, "loss_scale": None}, "gradient"),
    ],
)
def test_why_a_step_is_bad(changes, reason):
    good = StepRecord(step=1, loss=1.0, loss_scale=2.0, gradient_norm=1.0)
    assert bad_step.reason(good, dataclasses.replace(good, step=2, **changes)) == reason


def bad(rank: int, local: bool) -> bad_step.BadStep:
    return bad_step.BadStep(
        front="pytorch",
        step=1500,
        rank=rank,
        world_size=2,
        reason="skip",
        local=local,
        loss=math.inf,
        loss_scale=1024.0,
        gradient_norm=math.nan,
        low="float16",
        versions={"torch": "2.13"},
        options={"layers": "*"},
        state="none",
    )


def test_the_folder_of_a_bad_step(tmp_path):
    records = History(low="float16", steps=[StepRecord(step=1500)])
    for rank in (1, 0):
        path = bad_step.folder(tmp_path, 1500, rank)
        path.mkdir(parents=True)
        with pytest.raises(FileError):
            bad_step.read(path)
        bad_step.write(path, bad(rank=rank, local=rank == 1), records)
        assert history.read(path / bad_step.HISTORY) == records
    places = bad_step.ranks(tmp_path)
    assert places == bad_step.ranks(tmp_path / "bad_step_0001500")
    found = [bad_step.read(place) for place in places]
    assert [each.rank for each in found] == [0, 1]
    assert found[0].loss == math.inf
    assert math.isnan(found[0].gradient_norm)
    assert bad_step.first_rank(found).rank == 1
    with pytest.raises(FileError, match="no bad step here"):
        bad_step.ranks(tmp_path / "elsewhere")

"""Why a line compiled again, who made the host wait, and the log line of a long compilation."""

from __future__ import annotations

import _thread
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import xla_amp
from xla_amp.errors import RecompileWarning
from xla_amp.lazy.programs import executables, execute, recompile_reasons

HERE = __file__


@pytest.fixture(autouse=True)
def _no_lines() -> Iterator[None]:
    recompile_reasons.reset()
    execute.clear_programs()
    yield
    recompile_reasons.reset()


def warnings_of(program: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecompileWarning)
        program()
    return [each for each in caught if each.category is RecompileWarning]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == recompile_reasons.__name__]


def line_of(function: Callable[..., object], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def by_shape(device: torch.device, times: int = 10) -> None:
    for length in range(1, times + 1):
        (torch.ones(length, 2).to(device) * 3).relu().cpu()


def test_one_warning_names_the_line_the_count_and_the_difference(device: torch.device) -> None:
    (warning,) = warnings_of(lambda: by_shape(device))
    text = str(warning.message)
    assert (warning.filename, warning.lineno) == (HERE, by_shape.__code__.co_firstlineno + 2)
    assert f"{line_of(by_shape, 2)} has compiled {recompile_reasons.PATIENCE} programs" in text
    assert "operation 0 is input float32[6,2], input float32[5,2] before, read by mul.Tensor at" in text
    assert "xla_amp.pad_to_bucket" in text
    assert "for a sequence that grows see docs/pytorch.md#sequences-that-grow" in text


def test_a_program_is_compared_with_those_of_its_step(device: torch.device) -> None:
    """A helper that trains several models: four of two programs each are none too many, and no other one is named."""

    def train(width: int, batches: tuple[int, ...]) -> None:
        model = torch.nn.Linear(3, width).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for rows in batches:
            optimizer.zero_grad()
            model(torch.ones(rows, 3).to(device)).sum().backward()
            optimizer.step()
            xla_amp.sync()

    assert not warnings_of(lambda: [train(width, (2, 2, 1)) for width in (4, 5, 6, 7)])
    (warning,) = warnings_of(lambda: train(8, (1, 2, 3, 4, 5, 6, 7)))
    assert "compiled 6 programs" in str(warning.message)
    assert "float32[8,3]" not in str(warning.message)
    assert "input float32[6,3], input float32[5,3] before" in str(warning.message)


DIFFERENCES: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], str]] = {
    "dtype": (
        lambda x, i: x.to((torch.float32, torch.bfloat16)[i]) * 2,
        r"operation 1 is _to_copy\(float32\[3,37\]\) -> bfloat16\[3,37\], mul.Tensor\(float32\[3,37\], .* before",
    ),
    "Python argument": (
        lambda x, i: x.tril(i),
        r"tril\(float32.*, 1 integers as data\) .*, tril\(.*, diagonal=0\) .* at .*test_recompile_reasons.py:\d+",
    ),
    "Python bool": (
        lambda x, i: x.sum(0, keepdim=bool(i)),
        r"operation 1 is sum.dim_IntList\(.*keepdim=True.* -> .*, sum.dim_IntList\(.*keepdim=False.* -> .* before",
    ),
    "operation": (
        lambda x, i: (x.sin, x.cos)[i](),
        r"operation 1 is cos\(float32\[3,37\]\) -> .*, sin\(.*\) -> .* before at .*test_recompile_reasons.py:\d+",
    ),
    "number of operations": (
        lambda x, i: x.exp() if i else x.exp().neg(),
        r"neg\(float32\[3,37\]\) -> .* at the end is missing \(2 operations, 3 before\)",
    ),
    "other values": (
        lambda x, i: torch.sub(*(x.sin(), x.cos())[:: 1 - 2 * i]),
        r"sub.Tensor\(float32\[3,37\], float32\[3,37\].*\) -> float32\[3,37\] of other values than before at ",
    ),
    "other values of many": (
        lambda x, i: torch.cat([*[x] * 8, *(x.sin(), x.cos())[:: 1 - 2 * i]]),
        r" cat\((float32\[3,37\], ){6}4 more, dim=0\) -> float32\[30,37\] of other values than before at ",
    ),
    "other shapes of many": (
        lambda x, i: torch.cat([*[x] * 8, *(x.sin(), x[:2].cos())[:: 1 - 2 * i]]),
        r" cat\((float32\[3,37\], ){6}4 more, dim=0\) -> float32\[29,37\] of other dtypes or shapes than before at ",
    ),
    "shape": (lambda x, i: x.new_ones(3 + i), r"-> float32\[4\], .* -> float32\[3\] before"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_kind_of_difference(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XLA_AMP_DEBUG", "recompile")
    function, expected = DIFFERENCES[name]
    x = torch.rand(3, 37).to(device)  # a shape of no other test: instructions keep the line that made them first
    for index in range(2):
        y = function(x, index)
        xla_amp.sync()
        del y
    (text,) = logged(caplog)
    assert "compiled program 2: " in text
    assert re.search(expected, text), text


def train(device: torch.device, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), xla_amp.GradScaler(enabled=dtype is torch.float16)
    for _ in range(2):
        for size in (8, 8, 8, 5):
            x, y = torch.rand(size, 4).to(device), torch.zeros(size, dtype=torch.long).to(device)
            optimizer.zero_grad()
            with xla_amp.autocast(device, dtype=dtype):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            for size in (8, 8, 3):
                model(torch.rand(size, 4).to(device)).argmax(-1).cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ordinary_training_does_not_warn(dtype: torch.dtype, device: torch.device) -> None:
    assert warnings_of(lambda: train(device, dtype)) == []


def read(x: torch.Tensor) -> None:
    x.sum().item()
    if x.sum() > 1:
        pass
    print(x)
    x.cpu()
    f"{x.sum()}"
    x.requires_grad_().median().backward()  # torch's gradient reads whether the median is NaN


def test_each_host_sync_is_logged_with_its_line(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XLA_AMP_DEBUG", "sync")
    read(torch.rand(3).to(device))
    xla_amp.sync(wait=True)
    expected = ((1, "x.sum().item()"), (2, "if x.sum() > 1:"), (4, "print(x)"), (5, "x.cpu()"), (6, 'f"{x.sum()}"'))
    *texts, backward, last = list(dict.fromkeys(logged(caplog)))
    assert texts == [f"Python waits for the device: {line_of(read, at)}: {what}" for at, what in expected]
    assert backward == "Python waits for the device: a backward pass (MedianBackward0)"
    assert last.endswith(": xla_amp.sync(wait=True)")
    assert recompile_reasons.with_source(name := "a backward pass (torch::autograd::CopySlices)") == name


def test_the_report_sums_up_by_line(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    by_shape(device, 3)
    assert logged(caplog) == []  # unless asked
    report = xla_amp.metrics.report()
    assert f"       3  {line_of(by_shape, 2)}: operation 0 is input float32[3,2]" in report
    assert f"       3  {line_of(by_shape, 2)}: (torch.ones" in report
    xla_amp.metrics.reset()
    assert "by line" not in xla_amp.metrics.report()


def test_captured_steps_say_why_they_are_recorded_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XLA_AMP_DEBUG", "recompile")
    scale = 2.0
    step = xla_amp.compile(lambda x, power: (x * scale) ** power)
    for length, power, factor in ((2, 2, 2.0), (3, 2, 2.0), (3, 3, 2.0), (3, 3, 4.0)):
        scale = factor
        for _ in range(3):
            step(torch.ones(length).to(device), power)
    texts = [text for text in logged(caplog) if "captured step" in text]
    assert len(texts) == 3
    assert re.search(r"argument 0 changed from .*\(2,\).* to .*\(3,\)", texts[0])
    assert "argument 1 changed from 2 to 3" in texts[1]
    assert "scale changed from 2.0 to 4.0" in texts[2]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "QUIET", 0.05)


def compile_for(seconds: float, *, stores: bool = True) -> None:
    with executables.compiling(3117, "train.py:212", stores=stores):
        time.sleep(seconds)


def test_a_program_compiles_where_python_starts_no_thread(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of the interpreter in Python 3.12, where an exit handler may read a value."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    x = torch.arange(3.0).to(device)
    execute.clear_programs()
    for module, name in ((threading.Thread, "start"), (_thread, "start_new_thread")):
        monkeypatch.setattr(module, name, refuse)
    assert (x.cosh() + 0.25).tolist() == pytest.approx([1.25, 1.7930806, 4.0121958])


@pytest.mark.full
@pytest.mark.usefixtures("soon")
def test_a_long_compilation_says_what_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    compile_for(0.5)
    first, last = caplog.records
    assert first.getMessage() == "compiling 3,117 operations, from train.py:212; kept for the next run"
    assert last.getMessage().startswith("compiled 3,117 operations in 0.")
    assert first.name.startswith("xla_amp.")
    caplog.clear()
    with executables.compiling(3117, "train.py:212", stores=False, why=lambda: "mm is new"):
        time.sleep(0.5)
    assert caplog.messages[0] == "compiling 3,117 operations, from train.py:212; again: mm is new"


@pytest.mark.usefixtures("soon")
def test_short_and_silenced_ones_say_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for(0.0)
    with caplog.at_level(logging.ERROR, logger="xla_amp"):
        compile_for(0.3)
    monkeypatch.setenv("XLA_AMP_PROGRESS", "off")
    compile_for(0.3)
    assert caplog.records == []

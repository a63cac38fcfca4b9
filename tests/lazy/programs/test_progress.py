"""The log line of a long compilation."""

from __future__ import annotations

import contextlib
import io
import logging
import time

import pytest

from xla_amp.lazy.programs import executables

tqdm = pytest.importorskip("tqdm")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "QUIET", 0.05)


def compile_for(seconds: float, *, stores: bool = True) -> None:
    with executables.compiling(3117, "train.py:212", stores=stores):
        time.sleep(seconds)


@pytest.mark.full
@pytest.mark.usefixtures("soon")
def test_a_long_compilation_says_what_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    compile_for(0.5)
    first, last = caplog.records
    assert first.getMessage() == "compiling 3,117 operations, from train.py:212; kept for the next run"
    assert last.getMessage().startswith("compiled 3,117 operations in 0.")
    assert first.name.startswith("xla_amp.")
    caplog.clear()
    compile_for(0.5, stores=False)
    assert caplog.messages[0] == "compiling 3,117 operations, from train.py:212"


def test_a_short_one_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    compile_for(0.0)
    assert caplog.records == []


@pytest.mark.usefixtures("soon")
def test_it_can_be_silenced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.ERROR, logger="xla_amp"):
        compile_for(0.3)
    monkeypatch.setenv("XLA_AMP_PROGRESS", "off")
    compile_for(0.3)
    assert caplog.records == []


@pytest.mark.usefixtures("soon")
def test_it_is_not_in_the_line_of_a_progress_bar() -> None:
    stderr = io.StringIO()
    handler = logging.StreamHandler(stderr)
    log = logging.getLogger("xla_amp")
    log.addHandler(handler)
    try:
        with contextlib.redirect_stderr(stderr), tqdm.tqdm(total=10, desc="steps", file=stderr) as bar:
            bar.update(3)
            compile_for(0.5)
    finally:
        log.removeHandler(handler)
    lines = [line.rpartition("\r")[2] for line in stderr.getvalue().split("\n")]
    assert "compiling 3,117 operations, from train.py:212; kept for the next run" in lines

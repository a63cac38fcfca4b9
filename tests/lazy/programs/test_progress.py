"""The log line of a long compilation."""

from __future__ import annotations

import logging
import time

import pytest

from xla_amp.lazy.programs import executables


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

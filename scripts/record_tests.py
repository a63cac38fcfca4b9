"""Plugin of pytest: writes each test's outcome to a file as it ends, and leaves out what the file has already.

    PYTHONPATH=scripts pytest -p record_tests --record FILE tests/jax_front

A line is a JSON array: outcome, test, and of a failure the first line of its error.  So a run that is cut off loses
nothing, and the next one goes on.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, required=True)


def outcomes(path: Path) -> Iterator[tuple[str, str, str]]:
    """The lines of a record; a last one that was cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            outcome, test, cause = json.loads(line)
            yield outcome, test, cause


def causes(path: Path) -> dict[str, list[str]]:
    """Cause -> tests that failed of it, most frequent first; numbers and addresses in a cause do not tell it apart."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for outcome, test, cause in outcomes(path):
        if outcome == "failed":
            found[re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?", "N", cause)].append(test)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ended = {test for _, test, _ in outcomes(config.getoption("--record"))}
    left = [item for item in items if item.nodeid not in ended]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ended])
    items[:] = left


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
            cause = getattr(crash, "message", str(report.longrepr or "")) if report.failed else ""
            line = [report.outcome, report.nodeid, (cause.strip().splitlines() or [""])[0][:160]]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of pytest-xdist: its main process hears of every test
        config.pluginmanager.register(_Recorder(config.getoption("--record")))

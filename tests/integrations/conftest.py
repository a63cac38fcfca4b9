"""Fixtures: what a test found about a framework, for the table of docs/frameworks.md; Hugging Face's patches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest
import result_tables


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Checks the page: executions and host syncs of a framework's steps, without them that a run resumed bitwise."""

    def note(framework: str, precision: str, counts: tuple[int, ...] | None = None, steps: int = 1) -> None:
        facts = {"save and resume": "bitwise"}
        if counts is not None:
            facts = {"executables a step": f"{counts[0] / steps:g}", "waits a step": f"{counts[1] / steps:g}"}
        names = {"framework": framework, "precision": precision}
        record_property(result_tables.PROPERTY, json.dumps({**names, **facts}))
        row = result_tables.framework_rows(result_tables.FRAMEWORKS.read_text("utf-8")).get((framework, precision), {})
        assert {name: row.get(name) for name in facts} == facts, "run scripts/result_tables.py frameworks"

    return note


@pytest.fixture(scope="module")
def huggingface_enabled() -> Iterator[None]:
    """Inside the module `xla_amp.integrations.huggingface` is enabled; afterwards its patches are gone."""
    from xla_amp.integrations import huggingface as ours

    ours.enable()
    yield
    for patch, original in ours._installed.items():
        owner = sys.modules[patch.module]
        setattr(getattr(owner, patch.owner) if patch.owner else owner, patch.name, original)
    ours._installed.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ours._Finder)]

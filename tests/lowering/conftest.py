"""The checks of a test are compared at its end, computed in one program.

The tests are of edges: ordinary calls, in five dtypes and with gradients, are those of torch's operator database
(tests/lazy/op_db).
"""

from __future__ import annotations

from collections.abc import Generator

import harness
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Compares after the test's own lines; what a failed test has left is forgotten."""
    try:
        result = yield
        harness.finish()
    finally:
        harness.forget()
    return result

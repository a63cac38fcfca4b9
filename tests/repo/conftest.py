"""Trees of all sources are kept for the tests of this folder, and no longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import source_tree


@pytest.fixture(scope="package", autouse=True)
def _trees_go_with_the_last_test() -> Iterator[None]:
    yield
    source_tree.nodes.cache_clear()

"""The public names: type checkers see those that load at run time, from the same modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from xla_amp import stablehlo


def test_type_checkers_see_the_names_that_load():
    tree = ast.parse(Path(stablehlo.__file__).read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(branch.body)
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # marks a re-export
    assert {alias.name: node.module for node in imports for alias in node.names} == stablehlo._PUBLIC


@pytest.mark.parametrize("name", stablehlo.__all__)
def test_each_name_loads(name):
    assert getattr(stablehlo, name).__module__ == stablehlo._PUBLIC[name]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"has no attribute 'autocastt'; public names: Converted, Program, Report"):
        stablehlo.autocastt  # noqa: B018

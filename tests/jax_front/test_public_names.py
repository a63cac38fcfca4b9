"""The public names: type checkers see those that load at run time, from the same modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import xla_amp.jax as front


def test_type_checkers_see_the_names_that_load():
    tree = ast.parse(Path(front.__file__).read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(branch.body)
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # marks a re-export
    assert {alias.name: node.module for node in imports for alias in node.names} == front._PUBLIC


@pytest.mark.parametrize("name", front.__all__)
def test_each_name_loads(name):
    assert getattr(front, name).__module__ == front._PUBLIC[name]


def test_no_module_hides_a_public_name():
    """Importing ``xla_amp.jax.x`` binds the module as ``x``, also where a function has that name."""
    modules = {path.stem for path in Path(front.__file__).parent.glob("*.py")}
    assert modules.isdisjoint(front.__all__)


def test_the_names_are_listed_and_others_rejected():
    assert "autocast" in dir(front)
    with pytest.raises(AttributeError, match=r"autocasts.*public names: .*autocast"):
        _ = front.autocasts


@pytest.mark.parametrize(("use", "answer"), [("", ""), ("xla_amp.jax.autocast", "jax")])
def test_names_load_on_first_use(use, answer):
    program = f"import sys, xla_amp.jax\n{use}\nprint(*[name for name in ('jax', 'torch') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == answer

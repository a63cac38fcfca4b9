"""The public names: type checkers see those that load at run time, from the same modules, and no others."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import xla_amp
import xla_amp.jax
import xla_amp.stablehlo

PACKAGES = (xla_amp, xla_amp.jax, xla_amp.stablehlo)
NAMES = [
    pytest.param(package, name, id=f"{package.__name__}.{name}") for package in PACKAGES for name in package._PUBLIC
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_load(package: ModuleType):
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(branch.body)
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # marks a re-export
    seen = {alias.name: node.module for node in imports for alias in node.names}
    modules = {name: path.rpartition(".")[0] for name, path in getattr(package, "_MODULES", {}).items()}
    assert seen == {**package._PUBLIC, **modules}


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_each_name_loads(package: ModuleType, name: str):
    module = importlib.import_module(package._PUBLIC[name])
    assert getattr(package, name) is getattr(module, name)


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_each_name_and_its_methods_are_documented(package: ModuleType, name: str):
    value = getattr(package, name)
    names = [name for name, member in vars(value).items() if inspect.isfunction(member) and not name.startswith("_")]
    documented = {member: inspect.getdoc(getattr(value, member)) for member in names if isinstance(value, type)}
    assert inspect.getdoc(value)
    assert [member for member, text in documented.items() if not text] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_no_module_hides_a_public_name(package: ModuleType):
    """Importing ``xla_amp.jax.x`` binds the module as ``x``, also where a function has that name."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.isdisjoint(package._PUBLIC)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_names_are_listed_and_others_rejected(package: ModuleType):
    assert "autocast" in dir(package)
    with pytest.raises(AttributeError, match=r"has no attribute 'autocastt'; public names: .*autocast"):
        package.autocastt  # noqa: B018


@pytest.mark.parametrize(("use", "answer"), [("", ""), ("xla_amp.jax.autocast", "jax")])
def test_names_load_on_first_use(use: str, answer: str):
    program = f"import sys, xla_amp.jax\n{use}\nprint(*[name for name in ('jax', 'torch') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == answer

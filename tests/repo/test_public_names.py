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
import xla_amp.policy
import xla_amp.stablehlo
from xla_amp.common.renamed import table

PACKAGES = (xla_amp, xla_amp.jax, xla_amp.stablehlo)


def parsed(package: ModuleType) -> ast.Module:
    return ast.parse(Path(str(package.__file__)).read_text())


def declared(package: ModuleType) -> dict[str, str]:
    """Name that type checkers see -> the module that it is imported from."""
    (branch,) = (
        node for node in parsed(package).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(branch.body)
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # marks a re-export
    return {alias.name: str(node.module) for node in imports for alias in node.names}


MODULES = [name for name, module in declared(xla_amp).items() if module == "xla_amp"]
PUBLIC = {
    package: {name: module for name, module in declared(package).items() if module != "xla_amp"} for package in PACKAGES
}
NAMES = [
    pytest.param(package, name, id=f"{package.__name__}.{name}") for package in PACKAGES for name in PUBLIC[package]
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_load(package: ModuleType):
    assert set(package.__all__) - {"__version__"} == set(declared(package))


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_each_name_loads(package: ModuleType, name: str):
    module = importlib.import_module(PUBLIC[package][name])
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
    """Importing ``xla_amp.jax.x`` binds the module as ``x``; ``xla_amp.metrics`` is the object of that name itself."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    both = modules.intersection(PUBLIC[package])
    assert both == ({"metrics"} if package is xla_amp else set())
    for name in both:
        value = getattr(importlib.import_module(PUBLIC[package][name]), name)
        assert importlib.import_module(f"{package.__name__}.{name}") is value


def test_each_module_can_be_imported_by_its_documented_name():
    names = [*MODULES, "metrics"]
    lines = [f"import xla_amp.{name} as found\nassert found is xla_amp.{name}" for name in names]
    lines += ["from xla_amp.metrics import report, reset", "print(sorted(xla_amp.metrics())[0], report().split()[0])"]
    program = "import xla_amp\n" + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["compilations", "executions"]


@pytest.mark.parametrize("name", ["checkpoint", "syncfree", "torch_xla", "xla_model"])
def test_a_module_has_the_public_names_and_no_others(name: str):
    module = getattr(xla_amp, name)
    names = {each for each in dir(module) if not each.startswith("__")}
    implementation = sys.modules[f"xla_amp.{name}"]
    public = set(getattr(implementation, "__all__", names))
    assert names == public
    assert all(
        getattr(getattr(module, each), "__module__", "").startswith("xla_amp") for each in names if each.islower()
    )


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_names_are_listed_and_others_rejected(package: ModuleType):
    assert "autocast" in dir(package)
    with pytest.raises(AttributeError, match=r"has no attribute 'autocastt'; public names: .*autocast"):
        package.autocastt  # noqa: B018


def test_the_names_of_policies():
    imported = {node.asname for node in ast.walk(parsed(xla_amp.policy)) if isinstance(node, ast.alias)}
    assert sorted(each for each in imported if each and not each.startswith("_")) == xla_amp.policy.__all__
    assert all(inspect.getdoc(getattr(xla_amp.policy, name)) for name in xla_amp.policy.__all__)
    with pytest.raises(AttributeError, match=r"has no attribute 'overide'; public names: .*override"):
        xla_amp.policy.overide  # noqa: B018
    assert not hasattr(xla_amp.policy, "overide")


@pytest.mark.parametrize(("old", "new"), table().items())
def test_a_name_of_an_earlier_release_tells_the_new_one(old: str, new: str):
    package, _, name = old.rpartition(".")
    for program in (f"from {package} import {name}", f"import {package}\n{old}"):
        with pytest.raises(ImportError) as error:
            exec(program)
        assert str(error.value) == f"{old} -> {new}"
    if " " not in new:
        module, _, name = new.rpartition(".")
        assert getattr(importlib.import_module(module), name).__name__ == name


def test_the_guide_lists_the_earlier_names():
    page = Path(__file__).parents[2] / "docs" / "lists" / "names.md"
    _, _, section = page.read_text().partition("\n## Earlier names of xla_amp\n")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [(old.strip("`"), new.strip("`")) for old, new in rows] == list(table().items())

"""The public names: type checkers see those that load at run time, from the same modules, and no others."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import ROOT

import xla_amp
import xla_amp.jax
import xla_amp.policy
import xla_amp.stablehlo
from xla_amp import public_names
from xla_amp.errors import SkipLimitError
from xla_amp.stablehlo.conversion_report import ConversionReport
from xla_amp.tools.explain.on_pytorch import ExplainReport
from xla_amp.tools.monitor.history import History
from xla_amp.tools.overflow.report import OverflowReport

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


PUBLIC = {
    package: {name: module for name, module in declared(package).items() if module != "xla_amp"} for package in PACKAGES
}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_load(package: ModuleType):
    assert set(package.__all__) - {"__version__"} == set(declared(package))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_each_name_loads_and_is_documented_with_its_methods(package: ModuleType):
    for name, module in PUBLIC[package].items():
        value = getattr(package, name)
        assert value is getattr(importlib.import_module(module), name)
        assert inspect.getdoc(value), name
        if isinstance(value, type):
            methods = [each for each, found in vars(value).items() if inspect.isfunction(found) and each[0] != "_"]
            assert [each for each in methods if not inspect.getdoc(getattr(value, each))] == [], name


def test_the_reference_has_every_public_module():
    docs_hooks = pytest.importorskip("docs_hooks", reason="needs the extra docs")
    documented = {*docs_hooks.PACKAGES, *docs_hooks.MODULES}
    modules = {name for name in xla_amp.__all__ if isinstance(getattr(xla_amp, name), ModuleType)}
    assert {f"xla_amp.{name}" for name in modules} <= documented
    integrations = {f"xla_amp.integrations.{path.stem}" for path in (ROOT / "xla_amp/integrations").glob("[a-z]*.py")}
    parts = {"captured", "lightning_capture", "patches", "trainer_capture", "trainer_steps"}  # of the others
    assert integrations - {f"xla_amp.integrations.{name}" for name in parts} <= documented


def test_the_reference_begins_with_every_name_by_task():
    docs_hooks = pytest.importorskip("docs_hooks", reason="needs the extra docs")
    overview = (ROOT / "docs" / docs_hooks.OVERVIEW).read_text()
    named = set(re.findall(r"`(xla_amp[\w.]*)`", overview))
    names = {f"{package}.{name}" for package in docs_hooks.PACKAGES for name in docs_hooks.public_names(package)}
    front = {name for name in names if not name.startswith("xla_amp.tools.")}
    assert {*front, *docs_hooks.MODULES} - named == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_no_module_hides_a_public_name(package: ModuleType):
    """Importing ``xla_amp.jax.x`` binds the module as ``x``; ``xla_amp.metrics`` is the object of that name itself."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.intersection(PUBLIC[package]) == ({"metrics"} if package is xla_amp else set())


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


@pytest.mark.parametrize("package", [*PACKAGES, xla_amp.policy], ids=lambda package: package.__name__)
def test_the_names_are_listed_and_others_rejected(package: ModuleType):
    name = "override" if package is xla_amp.policy else "autocast"
    assert name in dir(package)
    assert not hasattr(package, f"{name}t")
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}t'; public names: .*{name}"):
        getattr(package, f"{name}t")


def owners() -> dict[str, object]:
    """What the rows of `LEFT` are attributes of: a module, or an object of a class."""
    skipped, report = SkipLimitError(3, 1.0), History([])
    made = {"SkipLimitError": skipped, "Report": report, "GradScaler": xla_amp.GradScaler("cpu")}
    made |= {kind.__name__: object.__new__(kind) for kind in (ConversionReport, ExplainReport, OverflowReport)}
    return made | {module.__name__: module for module in (xla_amp.checkpoint, xla_amp.jax, xla_amp.policy)}


@pytest.mark.parametrize("name", public_names.LEFT)
def test_a_name_that_has_left_says_what_to_write(name: str):
    owner, _, attribute = name.rpartition(".")
    with pytest.raises(AttributeError) as raised:
        getattr(owners()[owner], attribute)
    assert str(raised.value) == f"{name} has left: {public_names.LEFT[name]}"


def test_a_name_that_never_was_is_pythons_own_error():
    with pytest.raises(AttributeError, match=r"^'History' object has no attribute 'plott'$") as raised:
        _ = History([]).plott
    assert raised.value.name == "plott"


def test_the_names_of_policies():
    imported = {node.asname for node in ast.walk(parsed(xla_amp.policy)) if isinstance(node, ast.alias)}
    assert sorted(each for each in imported if each and not each.startswith("_")) == xla_amp.policy.__all__
    assert all(inspect.getdoc(getattr(xla_amp.policy, name)) for name in xla_amp.policy.__all__)
